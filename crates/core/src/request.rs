//! A request as a placement decision sees it.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use crate::{Chunks, HandoffKind, Identity, ModelId, WorkerId};

/// By which prompts that begin alike are known.
pub const PREFIX_TOKENS: usize = 64;

/// One placement's worth of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestView {
    pub model: ModelId,
    /// The names of the adapters that it is for. A batch may be for several.
    pub adapters: Vec<Arc<str>>,
    /// The workers that have its adapters: no other takes it. `None`: all of the model do.
    pub only: Option<Arc<BTreeSet<WorkerId>>>,
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
    /// Workers that have part of the prompt in their prefix cache: a few, each once.
    pub warm: Vec<Warm>,
    /// Workers that just failed this request, the last one last, or whose room requests before it
    /// wait for: taken only if no others can.
    pub avoid: Vec<WorkerId>,
    /// Equal for requests of one tenant, and where none is named for prompts that begin alike.
    pub session: u64,
    /// Equal for prompts of which the first [`PREFIX_TOKENS`] are equal.
    pub prefix: u64,
    /// Of the prompt, for who holds its beginning.
    pub chunks: Chunks,
    /// Do not split, if roles allow: handoffs of this request failed before, or it is indivisible.
    pub keep_whole: bool,
    /// Why it has no handoff by ticket, if it has none.
    pub indivisible: Option<Indivisible>,
    /// In the router, for a worker with room.
    pub waited: bool,
}

/// What of a request two workers cannot serve, one can. Where nothing else is said it is so of
/// those that hand over by a ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Indivisible {
    /// They are known where the prompt is computed, and the answer there is not the client's.
    PromptLogprobs,
    /// As `PromptLogprobs`, of any workers: prefill's cannot be added to this answer.
    EchoLogprobs,
    /// Of any workers. SGLang's begin with a request for the prompt alone and have one room for it
    /// and all choices, in which they wait for ever.
    Choices,
    /// The one token of prefill is no whole call.
    ForcedCall,
    /// It is cut to what the output leaves, which differs between the two.
    CutPrompt,
    /// Prefill, asked for one token, takes it, and decode refuses it.
    BeyondContext,
    /// A handoff is of one sequence.
    Sequences,
}

impl Indivisible {
    /// Whether it is so of workers with this kind of handoff.
    pub fn bars(self, handoff: HandoffKind) -> bool {
        handoff == HandoffKind::Ticket || matches!(self, Self::EchoLogprobs | Self::Choices)
    }

    /// The field that asks for it, if it is one.
    pub fn param(self) -> Option<&'static str> {
        match self {
            Self::EchoLogprobs => Some("echo"),
            Self::Choices => Some("n"),
            Self::ForcedCall => Some("tool_choice"),
            Self::CutPrompt => Some("truncate_prompt_tokens"),
            Self::PromptLogprobs | Self::BeyondContext | Self::Sequences => None,
        }
    }
}

impl fmt::Display for Indivisible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PromptLogprobs => {
                "log probabilities of the prompt (prompt_logprobs, or echo with logprobs)"
            }
            Self::EchoLogprobs => "log probabilities of an echoed prompt (echo with logprobs)",
            Self::Choices => "several choices (n)",
            Self::ForcedCall => "a tool_choice that forces a call",
            Self::CutPrompt => "a negative truncate_prompt_tokens",
            Self::BeyondContext => "a max_tokens beyond the model's context",
            Self::Sequences => "several prompts",
        })
    }
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
            adapters: Vec::new(),
            only: None,
            bound_to: None,
            prompt_tokens,
            resumed_tokens: 0,
            max_tokens,
            choices: 1,
            warm: Vec::new(),
            avoid: Vec::new(),
            session: 0,
            prefix: 0,
            chunks: Chunks::default(),
            keep_whole: false,
            indivisible: None,
            waited: false,
        }
    }

    /// The same request with the keys of its tenant, which may have no name, and its prompt.
    pub fn keyed(self, tenant: &str, prompt: &[u32]) -> Self {
        let first = &prompt[..prompt.len().min(PREFIX_TOKENS)];
        let prefix = fold(BASIS, first.iter().map(|token| u64::from(*token)));
        let session = match tenant {
            "" => prefix,
            _ => fold(BASIS, tenant.bytes().map(u64::from)),
        };
        Self {
            session,
            prefix,
            ..self
        }
    }

    /// Whether the worker has the adapters that it is for.
    pub fn allows(&self, worker: WorkerId) -> bool {
        let only = self.only.as_ref();
        only.is_none_or(|workers| workers.contains(&worker))
    }

    /// The longest a choice's sequence can get, in tokens.
    pub fn total_tokens(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.max_tokens)
    }

    /// Tokens of the prompt that a worker likely has in its prefix cache.
    pub fn cached_tokens(&self, worker: WorkerId) -> u32 {
        let warm = self.warm.iter().find(|warm| warm.worker == worker);
        warm.map_or(0, |warm| warm.tokens.min(self.prompt_tokens))
    }
}

const BASIS: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a by whole values.
fn fold(basis: u64, values: impl Iterator<Item = u64>) -> u64 {
    values.fold(basis, |hash, value| {
        (hash ^ value).wrapping_mul(0x0100_0000_01b3)
    })
}
