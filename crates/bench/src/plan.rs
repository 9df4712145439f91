//! The border between what to send (workloads) and sending it (the client).

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use serde::Serialize;

use crate::tokens::Segment;

/// Which of the two OpenAI calls a run makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
}

/// How prompts are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptForm {
    /// Token ids (needs --tokenizer; /v1/completions only).
    Tokens,
    /// Text that has exactly so many tokens (needs --tokenizer).
    Text,
    /// One common word per token; the server counts.
    Words,
    /// Lengths and what prompts share, without content: nothing is sent.
    #[value(skip)]
    Lengths,
}

impl fmt::Display for PromptForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tokens => "token ids",
            Self::Text => "text",
            Self::Words => "words",
            Self::Lengths => "lengths",
        })
    }
}

/// What a request asks to be continued.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// For `/v1/completions`.
    Text(String),
    /// For `/v1/completions`, as token ids.
    Tokens(Vec<u32>),
    /// For `/v1/chat/completions`: role and content of every message.
    Messages(Vec<(String, String)>),
    /// Of a request that is simulated, not sent.
    Segments(Vec<Segment>),
}

impl Prompt {
    /// What it takes in memory, about.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(tokens) => size_of_val(tokens.as_slice()),
            Self::Segments(segments) => size_of_val(segments.as_slice()),
            Self::Messages(messages) => messages.iter().map(|(_, content)| content.len()).sum(),
        }
    }
}

/// One request to send.
#[derive(Debug, Clone, PartialEq)]
pub struct Planned {
    /// Place in the workload; names the request in results.
    pub index: usize,
    pub prompt: Prompt,
    /// Prompt tokens by our own count; None when only the server can tell.
    pub input_tokens: Option<u32>,
    /// `max_tokens`.
    pub output_tokens: u32,
    /// The answer must have all `output_tokens` (`min_tokens`, `ignore_eos`);
    /// false lets it end by itself.
    pub exact_output: bool,
    /// When the workload itself says when (a trace): after the run's start.
    pub at: Option<Duration>,
}

/// A source of requests. Pure: no clock, no I/O once it is made.
pub trait Workload: Send {
    /// A request to be sent and answered, unmeasured, before the run starts;
    /// asked for until None. Such requests fill the server's prefix cache.
    fn warm_up(&mut self) -> Option<Planned> {
        None
    }

    /// The next request that waits for nobody's answer; None: no more of them.
    fn next(&mut self) -> Option<Planned>;

    /// Request `index` was answered with `text`: what follows it (the next turn
    /// of a conversation), and how long after the answer it is due.
    fn answered(&mut self, index: usize, text: &str) -> Option<(Duration, Planned)> {
        let _ = (index, text);
        None
    }

    /// Whether requests follow others whose prompts they begin with.
    fn has_turns(&self) -> bool {
        false
    }

    /// How many requests there will be in all, warm-up apart, if it is known.
    /// A conversation with a failed turn ends early, so it is an upper bound.
    fn total(&self) -> Option<usize>;
}
