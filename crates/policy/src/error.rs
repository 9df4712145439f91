//! Why a request cannot be placed.

use tasuki_core::{Indivisible, Role};

/// No worker, or no pair of workers, can take the request now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoPlacement {
    /// Waiting does not help.
    #[error(
        "prompt and output come to {tokens} tokens, the longest that any worker takes is {limit_tokens}"
    )]
    TooLarge { tokens: u64, limit_tokens: u32 },
    /// Waiting does not help.
    #[error(
        "n is {choices}, and workers that take {tokens} tokens generate at most {limit_choices} \
         choices of one request: lower n to {limit_choices}, and send the rest as further requests"
    )]
    TooManyChoices {
        choices: u32,
        tokens: u64,
        limit_choices: u32,
    },
    /// Waiting does not help.
    #[error("the request was interrupted after its first token, and no worker can resume it")]
    CannotResume,
    #[error("no worker is up")]
    NoWorker,
    /// Other workers of the model may be up.
    #[error(
        "no worker that has the request's adapter (LoRA) and the role it needs takes requests now: \
         load the adapter on more workers, or send the request again later"
    )]
    NoAdapter,
    #[error("the workers that are up are draining and take no new requests")]
    AllDraining,
    /// Other weights would go on with another model's answer; another engine does not know the
    /// request's form.
    #[error(
        "the workers that are up have other weights, another dtype or another engine than the \
         request needs: other workers began its answer, or its path or model name is SGLang's; \
         send it again"
    )]
    OtherIdentity,
    #[error(
        "no worker that takes {tokens} tokens is up, the longest for now is {limit_tokens} tokens"
    )]
    NoneLargeEnough { tokens: u64, limit_tokens: u32 },
    #[error(
        "no worker that takes {tokens} tokens and n {choices} is up, the largest n for now is \
         {limit_choices}"
    )]
    NoneForChoices {
        choices: u32,
        tokens: u64,
        limit_choices: u32,
    },
    #[error("no {role} worker is up and roles are strict")]
    NoRole { role: Role },
    #[error("no prefill worker and decode worker between which the request's KV can move are up")]
    NoPair,
    /// Of requests that these workers cannot hand over. `for_good`: waiting does not help.
    #[error(
        "requests with {why} are not split between these workers, and no worker that may serve \
         them alone is up: leave it out, or have the operator add a worker without a role or, \
         unless they are SGLang's, start the router without --strict-roles"
    )]
    NoHandoff { why: Indivisible, for_good: bool },
}

impl NoPlacement {
    /// Whether a worker that comes back could change the answer.
    pub fn may_pass(self) -> bool {
        !matches!(
            self,
            NoPlacement::TooLarge { .. }
                | NoPlacement::TooManyChoices { .. }
                | NoPlacement::CannotResume
                | NoPlacement::NoHandoff { for_good: true, .. }
        )
    }

    /// The field of a request that has to change, if it is one.
    pub fn param(self) -> Option<&'static str> {
        match self {
            NoPlacement::TooManyChoices { .. } => Some("n"),
            NoPlacement::NoHandoff { why, .. } => why.param(),
            _ => None,
        }
    }

    /// Whether the request is beyond what workers take.
    pub fn is_limit(self) -> bool {
        matches!(
            self,
            NoPlacement::TooLarge { .. }
                | NoPlacement::NoneLargeEnough { .. }
                | NoPlacement::TooManyChoices { .. }
                | NoPlacement::NoneForChoices { .. }
        )
    }

    /// `reason` where all that is known is that no worker is up.
    pub fn or(self, reason: NoPlacement) -> Self {
        match self {
            NoPlacement::NoWorker => reason,
            known => known,
        }
    }
}
