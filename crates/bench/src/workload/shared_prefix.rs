//! Groups of prompts that begin alike, as with system prompts or documents that
//! many users ask about: prefix caches and placement that knows them gain here.

use std::ops::Range;

use rand::Rng;
use serde::Serialize;

use super::Making;
use super::lengths::Lengths;
use crate::error::PlanError;
use crate::plan::{Planned, Workload};
use crate::seeds::{Purpose, generator, stream};
use crate::tokens::Segment;

/// Parameters of the workload.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SharedPrefixSettings {
    /// Different prefixes; each request draws one evenly.
    pub prefix_groups: usize,
    pub prefix_tokens: u32,
    /// `input_tokens` is what follows the prefix and is the request's own.
    #[serde(flatten)]
    pub lengths: Lengths,
}

/// See the module.
#[derive(Debug)]
pub struct SharedPrefix {
    making: Making,
    settings: SharedPrefixSettings,
    left: Range<usize>,
}

impl SharedPrefix {
    /// # Errors
    /// [`PlanError::TooShort`].
    pub fn new(making: Making, settings: SharedPrefixSettings) -> Result<Self, PlanError> {
        let least = settings.lengths.input().least();
        making
            .maker
            .check_length(settings.prefix_tokens.saturating_add(least))?;
        Ok(Self {
            left: 0..making.requests,
            making,
            settings,
        })
    }

    fn group(&self, index: usize) -> u64 {
        let mut generator = generator(self.making.seed, stream(Purpose::Groups, index as u64));
        generator.random_range(0..self.settings.prefix_groups as u64)
    }
}

impl Workload for SharedPrefix {
    fn next(&mut self) -> Option<Planned> {
        let index = self.left.next()?;
        let (tokens, output_tokens) = self.settings.lengths.of(self.making.seed, index);
        let shared = Segment {
            stream: stream(Purpose::SharedTokens, self.group(index)),
            tokens: self.settings.prefix_tokens,
        };
        let own = Segment {
            stream: stream(Purpose::OwnTokens, index as u64),
            tokens,
        };
        let (prompt, input_tokens) = self.making.maker.prompt(&[shared, own]);
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

    use super::{SharedPrefix, SharedPrefixSettings};
    use crate::workload::lengths::Lengths;
    use crate::workload::testing::{all, ids, making, shared};

    #[test]
    fn prompts_of_a_group_share_the_prefix_and_no_more() {
        let settings = SharedPrefixSettings {
            prefix_groups: 3,
            prefix_tokens: 64,
            lengths: Lengths::fixed(16, 4),
        };
        let planned = all(&mut SharedPrefix::new(making(60, 3), settings).unwrap());
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
