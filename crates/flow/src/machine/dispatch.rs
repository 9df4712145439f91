//! Placing a group's attempt, and handing it to the workers.

use std::sync::Arc;
use std::time::Duration;

use tasuki_core::{FailureKind, RequestView, Warm};
use tasuki_policy::NoPlacement;

use super::Machine;
use super::attempt::{Attempt, GroupState, Leg, LegState};
use super::choice_tokens::End;
use super::io::{Effect, Fleet, Placed, RetryReason};
use crate::generation::ServeError;
use crate::leg::{Handoff, LegKind, LegSpec, Ticket};
use crate::worker_ref::LegId;

/// While no worker can take a group: how often to ask again, besides at every change.
const ASK_AGAIN: Duration = Duration::from_millis(200);

impl Machine {
    /// Groups that no worker could take are placed again at once.
    pub(super) fn on_workers_changed(&mut self, now: Duration) {
        for group in &mut self.groups {
            if let GroupState::Waiting {
                not_before,
                for_workers: true,
                ..
            } = &mut group.state
            {
                *not_before = now;
            }
        }
    }

    /// Places every group whose time has come.
    pub(super) fn place_waiting(&mut self, now: Duration, fleet: &mut dyn Fleet) {
        for group in 0..self.groups.len() {
            let GroupState::Waiting {
                not_before, since, ..
            } = self.groups[group].state
            else {
                continue;
            };
            if self.over || now < not_before || self.has_ended(group) {
                continue;
            }
            if !self.is_within_budget(group, now, fleet) {
                continue;
            }
            let view = RequestView {
                waited: self.waited && self.next_attempt == 0,
                ..self.view(group)
            };
            match fleet.place(&view) {
                Ok(placed) => self.launch(group, placed, now),
                Err(NoPlacement::CannotResume) => {
                    self.end(Some(ServeError::Failed {
                        kind: FailureKind::Device,
                        message: NoPlacement::CannotResume.to_string(),
                    }));
                }
                Err(reason) if !reason.may_pass() => {
                    self.end(Some(ServeError::Rejected {
                        message: reason.to_string(),
                        param: reason.param(),
                    }));
                }
                Err(reason) => self.wait_for_workers(group, since, reason, now),
            }
        }
    }

    /// Hands a prefill leg that still holds its work to another decode worker.
    ///
    /// Not once decode has gone past the first token: its output stands, and
    /// another worker would produce it again.
    pub(super) fn retarget(
        &mut self,
        group: usize,
        kind: FailureKind,
        detail: &str,
        now: Duration,
        fleet: &mut dyn Fleet,
    ) -> bool {
        if self.has_decoded(group) {
            return false;
        }
        let Some(attempt) = self.groups[group].attempt() else {
            return false;
        };
        let prefill = &attempt.prefill;
        if !prefill.is_running()
            || !prefill.worker.capabilities.retargets
            || attempt.decode.is_none()
        {
            return false;
        }
        let prefill = prefill.worker.clone();
        let view = self.view(group);
        let Some(decode) = fleet.place_decode(&view, prefill.key, &attempt.refused_by) else {
            return false;
        };
        let (to_prefill, to_decode) = (attempt.leg_on(prefill.key), attempt.leg_on(decode.key));
        self.report_retry(group, RetryReason::Retargeted(kind), detail);
        self.dispatch_decode(group, to_decode, Handoff::With(prefill.peer), now);
        self.effects.push_back(Effect::Retarget {
            leg: to_prefill,
            peer: decode.peer.clone(),
        });
        self.timings.replacements += 1;
        self.timings.decode_worker = decode.key.worker.to_string();
        if let Some(attempt) = self.groups[group].attempt_mut() {
            attempt.retargeted = true;
            attempt.held.clear();
            attempt.decode = Some(Leg::new(decode));
        }
        true
    }

    /// The prefill leg of a serial handoff has ended: starts the decode leg with its ticket,
    /// on the worker that is best for it now.
    pub(super) fn redeem(
        &mut self,
        group: usize,
        ticket: Option<Ticket>,
        now: Duration,
        fleet: &mut dyn Fleet,
    ) {
        let Some(ticket) = ticket else {
            let detail = "prefill ended without a ticket";
            // Another prefill worker is likely configured alike.
            let whole_after = self.config.whole_after_kv_losses;
            let losses = &mut self.groups[group].retries.kv_losses;
            *losses = whole_after.saturating_sub(1).max(*losses);
            self.retry(group, RetryReason::KvLost, detail, now);
            return;
        };
        let Some(attempt) = self.groups[group].attempt() else {
            return;
        };
        let prefill = attempt.prefill.worker.clone();
        let view = self.view(group);
        let Some(decode) = fleet.place_decode(&view, prefill.key, &[]) else {
            let detail = "no decode worker is left for the ticket";
            self.retry(group, RetryReason::WorkerLost, detail, now);
            return;
        };
        self.timings.decode_worker = decode.key.worker.to_string();
        let Some(attempt) = self.groups[group].attempt_mut() else {
            return;
        };
        let leg = attempt.leg_on(decode.key);
        attempt.decode = Some(Leg::new(decode));
        let from = prefill.peer.engine_id.into();
        self.dispatch_decode(group, leg, Handoff::Redeem { ticket, from }, now);
    }

    /// Starts a decode leg after its prefill leg; choices that were stopped meanwhile end there.
    fn dispatch_decode(&mut self, group: usize, leg: LegId, handoff: Handoff, now: Duration) {
        self.dispatch(group, leg, LegKind::Decode, Some(handoff), now);
        for index in self.stopped(group) {
            self.effects.push_back(Effect::Abort {
                leg,
                choices: vec![index],
            });
        }
    }

    fn launch(&mut self, group: usize, placed: Placed, now: Duration) {
        let Placed {
            prefill,
            decode,
            why,
        } = placed;
        self.timings.why = why.map(Box::new);
        let number = self.next_attempt;
        self.next_attempt += 1;
        self.timings.prefill_worker = prefill.key.worker.to_string();
        self.timings.decode_worker = decode.key.worker.to_string();
        let split = prefill.key != decode.key;
        self.groups[group].choices = self.unfinished(group);
        let base = self.base(group);
        let mut attempt = Attempt {
            number,
            base,
            prefill: Leg::new(prefill),
            decode: split.then(|| Leg::new(decode)),
            refused_by: Vec::new(),
            retargeted: false,
            held: Vec::new(),
            started: now,
            last_decoded: None,
            settle_until: None,
        };
        let serial = attempt.is_serial();
        let prefill = attempt.leg_on(attempt.prefill.worker.key);
        match &mut attempt.decode {
            None => self.dispatch(group, prefill, LegKind::Colocated, None, now),
            Some(decode) if serial => {
                decode.state = LegState::AwaitingTicket;
                let handoff = Some(Handoff::IssueTicket);
                self.dispatch(group, prefill, LegKind::Prefill, handoff, now);
            }
            Some(decode) => {
                let to_decode = LegId {
                    worker: decode.worker.key,
                    ..prefill
                };
                let with_decode = Some(Handoff::With(decode.worker.peer.clone()));
                let with_prefill = Some(Handoff::With(attempt.prefill.worker.peer.clone()));
                self.dispatch(group, prefill, LegKind::Prefill, with_decode, now);
                self.dispatch(group, to_decode, LegKind::Decode, with_prefill, now);
            }
        }
        self.groups[group].state = GroupState::Running(Box::new(attempt));
    }

    fn dispatch(
        &mut self,
        group: usize,
        leg: LegId,
        kind: LegKind,
        handoff: Option<Handoff>,
        now: Duration,
    ) {
        let first = *self.first_dispatch.get_or_insert(now);
        let waited = now.saturating_sub(first);
        let spec = Box::new(self.spec(group, kind, handoff, waited));
        self.effects.push_back(Effect::Dispatch { leg, spec });
    }

    fn spec(
        &self,
        group: usize,
        kind: LegKind,
        handoff: Option<Handoff>,
        waited: Duration,
    ) -> LegSpec {
        let choices = self.groups[group].choices.clone();
        let resumed = match choices.as_slice() {
            [index] => self.choices[*index as usize].tokens[..self.base(group)].to_vec(),
            _ => Vec::new(),
        };
        let mut sampling = Arc::clone(&self.sampling);
        if self.prompt_scored && sampling.prompt_logprobs.is_some() {
            Arc::make_mut(&mut sampling).prompt_logprobs = None;
        }
        LegSpec {
            kind,
            handoff,
            waited,
            prompt: Arc::clone(&self.prompt),
            chunks: self.chunks.clone(),
            resumed,
            choices,
            sampling,
            cache_salt: Arc::clone(&self.cache_salt),
            opaque: self.opaque.clone(),
            trace: None,
        }
    }

    /// As its first placement sees it.
    pub fn request(&self) -> RequestView {
        self.view(0)
    }

    fn view(&self, group: usize) -> RequestView {
        let prompt = u32::try_from(self.prompt.len()).unwrap_or(u32::MAX);
        let base = u32::try_from(self.base(group)).unwrap_or(u32::MAX);
        let prompt_tokens = prompt.saturating_add(base);
        let max_tokens = self.sampling.max_tokens.saturating_sub(base);
        let choices = u32::try_from(self.unfinished(group).len()).unwrap_or(u32::MAX);
        let (least_tokens, choices, indivisible) = match &self.opaque {
            None => (1, choices, None),
            // A worker that only prefills cannot answer it alone, however short the answer.
            Some(opaque) => (2, opaque.sequences, opaque.indivisible),
        };
        let state = &self.groups[group];
        let lost = state.retries.kv_losses >= self.config.whole_after_kv_losses;
        RequestView {
            model: self.model,
            adapters: {
                let opaque = self.opaque.as_ref();
                opaque.map_or_else(Vec::new, |opaque| opaque.adapters.clone())
            },
            bound_to: self.bound_to,
            resumed_tokens: base,
            choices,
            warm: Vec::from_iter(state.warm.map(|worker| Warm {
                worker,
                tokens: prompt_tokens,
            })),
            avoid: state.avoid.clone(),
            chunks: self.chunks.clone(),
            keep_whole: lost || indivisible.is_some(),
            indivisible,
            ..RequestView::new(prompt_tokens, max_tokens.max(least_tokens))
                .keyed(&self.tenant, &self.prompt)
        }
    }

    /// Tokens of a group's choices that its attempt did not or will not produce.
    fn base(&self, group: usize) -> usize {
        let group = &self.groups[group];
        match (group.attempt(), group.choices.as_slice()) {
            (Some(attempt), _) => attempt.base,
            (None, [index]) => self.choices[*index as usize].tokens.len(),
            _ => 0,
        }
    }

    fn stopped(&self, group: usize) -> Vec<u32> {
        let choices = self.groups[group].choices.iter().copied();
        choices
            .filter(|&index| self.choices[index as usize].end == Some(End::Stopped))
            .collect()
    }

    /// No worker can take the group now: an accepted request waits, a new one fails.
    fn wait_for_workers(
        &mut self,
        group: usize,
        since: Duration,
        reason: NoPlacement,
        now: Duration,
    ) {
        let resumes = self.opaque.as_ref().is_some_and(|opaque| opaque.resumes);
        let accepted = self.next_attempt > 0 || resumes;
        let give_up = since + self.config.recover;
        if !accepted || now >= give_up {
            self.end(Some(ServeError::Unavailable {
                reason: reason.to_string(),
                retry_after_s: 2,
            }));
            return;
        }
        self.groups[group].state = GroupState::Waiting {
            not_before: give_up.min(now + ASK_AGAIN),
            since,
            for_workers: true,
        };
    }
}
