//! What a fake server is asked, and what it does then.

use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::Value;

/// A request, as far as scripts care.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Asked {
    /// How many requests came before.
    pub number: usize,
    pub chat: bool,
    /// Words of text, or token ids.
    pub prompt_tokens: u32,
    pub max_tokens: u32,
    pub stream: bool,
    pub include_usage: bool,
    pub continuous_usage: bool,
}

/// What is done for a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    pub status: u16,
    pub content_type: &'static str,
    /// Before the status line.
    pub delay: Duration,
    pub steps: Vec<Step>,
}

/// Part of sending a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// So long after the step before.
    Wait(Duration),
    Send(Bytes),
    /// Break the connection.
    Break,
    /// Send nothing more, and do not end.
    Hang,
}

impl Reply {
    /// An event stream.
    pub fn stream(steps: Vec<Step>) -> Self {
        Self {
            status: 200,
            content_type: "text/event-stream; charset=utf-8",
            delay: Duration::ZERO,
            steps,
        }
    }

    /// A JSON document.
    pub fn json(status: u16, document: &Value) -> Self {
        Self {
            status,
            content_type: "application/json",
            delay: Duration::ZERO,
            steps: vec![Step::Send(document.to_string().into())],
        }
    }
}

#[derive(Deserialize)]
struct Fields {
    #[serde(default)]
    prompt: Value,
    #[serde(default)]
    messages: Value,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    #[serde(default)]
    stream: bool,
    #[serde(default)]
    stream_options: StreamOptions,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: bool,
    continuous_usage_stats: bool,
}

impl Asked {
    /// Reads a request's body.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(number: usize, chat: bool, body: &[u8]) -> Result<Self, serde_json::Error> {
        let fields: Fields = serde_json::from_slice(body)?;
        Ok(Self {
            number,
            chat,
            prompt_tokens: words(&fields.prompt) + words(&fields.messages),
            max_tokens: fields
                .max_completion_tokens
                .or(fields.max_tokens)
                .unwrap_or(16),
            stream: fields.stream,
            include_usage: fields.stream_options.include_usage,
            continuous_usage: fields.stream_options.continuous_usage_stats,
        })
    }
}

fn words(prompt: &Value) -> u32 {
    match prompt {
        Value::String(text) => text.split_whitespace().count() as u32,
        Value::Number(_) => 1,
        Value::Array(parts) => parts.iter().map(words).sum(),
        Value::Object(message) => message.get("content").map_or(0, words),
        _ => 0,
    }
}
