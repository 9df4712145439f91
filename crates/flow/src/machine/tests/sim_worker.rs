//! A worker as the machine sees it: legs, and what they may report next.

use crate::generation::Finish;
use crate::leg::{Handoff, LegEnd, LegEndReason, LegKind, LegSpec, Output, Ticket};
use crate::sampling::TokenLogprob;

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

    pub fn finish(self, choice: u32) -> Finish {
        if self.of(choice) == self.max_tokens {
            Finish::Length
        } else {
            Finish::Stop
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// No output yet.
    Begun,
    /// A prefill leg whose first tokens are out: its KV may be pulled.
    Prefilled,
    /// Tokens follow one another.
    Decoding,
}

/// One leg on one worker.
#[derive(Debug, Clone)]
pub struct SimLeg {
    pub attempt: u32,
    pub kind: LegKind,
    /// Engine of the other worker; of a serial prefill leg empty.
    pub peer: String,
    /// The decode leg brings the first tokens.
    pub decode_first: bool,
    pub progress: Progress,
    /// Whether the prompt's logprobs are still to be reported.
    pub scores: bool,
    /// Unfinished choices, with the next position of each.
    pub choices: Vec<(u32, usize)>,
}

impl SimLeg {
    pub fn new(attempt: u32, spec: &LegSpec, decode_first: bool) -> Self {
        let base = spec.resumed.len();
        Self {
            attempt,
            kind: spec.kind,
            peer: match &spec.handoff {
                Some(Handoff::With(peer)) => peer.engine_id.clone(),
                Some(Handoff::Redeem { ticket, .. }) => engine_of(ticket),
                Some(Handoff::IssueTicket) | None => String::new(),
            },
            decode_first,
            progress: Progress::Begun,
            scores: base == 0
                && (spec.kind == LegKind::Colocated
                    || (spec.kind == LegKind::Decode) == decode_first)
                && spec.sampling.prompt_logprobs.is_some(),
            choices: spec.choices.iter().map(|&c| (c, base)).collect(),
        }
    }

    /// The next tokens of every choice, at most `run` of each; choices that end with them
    /// are dropped.
    pub fn step(&mut self, lengths: Lengths, run: usize) -> Vec<Output> {
        let mut outputs = Vec::new();
        let scores = &mut self.scores;
        self.choices.retain_mut(|(choice, position)| {
            let end = lengths.of(*choice).min(*position + run);
            let last = end == lengths.of(*choice);
            outputs.push(Output {
                choice: *choice,
                position: *position as u32,
                tokens: (*position..end).map(|at| truth(*choice, at)).collect(),
                finish: last.then(|| lengths.finish(*choice)),
                prompt_logprobs: std::mem::take(scores)
                    .then(TokenLogprob::default)
                    .into_iter()
                    .collect(),
                ..Output::default()
            });
            *position = end;
            !last
        });
        outputs
    }
}

pub fn ended(reason: LegEndReason) -> LegEnd {
    LegEnd {
        reason,
        failure: reason.usual_failure(),
        message: "as the test has it".to_owned(),
        answer: None,
        ticket: None,
        timings: None,
    }
}

/// A prefill leg's end with a ticket for the KV that its engine holds.
pub fn handed_off(engine: &str) -> LegEnd {
    LegEnd {
        ticket: Some(Ticket(engine.as_bytes().to_vec())),
        ..ended(LegEndReason::HandedOff)
    }
}

/// Whose KV a ticket is for.
fn engine_of(ticket: &Ticket) -> String {
    String::from_utf8(ticket.0.clone()).expect("a ticket of handed_off, unchanged")
}
