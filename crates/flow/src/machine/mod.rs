//! One generation from placement to its last token: inputs in, effects out, time passed in.
//!
//! ```text
//!             place                        every choice ended        legs ended, or timeout
//!  Waiting ───────────▶ Running (one attempt) ─────────────▶ settling ──────────────▶ Ended
//!     ▲                    │
//!     └── retry ◀──────────┘   (worker lost, KV lost, returned, refused, failed)
//! ```
//!
//! Choices start as one group and share an attempt. After a retry, choices
//! that already differ are separate groups. Attempts are numbered, and inputs of
//! an earlier attempt are ignored.
//!
//! Owned by the task of the request. Times are durations since the request arrived.

mod attempt;
mod choice_tokens;
pub mod config;
mod dispatch;
pub mod io;
mod legs;
mod retries;
mod retry;
#[cfg(test)]
mod tests;
mod timing;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tasuki_core::{Chunks, Identity, ModelId, WorkerId};

pub use self::config::{MachineConfig, OnKvLoss};
pub use self::io::{Effect, Fleet, Input, Placed, RetryReason};

use self::attempt::{Attempt, Group, GroupState};
use self::choice_tokens::{ChoiceTokens, End};
use crate::generation::{Event, Generation, ServeError, Timings};
use crate::leg::{LegKind, Output};
use crate::opaque::OpaqueRequest;
use crate::sampling::SamplingParams;
use crate::worker_ref::LegId;

/// The state of one generation.
pub struct Machine {
    config: MachineConfig,
    model: ModelId,
    /// Of the workers whose output was emitted first; none yet if `None`.
    bound_to: Option<Identity>,
    prompt: Arc<[u32]>,
    sampling: Arc<SamplingParams>,
    chunks: Chunks,
    cache_salt: Arc<str>,
    tenant: Arc<str>,
    opaque: Option<Arc<OpaqueRequest>>,
    /// Of the pauses' jitter; not the request's seed, which clients often share.
    jitter_seed: u64,
    choices: Vec<ChoiceTokens>,
    groups: Vec<Group>,
    next_attempt: u32,
    /// When a worker first got a leg of it.
    first_dispatch: Option<Duration>,
    /// Some prefill has reported, and with its first output the prompt's logprobs.
    prompt_scored: bool,
    timings: Timings,
    second_token: Option<Duration>,
    /// In the router for room, before its first placement.
    waited: bool,
    over: bool,
    effects: VecDeque<Effect>,
}

impl Machine {
    /// `chunks`: of the prompt.
    pub fn new(generation: Generation, chunks: Chunks, config: MachineConfig) -> Self {
        let max_tokens = match generation.opaque {
            None => generation.sampling.max_tokens,
            // An estimate is no limit.
            Some(_) => u32::MAX,
        };
        let indices: Vec<u32> = (0..generation.n).collect();
        Self {
            config,
            model: generation.model,
            bound_to: generation.opaque.as_ref().and_then(|o| o.bound_to),
            chunks,
            prompt: generation.prompt,
            sampling: Arc::new(generation.sampling),
            cache_salt: generation.cache_salt.into(),
            tenant: generation.tenant,
            opaque: generation.opaque.map(Arc::new),
            jitter_seed: retry::jitter_seed(&generation.request_id),
            choices: indices
                .iter()
                .map(|&i| ChoiceTokens::new(i, max_tokens))
                .collect(),
            groups: vec![Group::waiting(indices)],
            next_attempt: 0,
            first_dispatch: None,
            prompt_scored: false,
            timings: Timings::default(),
            second_token: None,
            waited: false,
            over: false,
            effects: VecDeque::new(),
        }
    }

    /// Places the request for the first time. If no worker can take it, it fails at once.
    ///
    /// `waited`: for room, as its forecast has it ([`tasuki_core::Forecast`]). `avoid`: workers
    /// that other requests wait for.
    pub fn start(
        &mut self,
        waited: bool,
        avoid: &[WorkerId],
        now: Duration,
        fleet: &mut dyn Fleet,
    ) {
        for group in &mut self.groups {
            group.avoid.extend(avoid);
        }
        fleet.on_request();
        self.waited = waited;
        self.place_waiting(now, fleet);
        self.settle(now);
    }

    /// Takes an input. Afterwards [`Machine::next_effect`] has what is to be done.
    pub fn handle(&mut self, input: Input, now: Duration, fleet: &mut dyn Fleet) {
        if self.over {
            return;
        }
        match input {
            Input::Output(leg, output) => self.on_output(leg, output, now),
            Input::Ended(leg, ended) => self.on_ended(leg, &ended, now, fleet),
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
        self.end_stalled(now, fleet);
        self.place_waiting(now, fleet);
        self.settle(now);
    }

    /// What is to be done next, in order; `None` when all is.
    pub fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// When to call with [`Input::Tick`] at the latest.
    pub fn deadline(&self) -> Option<Duration> {
        let stalled = self.config.stalled;
        let deadlines = self.groups.iter();
        deadlines.filter_map(|group| group.deadline(stalled)).min()
    }

    /// Where the time went and who works on it, as far as known; its last event has it all.
    pub fn timings(&self) -> &Timings {
        &self.timings
    }

    /// Whether nothing follows but the effects that are left.
    pub fn is_over(&self) -> bool {
        self.over
    }

    fn on_output(&mut self, leg: LegId, mut output: Output, now: Duration) {
        let Some((group, kind)) = self.group_of(leg) else {
            return;
        };
        let Group { choices, state, .. } = &mut self.groups[group];
        let GroupState::Running(attempt) = state else {
            return;
        };
        if let Some(timings) = output.timings.take() {
            timing::add_prefill(&mut self.timings, &timings, attempt.started);
        }
        let first = match kind {
            LegKind::Colocated => true,
            LegKind::Prefill if attempt.decode_is_first() => return,
            LegKind::Prefill => true,
            LegKind::Decode => attempt.decode_is_first(),
        };
        let (base, leg) = (attempt.base, attempt.leg_mut(kind));
        if let Some(choice) = choices.iter().position(|&index| index == output.choice)
            && let Some(position) = leg.count(base, choice, output.tokens.len())
        {
            output.position = u32::try_from(position).unwrap_or(u32::MAX);
        }
        if !first {
            if self.sampling.prompt_logprobs.is_some() && !self.prompt_scored {
                attempt.held.push(output);
            } else {
                self.accept(group, output, now);
            }
            return;
        }
        let held = std::mem::take(&mut attempt.held);
        let logprobs = std::mem::take(&mut output.prompt_logprobs);
        if !std::mem::replace(&mut self.prompt_scored, true) && !logprobs.is_empty() {
            self.bind(group);
            self.emit(Event::PromptLogprobs(logprobs));
        }
        self.accept(group, output, now);
        for output in held {
            self.accept(group, output, now);
        }
    }

    fn accept(&mut self, group: usize, output: Output, now: Duration) {
        if !self.groups[group].choices.contains(&output.choice) {
            return;
        }
        let cached = &mut self.timings.cached_prompt_tokens;
        *cached = (*cached).max(output.cached_prompt_tokens);
        let index = output.choice as usize;
        let choice = &mut self.choices[index];
        let before = self.effects.len();
        let effects = &mut self.effects;
        choice.accept(output, |event| effects.push_back(Effect::Emit(event)));
        if self.effects.len() > before {
            self.bind(group);
            self.groups[group].retries.progress();
            let attempt = self.groups[group].attempt();
            let began = attempt.is_some_and(|attempt| attempt.last_decoded.is_some());
            if (began || self.has_decoded(group))
                && let Some(attempt) = self.groups[group].attempt_mut()
            {
                attempt.last_decoded = Some(now);
            }
            if self.timings.first_token.is_zero() {
                self.timings.first_token = now;
            }
            let tokens = self.choices[index].tokens.len();
            if self.second_token.is_none() && tokens > 1 {
                self.second_token = Some(now);
            }
        }
    }

    /// The group's workers gave output, and from now on only workers like them may.
    fn bind(&mut self, group: usize) {
        let attempt = self.groups[group].attempt();
        let identity = attempt.map(|attempt| attempt.prefill.worker.identity);
        self.bound_to = self.bound_to.or(identity);
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
        let one = [index];
        // An empty list means all, and ends the leg.
        let choices = if self.has_ended(group) { &[][..] } else { &one };
        self.abort(group, choices);
    }

    /// Ends groups whose choices all ended; with the last of them, ends the request.
    fn settle(&mut self, now: Duration) {
        if self.over {
            return;
        }
        for group in 0..self.groups.len() {
            if self.has_ended(group) && self.is_settled(group, now) {
                self.abort(group, &[]);
                self.groups[group].state = GroupState::Ended;
            }
        }
        self.groups
            .retain(|group| !matches!(group.state, GroupState::Ended));
        if self.groups.is_empty() {
            self.timings.total = now;
            timing::add_rest(&mut self.timings, self.second_token);
            let timings = std::mem::take(&mut self.timings);
            self.emit(Event::Done(Box::new(timings)));
            self.over = true;
        }
    }

    /// Whether a group whose choices all ended has nothing worth waiting for.
    fn is_settled(&mut self, group: usize, now: Duration) -> bool {
        let settle = self.config.settle;
        let decoded = self.has_decoded(group);
        let Some(attempt) = self.groups[group].attempt_mut() else {
            return true;
        };
        let until = *attempt.settle_until.get_or_insert(now + settle);
        let awaited = attempt.prefill.is_running() || (decoded && attempt.decode_is_running());
        !awaited || now >= until
    }

    /// Ends the request early, with an error unless the client is gone.
    fn end(&mut self, error: Option<ServeError>) {
        if self.over {
            return;
        }
        for group in 0..self.groups.len() {
            self.abort(group, &[]);
        }
        if let Some(error) = error {
            self.emit(Event::Failed(error));
        }
        self.over = true;
    }

    /// Sends an abort to the legs of a group that still run.
    fn abort(&mut self, group: usize, choices: &[u32]) {
        let Some(attempt) = self.groups[group].attempt() else {
            return;
        };
        for leg in attempt.legs().filter(|leg| leg.is_running()) {
            self.effects.push_back(Effect::Abort {
                leg: attempt.leg_on(leg.worker.key),
                choices: choices.to_vec(),
            });
        }
    }

    fn emit(&mut self, event: Event) {
        self.effects.push_back(Effect::Emit(event));
    }

    /// The group that a leg works for now, and what it does.
    fn group_of(&self, leg: LegId) -> Option<(usize, LegKind)> {
        self.groups.iter().enumerate().find_map(|(index, group)| {
            let attempt = group.attempt().filter(|a| a.number == leg.attempt)?;
            Some((index, attempt.kind_on(leg.worker)?))
        })
    }

    fn has_ended(&self, group: usize) -> bool {
        let mut choices = self.groups[group].choices.iter();
        choices.all(|&index| self.choices[index as usize].end.is_some())
    }

    fn unfinished(&self, group: usize) -> Vec<u32> {
        let choices = self.groups[group].choices.iter().copied();
        choices
            .filter(|&index| self.choices[index as usize].end.is_none())
            .collect()
    }

    /// Whether the attempt brought every choice its first token.
    fn is_prefilled(&self, group: usize) -> bool {
        self.tokens_beyond_base(group).min().unwrap_or(0) >= 1
    }

    /// Whether the attempt brought some choice a token that only decode produces.
    fn has_decoded(&self, group: usize) -> bool {
        let attempt = self.groups[group].attempt();
        let first = attempt.is_some_and(Attempt::decode_is_first);
        self.tokens_beyond_base(group).max().unwrap_or(0) >= if first { 1 } else { 2 }
    }

    fn tokens_beyond_base(&self, group: usize) -> impl Iterator<Item = usize> {
        let base = self.groups[group]
            .attempt()
            .map_or(0, |attempt| attempt.base);
        let choices = self.groups[group].choices.iter();
        choices.map(move |&index| self.choices[index as usize].tokens.len() - base)
    }
}
