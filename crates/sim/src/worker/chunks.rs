//! How many prompt tokens a step gets, how prompts share them, and what is learnt of their speed:
//! the rules of `engine/step_size.py` and of `StepRates` in `engine/stats.py`.
//! Both copies are tested with the cases of `tests/golden`.

use tasuki_core::ChunkFit;

use super::config::Limits;
use crate::steps::{StepModel, Work};

/// Steps in which all prompts that wait should be computed.
const DRAIN_STEPS: f64 = 96.0;
/// Times the target: the longest step that a queue of prompts may cause.
const STRETCH: f64 = 4.0;
/// Of a decode step: the time that prompts get however long decodes take.
const LEAST_SHARE: f64 = 0.8;
/// Of a step, with which a GPU computes most in a second.
const KNEE_TOKENS: f64 = 512.0;
/// Of a decode step: the time that prompts get up to the knee.
const KNEE_SHARE: f64 = 1.25;
/// Of a chunk's overhead: the time that its tokens get at least.
const OVERHEAD_SHARE: f64 = 0.5;
/// A step that is no further from what a fit says teaches it nothing: steps have no noise here, and
/// to learn from each takes a quarter of the simulation.
const EXPECTED: f64 = 0.02;
const BUCKET_TOKENS: u32 = 64;
/// Of the newest step in the moving averages.
const WEIGHT: f64 = 0.2;
/// Of what a prompt token takes without decodes: it is never free beside them.
const LEAST_BESIDE: f64 = 0.25;
/// Smaller chunks say little about the rate.
const LEAST_CHUNK: f64 = 16.0;
/// Of the chunk by which a worker that has warmed up knows its rate.
const WARM_TOKENS: f64 = 256.0;

/// What a worker has learnt of the speed of prompts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PromptRates {
    alone_per_s: f64,
    beside_token_s: Option<f64>,
    chunks: ChunkFit,
    overhead_tokens: f64,
}

impl PromptRates {
    /// Of a worker that has served a few requests, alone and beside each other.
    pub fn warmed_up(steps: &StepModel) -> Self {
        let decode = Work {
            sequences: 1.0,
            kv_tokens: WARM_TOKENS,
            ..Work::default()
        };
        let both = Work {
            prompt_tokens: WARM_TOKENS,
            prompt_squares: WARM_TOKENS * WARM_TOKENS,
            ..decode
        };
        let (step_s, decode_s) = (steps.step_s(&both), steps.step_s(&decode));
        let mut rates = Self {
            alone_per_s: WARM_TOKENS / steps.prompt_s(WARM_TOKENS).max(1e-9),
            beside_token_s: Some((step_s - decode_s).max(0.0) / WARM_TOKENS),
            chunks: ChunkFit::default(),
            overhead_tokens: 0.0,
        };
        rates.learn_chunk(&both, step_s, decode_s);
        rates
    }

    /// Takes a step with prompts into account. `decode_s`: of its decodes alone.
    pub fn learn(&mut self, work: &Work, step_s: f64, decode_s: f64) {
        if work.sequences > 0.0 {
            self.learn_chunk(work, step_s, decode_s);
        }
        if work.prompt_tokens < LEAST_CHUNK {
            return;
        }
        let own_s = (step_s - decode_s).max(step_s / 2.0).max(1e-9);
        let blend = |old: f64, new: f64| old + WEIGHT * (new - old);
        self.alone_per_s = blend(self.alone_per_s, work.prompt_tokens / own_s);
        if work.sequences > 0.0 {
            let token_s = (step_s - decode_s).max(0.0) / work.prompt_tokens;
            self.beside_token_s = Some(match self.beside_token_s {
                Some(old) => blend(old, token_s),
                None => token_s,
            });
        }
    }

    fn learn_chunk(&mut self, work: &Work, step_s: f64, decode_s: f64) {
        let (tokens, squares) = (work.prompt_tokens as u32, work.prompt_squares);
        if self.chunks.surprise(tokens, squares, step_s, decode_s) < EXPECTED {
            return;
        }
        self.chunks.learn(tokens, squares, step_s, decode_s);
        self.overhead_tokens = self.chunks.overhead_tokens();
    }

    fn beside_per_s(&self) -> f64 {
        match self.beside_token_s {
            Some(token_s) => 1.0 / token_s.max(LEAST_BESIDE / self.alone_per_s),
            None => self.alone_per_s,
        }
    }
}

/// Prompt tokens of the next step. `decode_s`: what `decodes` sequences take alone; `backlog`:
/// prompt tokens that wait.
pub fn prompt_tokens(
    limits: &Limits,
    rates: &PromptRates,
    (decodes, decode_s): (u32, f64),
    backlog: u64,
) -> u32 {
    let most = limits.max_batched_tokens;
    let Some(target_s) = limits.itl_target_s else {
        return most.saturating_sub(decodes).max(limits.block_size);
    };
    let (rate, prompts) = if decodes > 0 {
        let least = OVERHEAD_SHARE * rates.overhead_tokens;
        let rate = rates.beside_per_s();
        let free_s = (target_s - decode_s).max(LEAST_SHARE * decode_s);
        let to_knee = (KNEE_TOKENS - f64::from(decodes)).min(KNEE_SHARE * decode_s * rate);
        let stretched_s = (STRETCH * target_s - decode_s).max(free_s);
        let drain = (backlog as f64 / DRAIN_STEPS).min(stretched_s * rate);
        (rate, (free_s * rate).max(to_knee).max(drain).max(least))
    } else {
        (rates.alone_per_s, limits.longest_step_s * rates.alone_per_s)
    };
    let wanted = prompts.min(limits.longest_step_s * rate) as u32;
    let mut tokens = decodes.saturating_add(wanted).min(most);
    if tokens.saturating_sub(decodes) >= BUCKET_TOKENS && tokens < most {
        let up = if decodes > 0 { BUCKET_TOKENS / 2 } else { 0 };
        tokens = (tokens + up) / BUCKET_TOKENS * BUCKET_TOKENS;
    }
    tokens
        .min(most)
        .saturating_sub(decodes)
        .max(limits.block_size)
}

/// The prompt tokens of one step: while a prompt waits that has at most half as many tokens left,
/// the long ones get half together.
#[derive(Debug)]
pub struct Shares {
    pub left: u32,
    half: u32,
    long_left: u32,
    shortest: u32,
}

impl Shares {
    pub fn new(budget: u32, shortest: u32) -> Self {
        let half = (budget / 2).max(1);
        Self {
            left: budget,
            half,
            long_left: half,
            shortest,
        }
    }

    /// Tokens that a prompt with `length` tokens left may take now.
    pub fn offer(&self, length: u32) -> u32 {
        let most = if self.is_long(length) {
            self.left.min(self.long_left)
        } else {
            self.left
        };
        length.min(most)
    }

    pub fn take(&mut self, length: u32, tokens: u32) {
        self.left -= tokens;
        if self.is_long(length) {
            self.long_left -= tokens;
        }
    }

    /// Every prompt has had its offer: what is left is for any of them.
    pub fn lift(&mut self) {
        self.long_left = self.left;
    }

    fn is_long(&self, length: u32) -> bool {
        length > self.half && length >= 2 * self.shortest
    }
}

#[cfg(test)]
mod tests;
