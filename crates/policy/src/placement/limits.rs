//! What a request has too much of for some workers.

use tasuki_core::RequestView;

use super::index::{Kind, Member};
use crate::NoPlacement;

/// The most that any of some workers takes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Limits {
    /// Prompt and output of a request. `None`: there is no worker.
    pub tokens: Option<u32>,
    /// Choices of a request, on workers that take its tokens. `None`: none does.
    choices: Option<u32>,
}

/// A request is beyond the limits.
#[derive(Debug, Clone, Copy)]
pub enum Exceeded {
    Tokens {
        tokens: u64,
        limit: u32,
    },
    Choices {
        choices: u32,
        tokens: u64,
        limit: u32,
    },
}

impl Limits {
    /// By one more worker.
    pub fn widen(&mut self, kind: &Kind, member: &Member, request: &RequestView) {
        self.tokens = self.tokens.max(Some(member.limit_tokens));
        if u64::from(member.limit_tokens) >= request.total_tokens() {
            self.choices = self.choices.max(Some(kind.max_sequences));
        }
    }

    /// `None` also where there is no worker.
    pub fn exceeded(&self, request: &RequestView) -> Option<Exceeded> {
        let tokens = request.total_tokens();
        let Some(most) = self.choices else {
            let limit = self.tokens?;
            return Some(Exceeded::Tokens { tokens, limit });
        };
        (most < request.choices).then_some(Exceeded::Choices {
            choices: request.choices,
            tokens,
            limit: most,
        })
    }
}

impl Exceeded {
    /// By the limits of all workers that are known.
    pub fn for_good(self) -> NoPlacement {
        match self {
            Self::Tokens { tokens, limit } => NoPlacement::TooLarge {
                tokens,
                limit_tokens: limit,
            },
            Self::Choices {
                choices,
                tokens,
                limit,
            } => NoPlacement::TooManyChoices {
                choices,
                tokens,
                limit_choices: limit,
            },
        }
    }

    /// By the limits of those that are ready.
    pub fn for_now(self) -> NoPlacement {
        match self {
            Self::Tokens { tokens, limit } => NoPlacement::NoneLargeEnough {
                tokens,
                limit_tokens: limit,
            },
            Self::Choices {
                choices,
                tokens,
                limit,
            } => NoPlacement::NoneForChoices {
                choices,
                tokens,
                limit_choices: limit,
            },
        }
    }
}
