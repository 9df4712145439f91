//! Placing, and placing again: what was streamed stands, the rest is prefilled anew.

use std::time::{Duration, Instant};

use tasuki_core::{FailureKind, RequestView, Warm};
use tasuki_policy::NoPlacement;
use tasuki_wire::v1;

use super::Machine;
use super::choice::End;
use super::flight::{Flight, Group, GroupState, Leg, LegState};
use super::io::{Effect, Fleet, Setback};
use crate::serve::api::ServeError;
use crate::workers::Seat;

/// While nobody can take a group: how often to ask again, besides at every change.
const ASK_AGAIN: Duration = Duration::from_millis(200);

impl Group {
    /// When something has to happen by itself.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            GroupState::Waiting { not_before, .. } => Some(*not_before),
            GroupState::Flying(flight) => flight.settle_until,
            GroupState::Landed => None,
        }
    }
}

impl Machine {
    /// Groups that nobody could take need not wait any longer.
    pub(super) fn on_workers_changed(&mut self, now: Instant) {
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
    pub(super) fn place_waiting(&mut self, now: Instant, fleet: &mut dyn Fleet) {
        for group in 0..self.groups.len() {
            let GroupState::Waiting {
                not_before, since, ..
            } = self.groups[group].state
            else {
                continue;
            };
            if self.over || self.unfinished(group).is_empty() || now < not_before {
                continue;
            }
            match fleet.place(&self.view(group)) {
                Ok(seats) => self.launch(group, seats, now),
                Err(reason) if !reason.may_pass() => {
                    self.end(Some(ServeError::Rejected(reason.to_string())));
                }
                Err(reason) => self.wait_on(group, since, reason, now),
            }
        }
    }

    /// Gives an attempt up; its unfinished choices wait for the next one.
    pub(super) fn set_back(&mut self, group: usize, setback: Setback, detail: &str, now: Instant) {
        let pause = match self.count(group, setback, now) {
            Ok(pause) => pause,
            Err(error) => {
                self.note(group, setback, detail);
                self.end(Some(error));
                return;
            }
        };
        self.note(group, setback, detail);
        self.abort(group, vec![]);
        self.timings.replacements += 1;
        let prefilled = self.is_prefilled(group);
        let unfinished = self.unfinished(group);
        let old = &mut self.groups[group];
        old.choices.clear();
        let state = std::mem::replace(&mut old.state, GroupState::Landed);
        let (setbacks, mut avoid) = (old.setbacks.clone(), std::mem::take(&mut old.avoid));
        let account = old.account.clone();
        let mut warm = None;
        if let GroupState::Flying(flight) = state {
            let alive = flight.prefill.state != LegState::Lost;
            warm = (alive && prefilled).then_some(flight.prefill.seat.key.worker);
            if matches!(setback, Setback::Failed(_)) {
                let failed = flight.legs().filter(|leg| leg.state.is_failure());
                avoid.extend(failed.map(|leg| leg.seat.key.worker));
            }
        }
        for choices in self.regroup(unfinished) {
            for &index in &choices {
                self.choices[index as usize].forget_early();
            }
            self.groups.push(Group {
                choices,
                state: GroupState::Waiting {
                    not_before: now + pause,
                    since: now + pause,
                    for_workers: false,
                },
                avoid: avoid.clone(),
                warm,
                setbacks: setbacks.clone(),
                account: account.clone(),
            });
        }
    }

    /// Hands a prefill leg that still holds its work to another decode worker.
    ///
    /// Not once decode has gone past the first token: what it said stands, and
    /// another worker would say it anew.
    pub(super) fn retarget(
        &mut self,
        group: usize,
        kind: FailureKind,
        detail: &str,
        fleet: &mut dyn Fleet,
    ) -> bool {
        let view = self.view(group);
        if self.has_decoded(group) {
            return false;
        }
        let Some(flight) = self.groups[group].flight() else {
            return false;
        };
        if !flight.prefill.is_running() || flight.decode.is_none() {
            return false;
        }
        let (prefill, attempt) = (flight.prefill.seat.clone(), flight.attempt.clone());
        let Some(seat) = fleet.place_decode(&view, prefill.key, &flight.refused_by) else {
            return false;
        };
        self.note(group, Setback::Retargeted(kind), detail);
        let submit = self.submit(group, v1::Leg::Decode, &attempt, Some(&prefill));
        self.effects.push(Effect::Submit {
            to: seat.key,
            submit,
        });
        self.effects.push(Effect::Retarget {
            to: prefill.key,
            retarget: v1::Retarget {
                request_id: attempt.clone(),
                peer: Some(seat.peer.clone()),
            },
        });
        for index in self.stopped(group) {
            self.effects.push(Effect::Abort {
                to: seat.key,
                abort: v1::Abort {
                    request_id: attempt.clone(),
                    choices: vec![index],
                },
            });
        }
        self.timings.replacements += 1;
        self.timings.decode_worker = seat.key.worker.to_string();
        if let Some(flight) = self.groups[group].flight_mut() {
            flight.retargeted = true;
            flight.held.clear();
            flight.decode = Some(Leg::new(seat));
        }
        true
    }

    fn launch(&mut self, group: usize, (prefill, decode): (Seat, Seat), now: Instant) {
        let attempt = format!("{}.{}", self.request.request_id, self.next_attempt);
        self.next_attempt += 1;
        self.timings.prefill_worker = prefill.key.worker.to_string();
        self.timings.decode_worker = decode.key.worker.to_string();
        let split = prefill.key != decode.key;
        self.groups[group].choices = self.unfinished(group);
        let mut submit = |leg, to: &Seat, peer| {
            let submit = self.submit(group, leg, &attempt, peer);
            self.effects.push(Effect::Submit { to: to.key, submit });
        };
        if split {
            submit(v1::Leg::Prefill, &prefill, Some(&decode));
            submit(v1::Leg::Decode, &decode, Some(&prefill));
        } else {
            submit(v1::Leg::Colocated, &prefill, None);
        }
        let base = self.base(group);
        self.groups[group].state = GroupState::Flying(Box::new(Flight {
            attempt,
            base,
            prefill: Leg::new(prefill),
            decode: split.then(|| Leg::new(decode)),
            refused_by: Vec::new(),
            retargeted: false,
            held: Vec::new(),
            submitted: now,
            settle_until: None,
        }));
    }

    fn submit(&self, group: usize, leg: v1::Leg, attempt: &str, peer: Option<&Seat>) -> v1::Submit {
        let choices = self.groups[group].choices.clone();
        let resumed = match choices.as_slice() {
            [index] => self.choices[*index as usize].tokens[..self.base(group)].to_vec(),
            _ => Vec::new(),
        };
        let mut sampling = self.request.sampling.clone();
        if self.prompt_scored {
            sampling.prompt_logprobs = None;
        }
        v1::Submit {
            request_id: attempt.to_owned(),
            leg: leg.into(),
            peer: peer.map(|seat| seat.peer.clone()),
            prompt_tokens: self.request.prompt.to_vec(),
            resumed_tokens: resumed,
            choices,
            sampling: Some(sampling),
            tenant: self.request.tenant.clone(),
        }
    }

    fn view(&self, group: usize) -> RequestView {
        let prompt = u32::try_from(self.request.prompt.len()).unwrap_or(u32::MAX);
        let base = u32::try_from(self.base(group)).unwrap_or(u32::MAX);
        let prompt_tokens = prompt.saturating_add(base);
        let max_tokens = self.request.sampling.max_tokens.saturating_sub(base).max(1);
        let choices = u32::try_from(self.unfinished(group).len()).unwrap_or(u32::MAX);
        RequestView {
            choices,
            warm: self.groups[group].warm.map(|worker| Warm {
                worker,
                tokens: prompt_tokens,
            }),
            avoid: self.groups[group].avoid.clone(),
            keep_whole: self.groups[group].setbacks.kv_losses >= self.config.whole_after_kv_losses,
            ..RequestView::new(prompt_tokens, max_tokens)
        }
    }

    /// Tokens of a group's choices that its attempt did not or will not produce.
    fn base(&self, group: usize) -> usize {
        let group = &self.groups[group];
        match (group.flight(), group.choices.as_slice()) {
            (Some(flight), _) => flight.base,
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

    /// Choices without a token can share a prefill; the others have their own past.
    fn regroup(&self, unfinished: Vec<u32>) -> Vec<Vec<u32>> {
        let has_none = |index: &u32| self.choices[*index as usize].tokens.is_empty();
        let (fresh, begun): (Vec<u32>, Vec<u32>) = unfinished.into_iter().partition(has_none);
        let fresh = (!fresh.is_empty()).then_some(fresh);
        begun
            .into_iter()
            .map(|index| vec![index])
            .chain(fresh)
            .collect()
    }

    /// Counts a setback: how long to pause, or that it was one too many.
    fn count(
        &mut self,
        group: usize,
        setback: Setback,
        now: Instant,
    ) -> Result<Duration, ServeError> {
        let counts = &mut self.groups[group].setbacks;
        let config = &self.config;
        let failed = |message: String| {
            let kind = setback.kind();
            Err(ServeError::Failed { kind, message })
        };
        match setback {
            Setback::Failed(kind) => counts.fail(kind, config)?,
            Setback::WorkerLost => {
                counts.losses_in_a_row += 1;
                if counts.losses_in_a_row > config.max_losses_in_a_row {
                    let losses = counts.losses_in_a_row;
                    return failed(format!(
                        "{losses} workers were lost while they ran the request"
                    ));
                }
            }
            Setback::KvLost => {
                counts.kv_losses += 1;
                if counts.kv_losses > config.max_kv_losses {
                    let losses = counts.kv_losses;
                    return failed(format!(
                        "the KV cache of the request was lost {losses} times"
                    ));
                }
            }
            Setback::Refused => return counts.pause_after_refusal(now, config),
            Setback::Returned | Setback::Retargeted(_) => {}
        }
        Ok(Duration::ZERO)
    }

    /// Nobody can take the group now: an accepted request waits, a new one does not.
    fn wait_on(&mut self, group: usize, since: Instant, reason: NoPlacement, now: Instant) {
        let accepted = self.next_attempt > 0;
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

    fn note(&mut self, group: usize, setback: Setback, detail: &str) {
        let attempt = self.groups[group].flight().map(|f| f.attempt.clone());
        self.effects.push(Effect::Setback {
            attempt: attempt.unwrap_or_default(),
            setback,
            detail: detail.to_owned(),
        });
    }
}
