//! One generation from placement to its last token: events in, effects out, time passed in.
//!
//! ```text
//!             place                     every choice ended        legs ended, or settle
//!  Waiting ───────────▶ Flying (legs) ─────────────────────▶ settling ─────────────────▶ Landed
//!     ▲                    │
//!     └── setback ◀────────┘   (worker lost, KV lost, returned, refused, failed)
//! ```
//!
//! Choices start as one group and share an attempt. After a setback, choices
//! that already differ go on as groups of their own. An attempt has a fresh id,
//! so whatever an old one still says is not even looked at.
//!
//! Owned by the request's task; no I/O, no clock, no lock.

mod choice;
pub mod config;
mod flight;
pub mod io;
mod legs;
mod recover;
mod setbacks;
#[cfg(test)]
mod tests;
mod timing;

use std::time::{Duration, Instant};

use tasuki_wire::v1;

use self::choice::{Choice, End};
use self::config::MachineConfig;
use self::flight::{Group, GroupState};
use self::io::{Effect, Fleet, Input, Part};
use super::api::{Event, Generation, ServeError, Timings};
use crate::workers::WorkerKey;

/// The state of one generation.
pub struct Machine {
    config: MachineConfig,
    request: Generation,
    choices: Vec<Choice>,
    groups: Vec<Group>,
    next_attempt: u32,
    /// Prefill has spoken, and with its first words come the prompt's logprobs.
    prompt_scored: bool,
    received: Instant,
    timings: Timings,
    /// Since `received`.
    second_token: Option<Duration>,
    over: bool,
    effects: Vec<Effect>,
}

impl Machine {
    pub fn new(request: Generation, config: MachineConfig) -> Self {
        let max_tokens = request.sampling.max_tokens;
        let indices: Vec<u32> = (0..request.n).collect();
        Self {
            config,
            choices: indices
                .iter()
                .map(|&i| Choice::new(i, max_tokens))
                .collect(),
            groups: vec![Group::waiting(indices, request.received)],
            received: request.received,
            request,
            next_attempt: 0,
            prompt_scored: false,
            timings: Timings::default(),
            second_token: None,
            over: false,
            effects: Vec::new(),
        }
    }

    /// Places the request for the first time. Nobody to take it: it fails at once.
    pub fn start(&mut self, now: Instant, fleet: &mut dyn Fleet) -> Vec<Effect> {
        self.place_waiting(now, fleet);
        self.settle(now);
        std::mem::take(&mut self.effects)
    }

    pub fn handle(&mut self, input: Input, now: Instant, fleet: &mut dyn Fleet) -> Vec<Effect> {
        if self.over {
            return Vec::new();
        }
        match input {
            Input::Output(from, output) => self.on_output(from, output, now),
            Input::Ended(from, ended) => self.on_ended(from, &ended, now, fleet),
            Input::Lost(key) => self.on_lost(key, now, fleet),
            Input::Stop(choice) => self.on_stop(choice),
            Input::WorkersChanged => self.on_workers_changed(now),
            Input::Tick => {}
            Input::HangUp => self.end(None),
            Input::Cancel => self.end(Some(ServeError::Unavailable {
                reason: "the server is shutting down".to_owned(),
                retry_after_s: 5,
            })),
        }
        self.place_waiting(now, fleet);
        self.settle(now);
        std::mem::take(&mut self.effects)
    }

    /// When to call with [`Input::Tick`] at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        self.groups.iter().filter_map(Group::deadline).min()
    }

    /// Nothing follows any more.
    pub fn is_over(&self) -> bool {
        self.over
    }

    fn on_output(&mut self, from: WorkerKey, mut output: v1::Output, now: Instant) {
        let Some(group) = self.group_of(&output.request_id, from) else {
            return;
        };
        let Some(flight) = self.groups[group].flight_mut() else {
            return;
        };
        if let Some(timings) = output.timings.take() {
            let queued = flight.submitted - self.received;
            timing::add_prefill(&mut self.timings, &timings, queued);
        }
        if flight.part_of(from) == Some(Part::Decode) {
            if self.request.sampling.prompt_logprobs.is_some() && !self.prompt_scored {
                flight.held.push(output);
            } else {
                self.take(group, output, now);
            }
            return;
        }
        let held = std::mem::take(&mut flight.held);
        let logprobs = std::mem::take(&mut output.prompt_logprobs);
        if !std::mem::replace(&mut self.prompt_scored, true) && !logprobs.is_empty() {
            self.effects
                .push(Effect::Emit(Event::PromptLogprobs(logprobs)));
        }
        self.take(group, output, now);
        for output in held {
            self.take(group, output, now);
        }
    }

    fn take(&mut self, group: usize, output: v1::Output, now: Instant) {
        if !self.groups[group].choices.contains(&output.choice) {
            return;
        }
        let cached = &mut self.timings.cached_prompt_tokens;
        *cached = (*cached).max(output.cached_prompt_tokens);
        let mut events = Vec::new();
        let index = output.choice as usize;
        self.choices[index].accept(output, &mut events);
        if !events.is_empty() {
            self.groups[group].setbacks.progress();
            if self.timings.first_token.is_zero() {
                self.timings.first_token = now - self.received;
            }
            if self.second_token.is_none() && self.choices[index].tokens.len() > 1 {
                self.second_token = Some(now - self.received);
            }
        }
        self.effects.extend(events.into_iter().map(Effect::Emit));
    }

    fn on_stop(&mut self, index: u32) {
        let Some(choice) = self.choices.get_mut(index as usize) else {
            return;
        };
        if choice.end.is_some() {
            return;
        }
        choice.end = Some(End::Stopped);
        let Some(group) = self.groups.iter().position(|g| g.choices.contains(&index)) else {
            return;
        };
        // An empty list means all, and ends the leg.
        let last = self.unfinished(group).is_empty();
        self.abort(group, if last { vec![] } else { vec![index] });
    }

    /// Lands groups whose choices all ended; with the last of them, ends the request.
    fn settle(&mut self, now: Instant) {
        if self.over {
            return;
        }
        for group in 0..self.groups.len() {
            if !self.unfinished(group).is_empty() {
                continue;
            }
            if self.is_settled(group, now) {
                self.abort(group, vec![]);
                self.groups[group].state = GroupState::Landed;
            }
        }
        self.groups
            .retain(|group| !matches!(group.state, GroupState::Landed));
        if self.groups.is_empty() {
            self.timings.total = now - self.received;
            timing::add_messages(&mut self.timings, self.second_token);
            let timings = std::mem::take(&mut self.timings);
            self.effects.push(Effect::Emit(Event::Done(timings)));
            self.over = true;
        }
    }

    /// Whether a group whose choices all ended has nothing worth waiting for.
    fn is_settled(&mut self, group: usize, now: Instant) -> bool {
        let settle = self.config.settle;
        let decoded = self.has_decoded(group);
        let Some(flight) = self.groups[group].flight_mut() else {
            return true;
        };
        let until = *flight.settle_until.get_or_insert(now + settle);
        let awaited = flight.prefill.is_running() || (decoded && flight.decode_is_running());
        !awaited || now >= until
    }

    /// Ends the request early, with an error unless the client is gone.
    fn end(&mut self, error: Option<ServeError>) {
        if self.over {
            return;
        }
        for group in 0..self.groups.len() {
            self.abort(group, vec![]);
        }
        if let Some(error) = error {
            self.effects.push(Effect::Emit(Event::Failed(error)));
        }
        self.over = true;
    }

    /// Sends an abort to the legs of a group that still run.
    fn abort(&mut self, group: usize, choices: Vec<u32>) {
        let Some(flight) = self.groups[group].flight() else {
            return;
        };
        for leg in flight.legs().filter(|leg| leg.is_running()) {
            self.effects.push(Effect::Abort {
                to: leg.seat.key,
                abort: v1::Abort {
                    request_id: flight.attempt.clone(),
                    choices: choices.clone(),
                },
            });
        }
    }

    /// The group that an attempt of this id, with a leg there, carries now.
    fn group_of(&self, attempt: &str, from: WorkerKey) -> Option<usize> {
        self.groups.iter().position(|group| {
            group
                .flight()
                .is_some_and(|f| f.attempt == attempt && f.part_of(from).is_some())
        })
    }

    fn unfinished(&self, group: usize) -> Vec<u32> {
        let choices = self.groups[group].choices.iter().copied();
        choices
            .filter(|&index| self.choices[index as usize].end.is_none())
            .collect()
    }

    /// Whether the flight brought every choice its first token.
    fn is_prefilled(&self, group: usize) -> bool {
        self.tokens_beyond_base(group).min().unwrap_or(0) >= 1
    }

    /// Whether the flight brought some choice more than its first token.
    fn has_decoded(&self, group: usize) -> bool {
        self.tokens_beyond_base(group).max().unwrap_or(0) >= 2
    }

    fn tokens_beyond_base(&self, group: usize) -> impl Iterator<Item = usize> {
        let base = self.groups[group].flight().map_or(0, |flight| flight.base);
        let choices = self.groups[group].choices.iter();
        choices.map(move |&index| self.choices[index as usize].tokens.len() - base)
    }
}
