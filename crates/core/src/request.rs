//! A request as a placement decision sees it.

use crate::{Identity, ModelId, WorkerId};

/// One placement's worth of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestView {
    pub model: ModelId,
    /// Of the workers whose output the client has begun to get: workers of another identity
    /// cannot go on with it. `None`: it has none yet.
    pub bound_to: Option<Identity>,
    /// Tokens to prefill: the prompt, and what earlier attempts already produced.
    pub prompt_tokens: u32,
    /// Of `prompt_tokens`, those that earlier attempts produced.
    pub resumed_tokens: u32,
    /// Output tokens still to come at most, at least 1.
    pub max_tokens: u32,
    /// Choices that one prefill serves, at least 1.
    pub choices: u32,
    /// A worker that likely has part of the prompt in its prefix cache.
    pub warm: Option<Warm>,
    /// Workers that just failed this request: taken only if nobody else can.
    pub avoid: Vec<WorkerId>,
    /// Do not split, if roles allow: handoffs of this request failed before.
    pub keep_whole: bool,
}

/// Tokens of a prompt that a worker need not compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Warm {
    pub worker: WorkerId,
    pub tokens: u32,
}

impl RequestView {
    /// A plain request with one choice.
    pub fn new(prompt_tokens: u32, max_tokens: u32) -> Self {
        Self {
            model: ModelId::default(),
            bound_to: None,
            prompt_tokens,
            resumed_tokens: 0,
            max_tokens,
            choices: 1,
            warm: None,
            avoid: Vec::new(),
            keep_whole: false,
        }
    }

    /// The longest a choice's sequence can get, in tokens.
    pub fn total_tokens(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.max_tokens)
    }

    /// Tokens of the prompt that a worker likely has in its prefix cache.
    pub fn cached_tokens(&self, worker: WorkerId) -> u32 {
        match self.warm {
            Some(warm) if warm.worker == worker => warm.tokens.min(self.prompt_tokens),
            _ => 0,
        }
    }
}
