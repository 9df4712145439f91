//! Conversations: every turn repeats what was said before, with the answers
//! that the server really gave, and adds a message of the user.
//!
//! Request `c * turns + t` is turn `t` of conversation `c`. Only first turns
//! arrive by themselves; the next one is due when the user has thought about
//! the answer. A turn that fails ends its conversation.

use std::collections::HashMap;
use std::time::Duration;

use rand_distr::{Distribution, Exp1};
use serde::Serialize;

use super::Making;
use super::lengths::Lengths;
use crate::error::PlanError;
use crate::plan::{Planned, Prompt, Workload};
use crate::seeds::{Purpose, generator, stream};
use crate::tokens::{Counted, Segment};

/// Parameters of the workload.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MultiTurnSettings {
    pub turns: usize,
    /// New tokens of the user in every turn after the first.
    pub turn_input_tokens: u32,
    /// Mean of the exponential time between an answer and the next turn.
    pub think_time_s: f64,
    /// `input_tokens` is the first message's.
    #[serde(flatten)]
    pub lengths: Lengths,
}

/// See the module.
#[derive(Debug)]
pub struct MultiTurn {
    making: Making,
    settings: MultiTurnSettings,
    /// Conversations begun.
    begun: usize,
    /// What requests asked whose answers another turn follows.
    asked: HashMap<usize, Prompt>,
}

impl MultiTurn {
    /// # Errors
    /// [`PlanError::TooShort`].
    pub fn new(making: Making, settings: MultiTurnSettings) -> Result<Self, PlanError> {
        making
            .maker
            .check_length(settings.lengths.input().least())?;
        Ok(Self {
            making,
            settings,
            begun: 0,
            asked: HashMap::new(),
        })
    }

    /// Whether the workload has a request of this index that follows another.
    fn has_turn(&self, index: usize) -> bool {
        !index.is_multiple_of(self.settings.turns) && index < self.making.requests
    }

    fn own(&self, index: usize, tokens: u32) -> Segment {
        Segment {
            stream: stream(Purpose::OwnTokens, index as u64),
            tokens,
        }
    }

    fn planned(&mut self, index: usize, counted: Counted, output_tokens: u32) -> Planned {
        let (prompt, input_tokens) = counted;
        if self.has_turn(index + 1) {
            self.asked.insert(index, prompt.clone());
        }
        Planned {
            index,
            prompt,
            input_tokens,
            output_tokens,
            exact_output: self.making.exact_output,
            at: None,
        }
    }

    fn think_time(&self, index: usize) -> Duration {
        let mut generator = generator(self.making.seed, stream(Purpose::Thinking, index as u64));
        let share: f64 = Exp1.sample(&mut generator);
        Duration::from_secs_f64(self.settings.think_time_s * share)
    }
}

impl Workload for MultiTurn {
    fn next(&mut self) -> Option<Planned> {
        let index = self.begun * self.settings.turns;
        if index >= self.making.requests {
            return None;
        }
        self.begun += 1;
        let (tokens, output_tokens) = self.settings.lengths.of(self.making.seed, index);
        let counted = self.making.maker.prompt(&[self.own(index, tokens)]);
        Some(self.planned(index, counted, output_tokens))
    }

    fn answered(&mut self, index: usize, text: &str) -> Option<(Duration, Planned)> {
        let asked = self.asked.remove(&index)?;
        let index = index + 1;
        let lengths = Lengths {
            input_tokens: self.settings.turn_input_tokens,
            ..self.settings.lengths
        };
        let (tokens, output_tokens) = lengths.of(self.making.seed, index);
        let counted = self
            .making
            .maker
            .follow(asked, text, self.own(index, tokens));
        let planned = self.planned(index, counted, output_tokens);
        Some((self.think_time(index), planned))
    }

    fn has_turns(&self) -> bool {
        true
    }

    fn total(&self) -> Option<usize> {
        Some(self.making.requests)
    }
}

#[cfg(test)]
mod tests {
    use super::{MultiTurn, MultiTurnSettings};
    use crate::plan::{Planned, Workload};
    use crate::workload::lengths::Lengths;
    use crate::workload::testing::{all, ids, making};

    const SETTINGS: MultiTurnSettings = MultiTurnSettings {
        turns: 3,
        turn_input_tokens: 10,
        think_time_s: 2.0,
        lengths: Lengths {
            input_tokens: 30,
            output_tokens: 5,
            range_ratio: None,
            range_convention: None,
        },
    };

    fn begin(requests: usize) -> (MultiTurn, Vec<Planned>) {
        let mut workload = MultiTurn::new(making(requests, 3), SETTINGS).unwrap();
        let first = all(&mut workload);
        (workload, first)
    }

    #[test]
    fn conversations_grow_with_the_answers() {
        let (mut workload, first) = begin(6);
        assert!(first.iter().map(|p| p.index).eq([0, 3]));
        assert_eq!(workload.total(), Some(6));
        let answer = "as it is";
        let maker = making(1, 3).maker;
        let (_, answer_tokens) = maker.follow(
            crate::plan::Prompt::Tokens(vec![]),
            answer,
            crate::tokens::Segment {
                stream: 0,
                tokens: 0,
            },
        );
        let grown = 30 + answer_tokens.unwrap() + 10;
        let (_, second) = workload.answered(0, answer).unwrap();
        assert_eq!((second.index, second.input_tokens), (1, Some(grown)));
        assert_eq!(ids(&second)[..30], *ids(&first[0]));
        let (_, third) = workload.answered(1, answer).unwrap();
        assert_eq!((third.index, third.input_tokens), (2, Some(2 * grown - 30)));
        assert!(ids(&third).starts_with(ids(&second)));
        assert!(workload.answered(2, answer).is_none());
    }

    #[test]
    fn another_order_of_answers_changes_nothing() {
        let (mut a, _) = begin(6);
        let (mut b, _) = begin(6);
        let forward = [a.answered(0, "x"), a.answered(3, "y")];
        let backward = [b.answered(3, "y"), b.answered(0, "x")];
        assert_eq!(forward[0], backward[1]);
        assert_eq!(forward[1], backward[0]);
        assert!(forward[0].is_some() && forward[0] != forward[1]);
    }

    #[test]
    fn the_last_conversation_is_cut_to_the_number_wanted() {
        let (mut workload, first) = begin(5);
        assert!(first.iter().map(|p| p.index).eq([0, 3]));
        assert!(workload.answered(0, "").is_some() && workload.answered(1, "").is_some());
        assert!(workload.answered(3, "").is_some());
        assert!(workload.answered(4, "").is_none());
        assert!(workload.answered(99, "").is_none());
    }

    #[test]
    fn users_think_for_the_mean_time() {
        let (mut workload, first) = begin(15_000);
        let mut think_s = |p: &Planned| workload.answered(p.index, "").unwrap().0.as_secs_f64();
        let total_s: f64 = first.iter().map(&mut think_s).sum();
        // 5,000 draws: standard error 2 / sqrt(5,000) = 0.03.
        assert!((total_s / 5_000.0 - 2.0).abs() < 0.12, "{total_s}");
    }
}
