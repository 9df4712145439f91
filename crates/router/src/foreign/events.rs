//! Server-sent events as workers write them: cut where an event ends, otherwise unread.

use std::sync::LazyLock;

use axum::body::Bytes;
use memchr::memmem::Finder;
use memchr::{memchr2, memrchr2_iter};
use serde::Deserialize;

use super::request::Usage;

/// Built once: that takes as long as the search of an event.
static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(br#""usage":"#));
static ABORT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(br#""abort""#));
static CHOICES: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(br#""choices":"#));

/// An event that is larger is no event.
const MOST_BYTES: usize = 64 << 20;

/// Bytes that do not end an event yet.
#[derive(Debug, Default)]
pub struct Splitter(Vec<u8>);

/// The worker sends an event without end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an event has more than {MOST_BYTES} bytes, the limit")]
pub struct TooLong;

impl Splitter {
    /// Takes what was received; gives back the whole events so far, as they were received.
    pub fn push(&mut self, bytes: Bytes) -> Result<Bytes, TooLong> {
        // An end may lie across two parts.
        let known = self.0.len().saturating_sub(3);
        if self.0.is_empty() {
            let end = last_end(&bytes);
            self.0.extend_from_slice(&bytes[end..]);
            return Ok(bytes.slice(..end));
        }
        self.0.extend_from_slice(&bytes);
        let whole = match last_end(&self.0[known..]) {
            0 => Vec::new(),
            end => {
                let rest = self.0.split_off(known + end);
                std::mem::replace(&mut self.0, rest)
            }
        };
        match self.0.len() {
            ..=MOST_BYTES => Ok(whole.into()),
            _ => Err(TooLong),
        }
    }
}

/// Behind the last empty line; 0 if there is none. Lines end with LF, CR or both; the LF of an
/// empty line's CR may come later, as an empty line of its own, which is no event.
fn last_end(bytes: &[u8]) -> usize {
    let mut ends = memrchr2_iter(b'\n', b'\r', bytes).map(|at| at + 1);
    let is_empty_line = |end: &usize| {
        let empty = [&b"\n\n"[..], b"\n\r\n", b"\n\r", b"\r\r"];
        empty.iter().any(|empty| bytes[..*end].ends_with(empty))
    };
    ends.find(is_empty_line).unwrap_or(0)
}

/// Lines with their ends.
pub fn lines(events: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = events;
    std::iter::from_fn(move || {
        let end = match memchr2(b'\n', b'\r', rest) {
            Some(at) if rest[at..].starts_with(b"\r\n") => at + 2,
            Some(at) => at + 1,
            None => rest.len(),
        };
        let line = rest.split_off(..end)?;
        (!line.is_empty()).then_some(line)
    })
}

/// The data of whole events, one after another; comments have none.
pub fn data(events: &[u8]) -> impl Iterator<Item = &[u8]> {
    located(events).map(|(_, data)| data)
}

/// The same, each with where its line begins.
pub fn located(events: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let mut at = 0;
    lines(events).filter_map(move |line| {
        let start = at;
        at += line.len();
        Some((start, line.strip_prefix(b"data:")?.trim_ascii()))
    })
}

pub const DONE: &[u8] = b"[DONE]";

/// What an event's data is, as far as it matters on the way.
#[derive(Debug, PartialEq)]
pub enum Data<'a> {
    Done,
    Error(ErrorDetail<'a>),
    /// One with output, which counts as a token.
    Token(Option<Usage>),
    /// The role of the message, or the usage at the end.
    Other(Option<Usage>),
}

/// A worker's error object.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ErrorDetail<'a> {
    #[serde(borrow)]
    pub message: std::borrow::Cow<'a, str>,
    pub code: Option<serde_json::Value>,
}

impl ErrorDetail<'_> {
    /// The HTTP status that it would have had, if it says one.
    pub fn status(&self) -> Option<u16> {
        let code = self.code.as_ref()?;
        let code = code.as_u64().or_else(|| code.as_str()?.parse().ok())?;
        u16::try_from(code).ok()
    }
}

impl<'a> Data<'a> {
    /// `begun`: output has come before. Only what is needed is parsed: an error, a usage, and
    /// what comes before the first output.
    pub fn of(data: &'a [u8], begun: bool) -> Self {
        if data == DONE {
            return Self::Done;
        }
        if let Some(error) = error_of(data) {
            return Self::Error(error);
        }
        if ABORT.find(data).is_some()
            && let Some(error) = aborted(data)
        {
            return Self::Error(error);
        }
        let usage = has_value(data, &USAGE, b"{");
        let usage = usage.then(|| usage_of(data)).flatten();
        let output = match begun {
            true => !has_value(data, &CHOICES, b"[]"),
            false => has_output(data),
        };
        match output {
            true => Self::Token(usage),
            false => Self::Other(usage),
        }
    }
}

/// A worker's error: `{"error":{...}}` or `{"error":"..."}`, or of vLLM's older versions
/// `{"object":"error",...}`. Null is none.
fn error_of(data: &[u8]) -> Option<ErrorDetail<'_>> {
    #[derive(Deserialize)]
    struct Failed<'a> {
        #[serde(borrow)]
        error: Option<Given<'a>>,
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Given<'a> {
        Detail(#[serde(borrow)] ErrorDetail<'a>),
        Text(String),
    }
    let first = data.strip_prefix(b"{")?.trim_ascii_start();
    if first.starts_with(br#""error""#) {
        return match serde_json::from_slice::<Failed<'_>>(data) {
            Ok(failed) => Some(match failed.error? {
                Given::Detail(detail) => detail,
                Given::Text(text) => ErrorDetail {
                    message: text.into(),
                    code: None,
                },
            }),
            Err(_) => Some(ErrorDetail::default()),
        };
    }
    let value = first.strip_prefix(br#""object""#)?.trim_ascii_start();
    let value = value.strip_prefix(b":")?.trim_ascii_start();
    let is_error = value.starts_with(br#""error""#);
    is_error.then(|| serde_json::from_slice(data).unwrap_or_default())
}

/// The `usage` of an answer or of a chunk.
pub fn usage_of(json: &[u8]) -> Option<Usage> {
    #[derive(Deserialize)]
    struct Counted {
        usage: Option<Usage>,
    }
    serde_json::from_slice::<Counted>(json).ok()?.usage
}

/// What SGLang's `/generate` streams in place of an answer that it cannot give: a finish with the
/// status that the answer would have had.
fn aborted(data: &[u8]) -> Option<ErrorDetail<'_>> {
    #[derive(Deserialize)]
    struct Chunk<'a> {
        #[serde(borrow)]
        meta_info: Meta<'a>,
    }
    #[derive(Deserialize)]
    struct Meta<'a> {
        #[serde(borrow)]
        finish_reason: Abort<'a>,
    }
    #[derive(Deserialize)]
    struct Abort<'a> {
        #[serde(rename = "type")]
        kind: &'a str,
        #[serde(borrow, default)]
        message: std::borrow::Cow<'a, str>,
        status_code: u16,
    }
    let chunk = serde_json::from_slice::<Chunk<'_>>(data).ok()?;
    let reason = chunk.meta_info.finish_reason;
    (reason.kind == "abort").then(|| ErrorDetail {
        message: reason.message,
        code: Some(reason.status_code.into()),
    })
}

/// Whether a chunk is more than the role of the message.
fn has_output(data: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Chunk {
        choices: Option<Vec<ChunkChoice>>,
    }
    #[derive(Deserialize)]
    struct ChunkChoice {
        delta: Option<serde_json::Map<String, serde_json::Value>>,
        finish_reason: Option<serde_json::Value>,
    }
    let Ok(chunk) = serde_json::from_slice::<Chunk>(data) else {
        return true;
    };
    let Some(choices) = chunk.choices else {
        return true;
    };
    choices.iter().any(|choice| {
        let Some(delta) = &choice.delta else {
            return true;
        };
        let empty = |value: &serde_json::Value| value.is_null() || value == "";
        let new = delta
            .iter()
            .any(|(name, value)| name != "role" && !empty(value));
        new || choice
            .finish_reason
            .as_ref()
            .is_some_and(|reason| !reason.is_null())
    })
}

/// Whether a field of some object has a value that begins so.
fn has_value(data: &[u8], field: &Finder<'_>, beginning: &[u8]) -> bool {
    field.find_iter(data).any(|at| {
        let value = data[at + field.needle().len()..].trim_ascii_start();
        value.starts_with(beginning)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_out_whole_however_they_are_cut() {
        let lines = "data: {\"a\":1}\n\n: note\n\ndata: {\"b\":2}\n\ndata: [DONE]\n\n";
        let mixed = lines.replace("2}\n\n", "2}\r\n\r\n");
        let others = ["\n", "\r\n", "\r"].map(|end| lines.replace('\n', end));
        let sizes = |stream: String| (1..stream.len()).map(move |size| (stream.clone(), size));
        for (stream, size) in others.into_iter().chain([mixed]).flat_map(sizes) {
            let mut splitter = Splitter::default();
            let mut all = Vec::new();
            for part in stream.as_bytes().chunks(size) {
                let whole = splitter.push(Bytes::copy_from_slice(part)).expect("short");
                assert!(whole.last().is_none_or(|end| b"\r\n".contains(end)));
                assert!(data(&whole).all(|d| d.ends_with(b"}") || d == DONE));
                assert_eq!(last_end(&splitter.0), 0, "a whole event waits");
                all.extend_from_slice(&whole);
            }
            assert!([&b""[..], b"\n"].contains(&&*splitter.0), "{stream:?}");
            all.append(&mut splitter.0);
            assert_eq!(all, stream.as_bytes(), "in parts of {size}");
            let found: Vec<_> = data(&all).collect();
            assert_eq!(found, [&b"{\"a\":1}"[..], b"{\"b\":2}", DONE]);
            let starts = located(&all).map(|(start, _)| &all[start..start + 5]);
            assert!(starts.eq([b"data:"; 3]));
        }
    }

    #[test]
    fn an_event_without_end_is_refused() {
        let mut splitter = Splitter(vec![b'd'; MOST_BYTES - 1]);
        assert_eq!(splitter.push(Bytes::from("d")), Ok(Bytes::new()));
        assert_eq!(splitter.push(Bytes::from("d")), Err(TooLong));
    }

    #[test]
    fn a_large_event_is_not_copied_for_each_of_its_parts() {
        let mut splitter = Splitter(Vec::with_capacity(1 << 10));
        splitter.0.push(b'd');
        let at = splitter.0.as_ptr();
        for _ in 0..10 {
            assert_eq!(splitter.push(Bytes::from("part")), Ok(Bytes::new()));
        }
        assert_eq!(splitter.0.as_ptr(), at);
        let whole = splitter.push(Bytes::from("\n\nda")).expect("whole");
        assert_eq!((whole.len(), &*splitter.0), (43, &b"da"[..]));
    }

    #[test]
    fn only_what_matters_is_read() {
        let role =
            br#"{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;
        assert_eq!(Data::of(role, false), Data::Other(None));
        let text = br#"{"choices":[{"delta":{"content":"a"},"finish_reason":null}]}"#;
        assert_eq!(Data::of(text, false), Data::Token(None));
        assert_eq!(
            Data::of(br#"{"choices":[{"text":"a"}]}"#, false),
            Data::Token(None)
        );
        assert_eq!(
            Data::of(br#"{"text":"a","meta_info":{}}"#, false),
            Data::Token(None)
        );
        let usage = br#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}"#;
        let Data::Other(Some(usage)) = Data::of(usage, true) else {
            panic!("a usage");
        };
        assert_eq!((usage.prompt_tokens, usage.completion_tokens), (7, 2));
        assert_eq!(Data::of(DONE, true), Data::Done);
        let abort =
            br#"{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"no \"KV\"",
            "status_code":500}}}"#;
        let Data::Error(error) = Data::of(abort, false) else {
            panic!("an error");
        };
        assert_eq!((&*error.message, error.status()), ("no \"KV\"", Some(500)));
        // What a client stops has no status, and a text may say anything.
        for text in [
            &br#"{"text":"a","meta_info":{"finish_reason":{"type":"abort","message":""}}}"#[..],
            br#"{"text":"\"abort\"","meta_info":{"finish_reason":null}}"#,
        ] {
            assert_eq!(Data::of(text, true), Data::Token(None));
        }
        for error in [
            &br#"{"error": {"message": "no \"room\"", "type": "x", "code": 500}}"#[..],
            br#"{ "error":{"message":"no \"room\"","code":"500"}}"#,
            br#"{"object":"error","message":"no \"room\"","type":"x","param":null,"code":500}"#,
            br#"{"object": "error", "message": "no \"room\"", "code": 500}"#,
        ] {
            let Data::Error(error) = Data::of(error, true) else {
                panic!("an error");
            };
            let found = (&*error.message, error.status());
            assert_eq!(found, ("no \"room\"", Some(500)));
        }
        let Data::Error(error) = Data::of(br#"{"error":"no room"}"#, true) else {
            panic!("an error");
        };
        assert_eq!((&*error.message, error.status()), ("no room", None));
        for output in [
            &br#"{"object":"text_completion","choices":[{"text":"\"error\""}]}"#[..],
            br#"{"error":null,"choices":[{"text":"a"}]}"#,
        ] {
            assert_eq!(Data::of(output, true), Data::Token(None));
        }
    }
}
