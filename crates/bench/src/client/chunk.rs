//! One event of a streamed answer, read without copying what need not be.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::failure::{Failure, quote};
use crate::phases::Phases;

/// The end of a stream.
const DONE: &[u8] = b"[DONE]";

/// What one event said.
#[derive(Debug, Default, PartialEq)]
pub struct Said<'a> {
    pub text: Option<Cow<'a, str>>,
    pub reasoning: Option<Cow<'a, str>>,
    /// Whether the answer is finished.
    pub finished: bool,
    /// Whether the event had a choice at all.
    pub choice: bool,
    pub usage: Option<Usage>,
    /// Boxed, for it is large and comes once.
    pub phases: Option<Box<Phases>>,
}

/// Tokens up to an event.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub struct Usage {
    #[serde(default)]
    pub prompt_tokens: u32,
    #[serde(default)]
    pub completion_tokens: u32,
}

/// What `data` says; None at the stream's end.
///
/// # Errors
/// `ErrorEvent` for an error, `BadEvent` for what is no chunk.
pub fn read(data: &[u8]) -> Result<Option<Said<'_>>, Failure> {
    if data == DONE {
        return Ok(None);
    }
    let bad = |reason: String| Failure::BadEvent {
        event: quote(data),
        reason,
    };
    // One check of the whole is cheaper than one for each string.
    let text = str::from_utf8(data).map_err(|error| bad(error.to_string()))?;
    let event: Event = serde_json::from_str(text).map_err(|error| bad(error.to_string()))?;
    if let Some(error) = event.error {
        return Err(Failure::ErrorEvent {
            message: message(&error),
        });
    }
    let mut said = Said {
        usage: event.usage,
        phases: event.timings.filter(|phases| **phases != Phases::default()),
        ..Said::default()
    };
    if let Some(choice) = event.choices.into_iter().flatten().next() {
        let delta = choice.delta.unwrap_or_default();
        said.choice = true;
        said.text = choice.text.or(delta.content).map(|text| text.0);
        said.reasoning = delta.reasoning.or(delta.reasoning_content).map(|t| t.0);
        said.finished = choice.finish_reason.is_some();
    }
    Ok(Some(said))
}

fn message(error: &Value) -> String {
    let text = error.get("message").and_then(Value::as_str);
    quote(text.unwrap_or(&error.to_string()).as_bytes())
}

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow, default)]
    choices: Option<Vec<Choice<'a>>>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    timings: Option<Box<Phases>>,
    #[serde(default)]
    error: Option<Box<Value>>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    text: Option<Text<'a>>,
    #[serde(borrow, default)]
    delta: Option<Delta<'a>>,
    #[serde(default)]
    finish_reason: Option<IgnoredAny>,
}

#[derive(Default, Deserialize)]
struct Delta<'a> {
    #[serde(borrow, default)]
    content: Option<Text<'a>>,
    #[serde(borrow, default)]
    reasoning: Option<Text<'a>>,
    /// The older name; some servers send both.
    #[serde(borrow, default)]
    reasoning_content: Option<Text<'a>>,
}

/// Borrowed unless it has escapes; inside an option serde borrows no plain `Cow`.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

#[cfg(test)]
mod tests {
    use super::*;

    fn said(data: &str) -> Said<'_> {
        read(data.as_bytes()).unwrap().unwrap()
    }

    #[test]
    fn completions_and_chats_are_read_alike() {
        let completion = said(
            r#"{"id":"x","choices":[{"index":0,"text":"a b","finish_reason":null}],"usage":null}"#,
        );
        assert!(matches!(completion.text, Some(Cow::Borrowed("a b"))));
        assert!(completion.choice && !completion.finished && completion.usage.is_none());
        let chat = said(
            r#"{"choices":[{"delta":{"role":"assistant","content":"\n"},"finish_reason":"stop"}]}"#,
        );
        assert_eq!(chat.text.as_deref(), Some("\n"));
        assert!(chat.finished);
        let thought = said(r#"{"choices":[{"delta":{"reasoning_content":"hm","content":null}}]}"#);
        assert_eq!(
            (thought.text, thought.reasoning.as_deref()),
            (None, Some("hm"))
        );
    }

    #[test]
    fn usage_and_phases_come_without_choices() {
        let last = said(
            r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":0}},"timings":{"queue_ms":1.5,"prefill_worker":"p0"}}"#,
        );
        assert!(!last.choice);
        assert_eq!(last.usage.unwrap().completion_tokens, 5);
        assert_eq!(last.phases.unwrap().queue_ms, Some(1.5));
        let null = said(r#"{"choices":null,"usage":{"completion_tokens":5}}"#);
        assert_eq!(null.usage.unwrap().completion_tokens, 5);
        // Another server's object of the same name.
        let other = said(r#"{"choices":[],"timings":{"predicted_ms":3.0}}"#);
        assert_eq!(other.phases, None);
    }

    #[test]
    fn ends_errors_and_nonsense_are_told_apart() {
        assert_eq!(read(b"[DONE]"), Ok(None));
        let message = |data: &str| match read(data.as_bytes()) {
            Err(Failure::ErrorEvent { message }) => message,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            message(r#"{"error":{"message":"no KV","code":500}}"#),
            "no KV"
        );
        assert_eq!(message(r#"{"error":"plain"}"#), "\"plain\"");
        assert!(matches!(read(b"<html>"), Err(Failure::BadEvent { .. })));
    }
}
