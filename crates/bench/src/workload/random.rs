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

#[cfg(test)]
mod tests {
    use super::Random;
    use crate::plan::Workload;
    use crate::workload::lengths::{Lengths, RangeConvention};
    use crate::workload::testing::{all, ids, making, shared};

    fn ranged() -> Lengths {
        Lengths {
            range_ratio: Some(0.5),
            range_convention: Some(RangeConvention::Sglang),
            ..Lengths::fixed(40, 8)
        }
    }

    #[test]
    fn requests_are_as_many_and_as_long_as_they_say() {
        let mut workload = Random::new(making(300, 3), ranged()).unwrap();
        assert_eq!(workload.total(), Some(300));
        let planned = all(&mut workload);
        assert!(planned.iter().map(|p| p.index).eq(0..300));
        for request in &planned {
            let tokens = u32::try_from(ids(request).len()).unwrap();
            assert_eq!(request.input_tokens, Some(tokens));
            assert!((20..=40).contains(&tokens) && (4..=8).contains(&request.output_tokens));
            assert!(request.exact_output && request.at.is_none());
        }
        let longest = planned.iter().map(|p| ids(p).len()).max();
        let shortest = planned.iter().map(|p| ids(p).len()).min();
        assert_eq!((shortest, longest), (Some(20), Some(40)));
    }

    #[test]
    fn prompts_share_nothing() {
        let planned = all(&mut Random::new(making(100, 3), ranged()).unwrap());
        for (i, a) in planned.iter().enumerate() {
            assert!(planned[i + 1..].iter().all(|b| shared(a, b) < 8));
        }
    }

    #[test]
    fn the_seed_alone_draws_them() {
        let draw = |seed| all(&mut Random::new(making(20, seed), ranged()).unwrap());
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
        let mut more = Random::new(making(30, 3), ranged()).unwrap();
        assert_eq!(all(&mut more)[..20], draw(3)[..]);
    }
}
