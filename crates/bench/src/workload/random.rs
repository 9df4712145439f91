//! Prompts of random tokens that share nothing: the workloads random, fixed and
//! prefill-only, which differ in their lengths alone.

use std::ops::Range;

use super::Making;
use super::lengths::Lengths;
use crate::error::PlanError;
use crate::plan::{Planned, Workload};
use crate::seeds::{Purpose, stream};
use crate::tokens::Segment;

/// See the module.
#[derive(Debug)]
pub struct Random {
    making: Making,
    lengths: Lengths,
    left: Range<usize>,
}

impl Random {
    /// # Errors
    /// [`PlanError::TooShort`].
    pub fn new(making: Making, lengths: Lengths) -> Result<Self, PlanError> {
        making.maker.check_length(lengths.input().least())?;
        Ok(Self {
            left: 0..making.requests,
            making,
            lengths,
        })
    }
}

impl Workload for Random {
    fn next(&mut self) -> Option<Planned> {
        let index = self.left.next()?;
        let (tokens, output_tokens) = self.lengths.of(self.making.seed, index);
        let stream = stream(Purpose::OwnTokens, index as u64);
        let (prompt, input_tokens) = self.making.maker.prompt(&[Segment { stream, tokens }]);
        Some(Planned {
            index,
            prompt,
            input_tokens,
            output_tokens,
            exact_output: self.making.exact_output,
            at: None,
        })
    }

    fn total(&self) -> Option<usize> {
        Some(self.making.requests)
    }
}
