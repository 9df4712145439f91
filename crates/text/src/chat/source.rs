//! Prepares a template's source for minijinja.
//!
//! Jinja2 reads every line ending as a line feed, and transformers adds the
//! tag `{% generation %}`, which marks what the assistant said and prints its
//! body. `{% with %}` does the same here: a scope of its own, the same text.

/// The source with line feeds only and `generation` written as `with`.
pub(super) fn prepare(source: &str) -> String {
    let source = if source.contains('\r') {
        source.replace("\r\n", "\n").replace('\r', "\n")
    } else {
        source.to_owned()
    };
    if !source.contains("generation") {
        return source;
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(start) = rest.find('{') {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let length = match tag.as_bytes().get(1) {
            Some(b'#') => tag.find("#}").map_or(tag.len(), |end| end + 2),
            Some(b'{') => end_of_code(tag, "}}"),
            Some(b'%') => end_of_block(tag),
            _ => 1,
        };
        let (tag, after) = tag.split_at(length);
        match marker(tag) {
            Some((name, replacement)) => out.push_str(&tag.replacen(name, replacement, 1)),
            None => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Whether a `{% ... %}` is one of the marks, and what replaces its name.
fn marker(tag: &str) -> Option<(&'static str, &'static str)> {
    match tag_name(tag)? {
        "generation" => Some(("generation", "with")),
        "endgeneration" => Some(("endgeneration", "endwith")),
        _ => None,
    }
}

/// The content of a block tag without its delimiters, if it is one.
fn tag_name(tag: &str) -> Option<&str> {
    let inner = tag.strip_prefix("{%")?.strip_suffix("%}")?;
    let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner);
    let inner = inner.strip_suffix(['-', '+']).unwrap_or(inner);
    Some(inner.trim())
}

/// Length of a block tag; a raw block counts as one.
fn end_of_block(tag: &str) -> usize {
    let end = end_of_code(tag, "%}");
    if tag_name(&tag[..end]) != Some("raw") {
        return end;
    }
    let mut from = end;
    while let Some(start) = tag[from..].find("{%") {
        let start = from + start;
        let end = start
            + tag[start..]
                .find("%}")
                .map_or(tag.len() - start, |end| end + 2);
        if tag_name(&tag[start..end]) == Some("endraw") {
            return end;
        }
        from = start + 2;
    }
    tag.len()
}

/// Length up to and with `close`, which may stand in strings without ending it.
fn end_of_code(tag: &str, close: &str) -> usize {
    let bytes = tag.as_bytes();
    let mut quote = None;
    let mut at = 2;
    while at < bytes.len() {
        match (quote, bytes[at]) {
            (Some(_), b'\\') => at += 1,
            (Some(open), byte) if byte == open => quote = None,
            (None, byte @ (b'"' | b'\'')) => quote = Some(byte),
            (None, _) if bytes[at..].starts_with(close.as_bytes()) => return at + close.len(),
            _ => {}
        }
        at += 1;
    }
    bytes.len()
}

#[cfg(test)]
mod unit_tests {
    use super::prepare;

    #[test]
    fn generation_becomes_a_scope_with_its_whitespace_control() {
        let source = "{%- generation -%}\n{{ x }}{%+ endgeneration %}";
        assert_eq!(prepare(source), "{%- with -%}\n{{ x }}{%+ endwith %}");
    }

    #[test]
    fn only_tags_are_touched() {
        for source in [
            "generation {# {% generation %} #}",
            "{{ '{% generation %}' }} \\ {{ \"}} {% generation %}\" }}",
            "{% raw %}{% generation %}{%- endraw %}",
            "{% if generation %}{% endif %}{% set generation = 1 %}",
            "{ % generation % } {",
            "{{ 'generation",
        ] {
            assert_eq!(prepare(source), source);
        }
    }

    #[test]
    fn line_endings_become_line_feeds() {
        assert_eq!(prepare("a\r\nb\rc\n"), "a\nb\nc\n");
    }
}
