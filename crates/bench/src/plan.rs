//! The border between what to send (workloads) and sending it (the client).

use std::time::Duration;

/// What a request asks to be continued.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// For `/v1/completions`.
    Text(String),
    /// For `/v1/completions`, as token ids.
    Tokens(Vec<u32>),
    /// For `/v1/chat/completions`: role and content of every message.
    Messages(Vec<(String, String)>),
}

/// One request to send.
#[derive(Debug, Clone, PartialEq)]
pub struct Planned {
    /// Place in the workload; names the request in results.
    pub index: usize,
    pub prompt: Prompt,
    /// Prompt tokens by our own count; None when only the server can tell.
    pub input_tokens: Option<u32>,
    /// `max_tokens` and, unless the workload lets answers end by themselves, `min_tokens`.
    pub output_tokens: u32,
    /// When the workload itself says when (a trace): after the run's start.
    pub at: Option<Duration>,
}

/// A source of requests. Pure: no clock, no I/O once it is made.
pub trait Workload: Send {
    /// The next request that waits for nobody's answer; None: no more of them.
    fn next(&mut self) -> Option<Planned>;

    /// Request `index` was answered with `text`: what follows it (the next turn
    /// of a conversation), and how long after the answer it is due.
    fn answered(&mut self, index: usize, text: &str) -> Option<(Duration, Planned)> {
        let _ = (index, text);
        None
    }

    /// How many requests there will be in all, if it is known.
    fn total(&self) -> Option<usize>;
}
