//! An answer as it is received: which tokens came when.

use std::time::Duration;

use tokio::time::Instant;

use super::chunk::{Said, Usage};
use super::failure::Failure;
use crate::phases::Phases;

/// A chunk with something of the answer in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    pub at: Instant,
    /// By the server's count; 0 if it does not count chunks.
    pub tokens: u32,
    /// Of text: shares a total among chunks that nobody counted.
    pub text_bytes: u32,
}

/// All that was seen of one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub sent: Instant,
    pub chunks: Vec<Chunk>,
    /// The server counted every chunk that has text.
    pub counted: bool,
    pub usage: Option<Usage>,
    pub text: String,
    /// What a reasoning model thought; no part of what a next turn repeats.
    pub reasoning: String,
    pub phases: Option<Phases>,
    pub failure: Option<Failure>,
    /// When it was over, well or not.
    pub end: Instant,
}

impl Answer {
    /// The answer to a request that is sent now.
    pub fn sent(at: Instant) -> Self {
        Self {
            sent: at,
            chunks: Vec::new(),
            counted: true,
            usage: None,
            text: String::new(),
            reasoning: String::new(),
            phases: None,
            failure: None,
            end: at,
        }
    }

    /// Takes what an event said that came at `at`. Returns the chunk, if it
    /// brought anything, and the time since the one before.
    pub fn take(&mut self, said: Said, at: Instant) -> Option<(Chunk, Option<Duration>)> {
        let mut text_bytes = 0;
        let all = [
            (said.reasoning, &mut self.reasoning),
            (said.text, &mut self.text),
        ];
        for (said, all) in all {
            let said = said.unwrap_or_default();
            text_bytes += said.len() as u32;
            all.push_str(&said);
        }
        if let Some(phases) = said.phases {
            self.phases = Some(*phases);
        }
        let before = self.usage.map_or(0, |usage| usage.completion_tokens);
        self.usage = said.usage.or(self.usage);
        if !said.choice {
            return None; // a total of what came before
        }
        self.counted &= said.usage.is_some() || text_bytes == 0;
        let tokens = self
            .usage
            .map_or(0, |usage| usage.completion_tokens.saturating_sub(before));
        if text_bytes == 0 && (tokens == 0 || !self.counted) {
            return None;
        }
        let gap = self.chunks.last().map(|last| at - last.at);
        let chunk = Chunk {
            at,
            tokens,
            text_bytes,
        };
        self.chunks.push(chunk);
        Some((chunk, gap))
    }

    /// Ends it.
    pub fn ended(mut self, failure: Option<Failure>, at: Instant) -> Self {
        self.failure = failure;
        self.end = at;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::chunk;

    #[test]
    fn thoughts_are_tokens_but_no_part_of_what_was_said() {
        let at = Instant::now();
        let mut answer = Answer::sent(at);
        for delta in [r#"{"reasoning_content":"hm"}"#, r#"{"content":"yes"}"#] {
            let data = format!(r#"{{"choices":[{{"delta":{delta}}}]}}"#);
            let said = chunk::read(data.as_bytes()).unwrap().unwrap();
            assert!(answer.take(said, at).is_some());
        }
        assert_eq!(
            (answer.text.as_str(), answer.reasoning.as_str()),
            ("yes", "hm")
        );
        let bytes: Vec<u32> = answer.chunks.iter().map(|chunk| chunk.text_bytes).collect();
        assert_eq!(bytes, [2, 3]);
    }
}
