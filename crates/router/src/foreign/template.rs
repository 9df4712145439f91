//! The chunks of a stream differ in their text: what surrounds it is compared, not parsed anew.

use std::borrow::Cow;
use std::ops::Range;

use memchr::memchr2;
use memchr::memmem::Finder;

/// Comparisons in a row that may fail before none is made any more: the stream has chunks that
/// differ in more than one text.
const MOST_MISSES: u32 = 8;

/// A chunk that was parsed, and where its text is. Of a stream without such chunks it stays empty.
#[derive(Debug, Default)]
pub struct Template {
    chunk: Vec<u8>,
    /// Without its quotes. Empty bounds at 0: there is no chunk yet.
    text: Range<usize>,
    misses: u32,
}

impl Template {
    /// The text of a chunk that is otherwise the same. `None`: it differs, or is no such chunk.
    pub fn text<'a>(&mut self, chunk: &'a [u8]) -> Option<Cow<'a, str>> {
        if self.text.start == 0 || self.misses >= MOST_MISSES {
            return None;
        }
        let text = self.compare(chunk);
        self.misses = if text.is_some() { 0 } else { self.misses + 1 };
        text
    }

    fn compare<'a>(&self, chunk: &'a [u8]) -> Option<Cow<'a, str>> {
        let (before, after) = (&self.chunk[..self.text.start], &self.chunk[self.text.end..]);
        let text = chunk.strip_prefix(before)?.strip_suffix(after)?;
        match memchr2(b'"', b'\\', text) {
            None if text.iter().any(|byte| *byte < b' ') => None,
            None => std::str::from_utf8(text).ok().map(Cow::Borrowed),
            // Not a text that ends earlier, and other fields behind it.
            Some(_) => {
                let quoted = &chunk[before.len() - 1..chunk.len() - after.len() + 1];
                serde_json::from_slice::<String>(quoted)
                    .ok()
                    .map(Cow::Owned)
            }
        }
    }

    /// Keeps a chunk whose text, a string's content as it is written, is at `text`.
    pub fn keep(&mut self, chunk: &[u8], text: Range<usize>) {
        if self.misses < MOST_MISSES {
            self.chunk.clear();
            self.chunk.extend_from_slice(chunk);
            self.text = text;
        }
    }

    /// Keeps a chunk by the first of these fields, each written as `"name":`, that is a string
    /// without an escape.
    pub fn keep_by(&mut self, chunk: &[u8], fields: &[Finder<'_>]) {
        let found = fields.iter().find_map(|field| {
            let value = field.find(chunk)? + field.needle().len();
            let start = value + chunk[value..].iter().position(|byte| *byte != b' ')?;
            let text = chunk[start..].strip_prefix(b"\"")?;
            let length = memchr2(b'"', b'\\', text).filter(|at| text[*at] == b'"')?;
            Some(start + 1..start + 1 + length)
        });
        if let Some(text) = found {
            self.keep(chunk, text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: &str = r#"{"id":"a","choices":[{"delta":{"content":"TEXT"},"finish":null}]}"#;

    fn chunk(text: &str) -> Vec<u8> {
        CHUNK.replace("TEXT", text).into_bytes()
    }

    fn template() -> Template {
        let mut template = Template::default();
        assert_eq!(template.text(&chunk("a")), None);
        template.keep_by(&chunk("a"), &[Finder::new(r#""content":"#)]);
        template
    }

    #[test]
    fn chunks_that_differ_in_their_text_alone_have_that() {
        let mut template = template();
        for (written, text) in [
            ("b", "b"),
            ("", ""),
            (" word", " word"),
            ("ü€", "ü€"),
            (r#"\n\"\u00fc\\"#, "\n\"ü\\"),
        ] {
            assert_eq!(template.text(&chunk(written)).as_deref(), Some(text));
        }
    }

    #[test]
    fn others_are_parsed() {
        let known = String::from_utf8(chunk("b")).unwrap();
        let more = r#"b"},"x":{"y":"b"#;
        let others = [
            known.replace(r#""a""#, r#""c""#),
            known.replace("null", r#""stop""#),
            known.replace(r#"{"delta":"#, r#"{"i":1,"delta":"#),
            CHUNK.replace("TEXT", more),
            // The quote behind it is one of the text.
            CHUNK.replace("TEXT", r"b\"),
            CHUNK.replace("TEXT", "b\n"),
            CHUNK.replace("TEXT", r"\x"),
            String::new(),
            "[DONE]".to_owned(),
            // Its beginning and its end overlap.
            known.replace(r#"b""#, ""),
        ];
        for other in others {
            assert_eq!(template().text(other.as_bytes()), None, "{other}");
        }
        assert_eq!(template().text(b"{\"content\":\"\xff\"}"), None);
        let mut not_text = chunk("b");
        let at = not_text.windows(3).position(|three| three == b"\"b\"");
        not_text[at.unwrap() + 1] = 0xff;
        assert_eq!(template().text(&not_text), None);
    }

    #[test]
    fn where_all_chunks_differ_they_are_not_compared() {
        let mut template = template();
        let mut text_after = |misses: u32| {
            for _ in 0..misses {
                assert_eq!(template.text(b"{}"), None);
            }
            // Of no use once none is compared.
            template.keep(&chunk("b"), 42..43);
            template.text(&chunk("c")).is_some()
        };
        for _ in 0..2 {
            assert!(text_after(MOST_MISSES - 1));
        }
        assert!(!text_after(MOST_MISSES));
        assert!(!text_after(0));
    }

    #[test]
    fn a_text_is_found_by_its_field() {
        let fields = [Finder::new(r#""content":"#), Finder::new(r#""text":"#)];
        for (chunk, other) in [
            (r#"{"text": "a","n":1}"#, r#"{"text": "b","n":1}"#),
            (
                r#"{"content":null,"text":"a"}"#,
                r#"{"content":null,"text":""}"#,
            ),
        ] {
            let mut template = Template::default();
            template.keep_by(chunk.as_bytes(), &fields);
            assert!(template.text(other.as_bytes()).is_some(), "{chunk}");
        }
        for chunk in [
            r#"{"text":7}"#,
            r#"{"text":"a\n"}"#,
            r#"{"text":"#,
            r#"{"text":""#,
            "{}",
        ] {
            let mut template = Template::default();
            template.keep_by(chunk.as_bytes(), &fields);
            assert!(template.text(chunk.as_bytes()).is_none(), "{chunk}");
        }
    }
}
