//! Who sends requests, and what is known of each at the end.

use std::sync::Arc;

use crate::time::Time;

/// One request of a client.
#[derive(Debug, Clone)]
pub struct Request {
    /// Names the request in results.
    pub index: usize,
    pub due: Time,
    pub prompt_tokens: u32,
    /// The answer has all of them.
    pub output_tokens: u32,
    /// Names of the chunks of 128 tokens that the prompt begins with: prompts with equal names
    /// begin alike. Empty: it shares nothing.
    pub chunks: Arc<[u64]>,
    pub tenant: Arc<str>,
    /// Less goes first.
    pub priority: i32,
}

impl Request {
    /// A request that shares nothing with others.
    pub fn new(index: usize, due: Time, prompt_tokens: u32, output_tokens: u32) -> Self {
        Self {
            index,
            due,
            prompt_tokens,
            output_tokens,
            chunks: Arc::default(),
            tenant: "".into(),
            priority: 0,
        }
    }
}

/// A source of requests.
pub trait Clients {
    /// The next request that is due whatever happens to others, in the order of times.
    fn next(&mut self) -> Option<Request>;

    /// A request is over: one more that follows it.
    fn over(&mut self, index: usize, at: Time) -> Option<Request> {
        let _ = (index, at);
        None
    }

    /// Names of chunks of prompts that were served before the run: workers hold them, each prompt's
    /// in the order of the prompt, the last one longest. `most`: chunks that there is room for.
    fn held(&mut self, most: usize) -> Vec<Arc<[u64]>> {
        let _ = most;
        Vec::new()
    }
}

impl<I: Iterator<Item = Request>> Clients for I {
    fn next(&mut self) -> Option<Request> {
        Iterator::next(self)
    }
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    pub index: usize,
    pub due: Time,
    /// Later than due where the client has a limit of requests in flight.
    pub sent: Time,
    pub admitted: Option<Time>,
    pub first: Option<Time>,
    pub second: Option<Time>,
    pub end: Time,
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub output_tokens: u32,
    /// The workers of its last attempt, in the order of the configuration.
    pub prefill: u32,
    pub decode: u32,
    /// Times it was placed again.
    pub retries: u32,
    /// Of the last attempt: submitted to first scheduled, in seconds.
    pub queue_s: f64,
    /// From the end of its prompt until it could decode.
    pub exposed_s: f64,
    /// From the first block ordered to the last one there.
    pub transfer_s: f64,
    pub failure: Option<String>,
    /// Of every token, where they are kept.
    pub token_times: Vec<Time>,
    /// The longest time between two tokens, where it was measured; see [`Outcome::longest_gap_s`].
    pub measured_gap_s: Option<f64>,
}

impl Outcome {
    pub fn new(request: &Request, sent: Time) -> Self {
        Self {
            index: request.index,
            due: request.due,
            sent,
            admitted: None,
            first: None,
            second: None,
            end: sent,
            prompt_tokens: request.prompt_tokens,
            cached_tokens: 0,
            output_tokens: 0,
            prefill: u32::MAX,
            decode: u32::MAX,
            retries: 0,
            queue_s: 0.0,
            exposed_s: 0.0,
            transfer_s: 0.0,
            failure: None,
            token_times: Vec::new(),
            measured_gap_s: None,
        }
    }

    /// From due to first token, in seconds.
    pub fn ttft_s(&self) -> Option<f64> {
        self.first.map(|first| first.s_since(self.due))
    }

    /// Mean time per token after the first, in seconds.
    pub fn tpot_s(&self) -> Option<f64> {
        let after = self
            .output_tokens
            .checked_sub(1)
            .filter(|after| *after > 0)?;
        self.first
            .map(|first| self.end.s_since(first) / f64::from(after))
    }

    /// The longest time between two tokens, in seconds: as it was measured, or by the times of
    /// tokens, where they are kept.
    pub fn longest_gap_s(&self) -> Option<f64> {
        let gaps = self.token_times.windows(2);
        let longest = gaps.map(|pair| pair[1].s_since(pair[0])).reduce(f64::max);
        self.measured_gap_s.or(longest)
    }

    pub fn is_split(&self) -> bool {
        self.prefill != self.decode
    }
}
