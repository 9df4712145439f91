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
        index % self.settings.turns != 0 && index < self.making.requests
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

    fn total(&self) -> Option<usize> {
        Some(self.making.requests)
    }
}
