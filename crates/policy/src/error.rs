//! Why a request cannot be placed.

use tasuki_core::Role;

/// No worker, or no pair of workers, can take the request now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoPlacement {
    /// Waiting does not help.
    #[error(
        "prompt and output come to {tokens} tokens, the longest that any worker takes is {limit_tokens}"
    )]
    TooLarge { tokens: u64, limit_tokens: u32 },
    /// Waiting does not help.
    #[error("the request was interrupted after its first token, and no worker can resume it")]
    CannotResume,
    #[error("no worker is up")]
    NoWorker,
    #[error("the workers that are up are draining and take no new requests")]
    AllDraining,
    /// Other weights would go on with another model's answer.
    #[error(
        "the request was interrupted after its first token, and the workers that are up have \
         other weights or another dtype than the one that began it: send it again"
    )]
    OtherIdentity,
    #[error(
        "no worker that takes {tokens} tokens is up, the longest for now is {limit_tokens} tokens"
    )]
    NoneLargeEnough { tokens: u64, limit_tokens: u32 },
    #[error("no {role} worker is up and roles are strict")]
    NoRole { role: Role },
    #[error("no prefill worker and decode worker between which the request's KV can move are up")]
    NoPair,
}

impl NoPlacement {
    /// Whether a worker that comes back could change the answer.
    pub fn may_pass(self) -> bool {
        !matches!(
            self,
            NoPlacement::TooLarge { .. } | NoPlacement::CannotResume
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
