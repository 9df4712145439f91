//! Prepares a template's source for minijinja.
//!
//! * Jinja2 reads every line ending as a line feed.
//! * transformers adds the tag `{% generation %}`, which marks what the
//!   assistant said and prints its body. `{% with %}` does the same here: a
//!   scope of its own, the same text.
//! * A few escapes in strings mean something else in Python.

use std::borrow::Cow;

/// The source as minijinja has to see it to mean what it means to Jinja2.
pub(super) fn prepare(source: &str) -> String {
    let source = if source.contains('\r') {
        Cow::Owned(source.replace("\r\n", "\n").replace('\r', "\n"))
    } else {
        Cow::Borrowed(source)
    };
    let mut out = String::with_capacity(source.len());
    let mut rest = &*source;
    while let Some(start) = rest.find('{') {
        out.push_str(&rest[..start]);
        let tag = &rest[start..];
        let length = match tag.as_bytes().get(1) {
            Some(b'#') => tag.find("#}").map_or(tag.len(), |end| end + 2),
            Some(b'{') => end_of_code(tag, "}}"),
            Some(b'%') => end_of_block(tag),
            _ => 1,
        };
        push_tag(&mut out, &tag[..length]);
        rest = &tag[length..];
    }
    out.push_str(rest);
    out
}

fn push_tag(out: &mut String, tag: &str) {
    match block_content(tag) {
        Some("generation") => out.push_str(&tag.replacen("generation", "with", 1)),
        Some("endgeneration") => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
        _ if tag.starts_with("{#") || !tag.contains('\\') || is_raw(tag) => out.push_str(tag),
        _ => push_code(out, tag),
    }
}

/// The content of a block tag without its delimiters, if it is one.
fn block_content(tag: &str) -> Option<&str> {
    let inner = tag.strip_prefix("{%")?.strip_suffix("%}")?;
    let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner);
    let inner = inner.strip_suffix(['-', '+']).unwrap_or(inner);
    Some(inner.trim())
}

/// Whether a tag is a raw block, as [`end_of_block`] takes them: whole.
fn is_raw(tag: &str) -> bool {
    let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
    block_content(&tag[..end]) == Some("raw")
}

/// Length of a block tag; a raw block counts as one.
fn end_of_block(tag: &str) -> usize {
    if !is_raw(tag) {
        return end_of_code(tag, "%}");
    }
    let mut from = 2;
    while let Some(start) = tag[from..].find("{%") {
        let start = from + start;
        let end = start
            + tag[start..]
                .find("%}")
                .map_or(tag.len() - start, |end| end + 2);
        if block_content(&tag[start..end]) == Some("endraw") {
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

/// Appends code; backslashes stand in strings only.
fn push_code(out: &mut String, code: &str) {
    let mut rest = code;
    while let Some(start) = rest.find('\\') {
        out.push_str(&rest[..start]);
        let escape = &rest[start..];
        let length = push_escape(out, escape);
        rest = &escape[length..];
    }
    out.push_str(rest);
}

/// Appends one escape in minijinja's terms; returns its length.
fn push_escape(out: &mut String, escape: &str) -> usize {
    let Some(letter) = escape[1..].chars().next() else {
        out.push('\\');
        return 1;
    };
    let length = 1 + letter.len_utf8();
    match letter {
        '\n' => {}
        'a' => out.push_str("\\u0007"),
        'v' => out.push_str("\\u000b"),
        // Python keeps the backslash, minijinja does not.
        '/' => out.push_str("\\\\/"),
        'U' => {
            let code = escape
                .get(2..10)
                .and_then(|hex| u32::from_str_radix(hex, 16).ok());
            if let Some(c) = code.and_then(char::from_u32) {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
                return 10;
            }
            out.push_str("\\U");
        }
        _ => out.push_str(&escape[..length]),
    }
    length
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
            "generation {# {% generation %} \\a #}",
            "{{ '{% generation %}' }} \\a {{ \"}} {% generation %}\" }}",
            "{% raw %}{% generation %}{{ '\\a' }}{%- endraw %}",
            "{% if generation %}{% endif %}{% set generation = 1 %}",
            "{ % generation % } {",
            "{{ 'generation",
            "{{ '\\",
            "{% raw %}{%",
        ] {
            assert_eq!(prepare(source), source);
        }
    }

    #[test]
    fn escapes_mean_what_they_mean_in_python() {
        assert_eq!(
            prepare(r"{{ '\a\\a\U0001F642\/\n\d' }}"),
            r"{{ '\u0007\\a\ud83d\ude42\\/\n\d' }}"
        );
        assert_eq!(prepare("{% set x = 'a\\\nb' %}"), "{% set x = 'ab' %}");
        assert_eq!(prepare(r"{{ '\U00' }}"), r"{{ '\U00' }}");
    }

    #[test]
    fn line_endings_become_line_feeds() {
        assert_eq!(prepare("a\r\nb\rc\n"), "a\nb\nc\n");
    }
}
