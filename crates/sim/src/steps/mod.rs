//! What a step of a worker takes, by what is in it.
//!
//! | from | how |
//! |---|---|
//! | [`Rates`] | `step + sequence x sequences + kv_token x KV tokens`, prompts `a n + b n²` beside them |
//! | [`StepTable`] | the same two parts, each interpolated between measured points |
//! | [`Roofline`] | bytes by bandwidth or operations by compute, whichever takes longer |
//!
//! The first two add up what decodes and prompts take in one step. Prompts beside decodes take less than
//! alone; how much, a table may have measured.

mod roofline;
mod table;

pub use self::roofline::{Device, ModelShape, Roofline, devices};
pub use self::table::{BesideRow, DecodeRow, PrefillRow, StepTable, TableError};
use tasuki_core::Rates;

/// What is in a step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Work {
    /// That decode.
    pub sequences: f64,
    /// That these attend to, together.
    pub kv_tokens: f64,
    /// Of prompts.
    pub prompt_tokens: f64,
    /// Sum over prompts of `end² - start²`, of the positions computed.
    pub prompt_squares: f64,
}

/// How long steps take on one kind of worker.
#[derive(Debug, Clone, PartialEq)]
pub enum StepModel {
    Rates(Rates),
    Table(StepTable),
    Roofline(Roofline),
}

impl StepModel {
    /// A step's time in seconds.
    #[inline]
    pub fn step_s(&self, work: &Work) -> f64 {
        match self {
            Self::Rates(rates) => rates_s(rates, work),
            Self::Table(table) => table.step_s(work),
            Self::Roofline(roofline) => roofline.step_s(work),
        }
    }

    /// What the first step after a pause takes longer than one that follows another.
    pub fn first_longer_s(&self, work: &Work) -> f64 {
        match self {
            Self::Table(table) => table.first_longer_s(work),
            Self::Rates(_) | Self::Roofline(_) => 0.0,
        }
    }

    /// A step that only decodes.
    #[inline]
    pub fn decode_s(&self, sequences: f64, kv_tokens: f64) -> f64 {
        self.step_s(&Work {
            sequences,
            kv_tokens,
            ..Work::default()
        })
    }

    /// A step that computes the first so many tokens of a prompt, and nothing else.
    pub fn prompt_s(&self, tokens: f64) -> f64 {
        self.step_s(&Work {
            prompt_tokens: tokens,
            prompt_squares: tokens * tokens,
            ..Work::default()
        })
    }
}

fn rates_s(rates: &Rates, work: &Work) -> f64 {
    let mut seconds = 0.0;
    if work.sequences > 0.0 {
        seconds += rates.decode_s(work.sequences, work.kv_tokens);
    } else if work.prompt_tokens > 0.0 {
        seconds += rates.prompt_step_s;
    }
    seconds
        + rates.prompt_token_s * work.prompt_tokens
        + rates.prompt_square_s * work.prompt_squares
}

/// Rows of tables for tests.
#[cfg(test)]
pub mod testing {
    use super::{DecodeRow, PrefillRow};

    /// Of prompts from their beginning: tokens, seconds.
    pub fn prompts<const N: usize>(points: [(f64, f64); N]) -> [PrefillRow; N] {
        points.map(|(tokens, seconds)| PrefillRow {
            tokens,
            context: 0.0,
            seconds,
        })
    }

    /// One and two sequences take as long.
    pub fn decodes(seconds: f64) -> [DecodeRow; 2] {
        [1.0, 2.0].map(|batch| DecodeRow {
            batch,
            context: 100.0,
            seconds,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_beside_decodes_pay_no_step_of_their_own() {
        let rates = Rates {
            step_s: 5.0,
            sequence_s: 1.0,
            kv_token_s: 0.5,
            prompt_step_s: 3.0,
            prompt_token_s: 2.0,
            prompt_square_s: 0.25,
        };
        let model = StepModel::Rates(rates);
        assert_eq!(model.decode_s(2.0, 8.0), 5.0 + 2.0 + 4.0);
        assert_eq!(model.prompt_s(4.0), 3.0 + 8.0 + 4.0);
        let mixed = Work {
            sequences: 2.0,
            kv_tokens: 8.0,
            prompt_tokens: 4.0,
            prompt_squares: 16.0,
        };
        assert_eq!(model.step_s(&mixed), 11.0 + 8.0 + 4.0);
    }
}
