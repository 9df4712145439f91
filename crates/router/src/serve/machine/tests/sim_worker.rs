//! A worker as the router can tell: legs, and what they may say next.

use tasuki_wire::v1::{self, LegEndReason};

/// The token that every right worker produces there.
pub fn truth(choice: u32, position: usize) -> u32 {
    choice * 1_000 + position as u32
}

/// How a choice's output ends.
#[derive(Debug, Clone, Copy)]
pub struct Lengths {
    /// Tokens of choice 0; each further choice has one more.
    pub first: usize,
    pub max_tokens: usize,
}

impl Lengths {
    pub fn of(self, choice: u32) -> usize {
        (self.first + choice as usize).min(self.max_tokens)
    }

    pub fn finish(self, choice: u32) -> v1::FinishReason {
        if self.of(choice) == self.max_tokens {
            v1::FinishReason::FinishLength
        } else {
            v1::FinishReason::FinishStop
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Nothing said yet.
    Begun,
    /// A prefill leg whose first tokens are out: its KV may be pulled.
    Prefilled,
    /// Tokens follow one another.
    Decoding,
}

/// One leg on one worker.
#[derive(Debug, Clone)]
pub struct SimLeg {
    pub attempt: String,
    pub leg: v1::Leg,
    pub peer: String,
    pub progress: Progress,
    /// Whether the prompt's logprobs are still to be told.
    pub scores: bool,
    /// Unfinished choices, with the next position of each.
    pub choices: Vec<(u32, usize)>,
}

impl SimLeg {
    pub fn new(submit: &v1::Submit) -> Self {
        let base = submit.resumed_tokens.len();
        Self {
            attempt: submit.request_id.clone(),
            leg: submit.leg(),
            peer: submit
                .peer
                .clone()
                .map_or_else(String::new, |p| p.engine_id),
            progress: Progress::Begun,
            scores: base == 0
                && submit.leg() != v1::Leg::Decode
                && submit
                    .sampling
                    .as_ref()
                    .is_some_and(|s| s.prompt_logprobs.is_some()),
            choices: submit.choices.iter().map(|&c| (c, base)).collect(),
        }
    }

    /// The next token of every choice; choices that end with it are dropped.
    pub fn step(&mut self, lengths: Lengths) -> Vec<v1::Output> {
        let mut outputs = Vec::new();
        let attempt = &self.attempt;
        let scores = &mut self.scores;
        self.choices.retain_mut(|(choice, position)| {
            let last = *position + 1 == lengths.of(*choice);
            let finish = if last {
                lengths.finish(*choice)
            } else {
                v1::FinishReason::FinishNone
            };
            outputs.push(v1::Output {
                request_id: attempt.clone(),
                choice: *choice,
                position: *position as u32,
                tokens: vec![truth(*choice, *position)],
                finish: finish.into(),
                prompt_logprobs: std::mem::take(scores)
                    .then(v1::TokenLogprob::default)
                    .into_iter()
                    .collect(),
                ..Default::default()
            });
            *position += 1;
            !last
        });
        outputs
    }

    pub fn end(&self, reason: LegEndReason) -> v1::LegEnd {
        v1::LegEnd {
            request_id: self.attempt.clone(),
            reason: reason.into(),
            message: "as the test has it".to_owned(),
            ..Default::default()
        }
    }
}
