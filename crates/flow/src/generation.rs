//! One prompt to be answered, and what its client gets.

use std::sync::Arc;
use std::time::Duration;

use tasuki_core::{FailureKind, ModelId};
use tasuki_policy::Why;

use crate::opaque::{Opaque, OpaqueRequest};
use crate::sampling::{SamplingParams, TokenLogprob};

/// One prompt, ready to be placed. Validated: a worker that accepts its length
/// accepts everything else.
#[derive(Debug, Clone)]
pub struct Generation {
    pub model: ModelId,
    /// Stable name for logs.
    pub request_id: String,
    pub prompt: Arc<[u32]>,
    /// Number of choices, at least 1.
    pub n: u32,
    /// `seed` is set; `max_tokens` fits the context.
    pub sampling: SamplingParams,
    /// Salts the prefix cache.
    pub cache_salt: String,
    /// Whose request it is: tenants that wait get equal shares.
    pub tenant: Arc<str>,
    /// Of those that wait, less goes first.
    pub priority: i32,
    /// Of a request whose content is not tokens.
    pub opaque: Option<OpaqueRequest>,
}

/// What happens to a generation, in order. Tokens of one choice arrive once
/// each and in order, however often the request is placed again.
#[derive(Debug)]
pub enum Event {
    PromptLogprobs(Vec<TokenLogprob>),
    Tokens {
        choice: u32,
        tokens: Vec<u32>,
        /// As many as `tokens` when asked for, else empty.
        logprobs: Vec<TokenLogprob>,
        /// Set with the choice's last tokens. On `Stop` the last token is the
        /// stop token itself (its text is not for the client).
        finish: Option<Finish>,
    },
    /// The next part of the answer to an opaque request.
    Frame {
        frame: Opaque,
        /// That it counts for, at least 1.
        tokens: u32,
    },
    /// Every choice ended. Nothing follows.
    Done(Box<Timings>),
    /// The generation ended without all its choices. Nothing follows.
    Failed(ServeError),
}

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A stop token, the last of its tokens.
    Stop,
    /// `max_tokens`.
    Length,
}

/// Where the time of a request went. Zero where a phase did not occur.
#[derive(Debug, Clone, Default)]
pub struct Timings {
    /// Received by the router to first scheduled on the prefill worker.
    pub queue: Duration,
    pub prefill: Duration,
    /// Received by the router to first token at the router.
    pub first_token: Duration,
    pub handshake: Duration,
    /// First block posted to last block there.
    pub transfer: Duration,
    /// From the end of the prefill worker's last chunk until the decode worker may schedule.
    pub transfer_exposed: Duration,
    /// From the moment at which the decode worker learns of prefill's end to the last block read.
    pub transfer_tail: Duration,
    /// Handing descriptors to the transport, of all ranks.
    pub transfer_post: Duration,
    /// From the moment at which the decode worker may schedule to the second token.
    pub first_decode: Duration,
    /// From the first to the second token at the router, what neither of these is: messages
    /// between the workers, and from them to the router.
    pub messages: Duration,
    /// Second token to last, in the attempts that reported it.
    pub decode: Duration,
    /// Of a request that was placed again: what no other phase has, such as attempts that were lost
    /// and waits for a worker. Messages are part of it.
    pub recovery: Duration,
    pub total: Duration,
    pub transfer_bytes: u64,
    /// Runs of adjacent blocks that were read.
    pub transfer_descriptors: u64,
    /// What moved the blocks of the last handoff, and by which way.
    pub transport: String,
    pub cached_prompt_tokens: u32,
    /// Times the request was placed again after a fault or a preemption.
    pub replacements: u32,
    pub prefill_worker: String,
    pub decode_worker: String,
    /// The costs that the last placement compared.
    pub why: Option<Box<Why>>,
}

/// Why the serving layer could not (go on to) serve.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ServeError {
    /// 503 with Retry-After.
    #[error("no worker can take the request: {reason}")]
    Unavailable { reason: String, retry_after_s: u32 },
    /// 503, or 429 for a tenant that has more than its share; with Retry-After.
    #[error("{reason}")]
    Overloaded {
        reason: String,
        retry_after_s: u32,
        over_share: bool,
    },
    /// 400: the request can never run here.
    #[error("{message}")]
    Rejected {
        message: String,
        /// The field at fault, where it is known.
        param: Option<&'static str>,
    },
    /// The same of an opaque request: the worker's own answer, for the client as it is.
    #[error("the worker rejected the request")]
    Answered(Opaque),
    /// 500: tried and failed; the message is fit for a client (no addresses).
    #[error("{message}")]
    Failed { kind: FailureKind, message: String },
}

impl ServeError {
    /// What is at fault.
    pub fn kind(&self) -> FailureKind {
        match self {
            Self::Unavailable { .. } | Self::Overloaded { .. } => FailureKind::Overload,
            Self::Rejected { .. } | Self::Answered(_) => FailureKind::Client,
            Self::Failed { kind, .. } => *kind,
        }
    }
}
