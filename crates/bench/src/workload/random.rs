//! Prompts of random tokens: the workloads random, fixed and prefill-only, which
//! differ in their lengths alone, and shared-prefix, where groups of prompts begin
//! alike, as with system prompts or documents that many users ask about: prefix
//! caches and placement that knows them gain there.

use std::ops::Range;

use rand::Rng;
use serde::Serialize;

use super::Making;
use super::lengths::Lengths;
use crate::error::PlanError;
use crate::plan::{Planned, Workload};
use crate::seeds::{Purpose, generator, stream};
use crate::tokens::Segment;

/// What prompts begin with.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SharedPrefix {
    /// Different prefixes; each request draws one evenly.
    pub prefix_groups: usize,
    pub prefix_tokens: u32,
}

impl SharedPrefix {
    fn of(self, seed: u64, index: usize) -> Segment {
        let mut generator = generator(seed, stream(Purpose::Groups, index as u64));
        let group = generator.random_range(0..self.prefix_groups as u64);
        Segment {
            stream: stream(Purpose::SharedTokens, group),
            tokens: self.prefix_tokens,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Random {
    making: Making,
    prefix: Option<SharedPrefix>,
    lengths: Lengths,
    left: Range<usize>,
}

impl Random {
    /// `lengths` has as input what follows the prefix and is the request's own.
    ///
    /// # Errors
    /// [`PlanError::TooShort`].
    pub fn new(
        making: Making,
        prefix: Option<SharedPrefix>,
        lengths: Lengths,
    ) -> Result<Self, PlanError> {
        let shared = prefix.map_or(0, |prefix| prefix.prefix_tokens);
        making
            .maker
            .check_length(shared.saturating_add(lengths.input().least()))?;
        Ok(Self {
            left: 0..making.requests,
            making,
            prefix,
            lengths,
        })
    }
}

impl Workload for Random {
    fn next(&mut self) -> Option<Planned> {
        let index = self.left.next()?;
        let seed = self.making.seed;
        let (tokens, output_tokens) = self.lengths.of(seed, index);
        let stream = stream(Purpose::OwnTokens, index as u64);
        let prefix = self.prefix.map(|prefix| prefix.of(seed, index));
        let segments: Vec<Segment> = prefix
            .into_iter()
            .chain([Segment { stream, tokens }])
            .collect();
        let (prompt, input_tokens) = self.making.maker.prompt(&segments);
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
    use std::collections::HashMap;

    use super::{Random, SharedPrefix};
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
        let mut workload = Random::new(making(300, 3), None, ranged()).unwrap();
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
        let planned = all(&mut Random::new(making(100, 3), None, ranged()).unwrap());
        for (i, a) in planned.iter().enumerate() {
            assert!(planned[i + 1..].iter().all(|b| shared(a, b) < 8));
        }
    }

    #[test]
    fn the_seed_alone_draws_them() {
        let draw = |seed| all(&mut Random::new(making(20, seed), None, ranged()).unwrap());
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
        let mut more = Random::new(making(30, 3), None, ranged()).unwrap();
        assert_eq!(all(&mut more)[..20], draw(3)[..]);
    }

    #[test]
    fn prompts_of_a_group_share_the_prefix_and_no_more() {
        let prefix = SharedPrefix {
            prefix_groups: 3,
            prefix_tokens: 64,
        };
        let lengths = Lengths::fixed(16, 4);
        let planned = all(&mut Random::new(making(60, 3), Some(prefix), lengths).unwrap());
        let mut groups: HashMap<Vec<u32>, usize> = HashMap::new();
        for request in &planned {
            assert_eq!(request.input_tokens, Some(80));
            *groups.entry(ids(request)[..64].to_vec()).or_default() += 1;
        }
        assert_eq!(groups.len(), 3);
        // Drawn evenly: 20 each, standard deviation 3.7.
        assert!(
            groups.values().all(|n| (6..=34).contains(n)),
            "{:?}",
            groups.values()
        );
        for (i, a) in planned.iter().enumerate() {
            for b in &planned[i + 1..] {
                let is_same_group = ids(a)[..64] == ids(b)[..64];
                let expected = if is_same_group { 64..72 } else { 0..8 };
                assert!(expected.contains(&shared(a, b)));
            }
        }
    }
}
