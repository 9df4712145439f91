//! What the end of a leg, or of a worker, means for the attempt.

use std::time::Duration;

use tasuki_core::{FailureKind, Retry};

use super::Machine;
use super::attempt::{Attempt, LegState};
use super::config::OnKvLoss;
use super::io::{Effect, Fleet, RetryReason};
use super::timing;
use crate::generation::ServeError;
use crate::leg::{LegEnd, LegEndReason, LegKind};
use crate::worker_ref::{LegId, WorkerKey};

impl Machine {
    pub(super) fn on_ended(
        &mut self,
        leg: LegId,
        ended: &LegEnd,
        now: Duration,
        fleet: &mut dyn Fleet,
    ) {
        let Some((group, kind)) = self.group_of(leg) else {
            return;
        };
        let Some(started) = self.end_leg(group, kind, LegState::Ended(ended.reason)) else {
            return;
        };
        if let Some(timings) = &ended.timings {
            let phases = &mut self.groups[group].phases;
            timing::add(&mut self.timings, phases, timings, kind, started);
        }
        if self.has_ended(group) {
            return;
        }
        if ended.reason.is_failure() && ended.failure.retry() == Retry::Never {
            let rejected = || ServeError::Rejected {
                message: ended.message.clone(),
                param: None,
            };
            let answer = ended.answer.clone().map(ServeError::Answered);
            self.end(Some(answer.unwrap_or_else(rejected)));
            return;
        }
        let handed_off = ended.reason == LegEndReason::HandedOff;
        match kind {
            LegKind::Colocated => self.on_colocated_ended(group, ended, now),
            LegKind::Prefill if handed_off && self.is_serial(group) => {
                self.redeem(group, ended.ticket.clone(), now, fleet);
            }
            LegKind::Prefill => self.on_prefill_ended(group, ended, now),
            LegKind::Decode => self.on_decode_ended(group, leg.worker, ended, now, fleet),
        }
    }

    pub(super) fn on_lost(&mut self, key: WorkerKey, now: Duration, fleet: &mut dyn Fleet) {
        for group in 0..self.groups.len() {
            if self.over {
                return;
            }
            let Some(kind) = self.groups[group].attempt().and_then(|a| a.kind_on(key)) else {
                continue;
            };
            if self.end_leg(group, kind, LegState::Lost).is_none() || self.has_ended(group) {
                continue;
            }
            let lost = RetryReason::WorkerLost;
            let detail = format!("worker {} is gone", key.worker);
            match kind {
                // With the first token here, decode has the KV or reports its loss itself.
                LegKind::Prefill if self.decode_can_go_on(group) => {}
                LegKind::Decode if self.retarget(group, lost.kind(), &detail, now, fleet) => {}
                _ => self.retry(group, lost, &detail, now),
            }
        }
    }

    /// Legs that decode and have had no token for too long end as failed.
    pub(super) fn end_stalled(&mut self, now: Duration, fleet: &mut dyn Fleet) {
        let limit = self.config.stalled;
        for group in 0..self.groups.len() {
            let attempt = self.groups[group].attempt();
            let stalled = attempt.filter(|attempt| {
                let at = attempt.stalled_at(limit);
                at.is_some_and(|at| at <= now)
            });
            let Some(attempt) = stalled.filter(|_| !self.over) else {
                continue;
            };
            let leg = attempt.leg_on(attempt.decoding().worker.key);
            let limit = limit.unwrap_or_default();
            let choices = Vec::new();
            self.effects.push_back(Effect::Abort { leg, choices });
            let ended = LegEnd {
                reason: LegEndReason::Failed,
                failure: FailureKind::Device,
                message: format!("worker {} sent no token for {limit:?}", leg.worker.worker),
                answer: None,
                ticket: None,
                timings: None,
            };
            self.on_ended(leg, &ended, now, fleet);
        }
    }

    /// Notes how a leg ended. When the attempt started, if the leg was running until now.
    fn end_leg(&mut self, group: usize, kind: LegKind, state: LegState) -> Option<Duration> {
        let attempt = self.groups[group].attempt_mut()?;
        let started = attempt.started;
        let leg = attempt.leg_mut(kind);
        let was_running = leg.is_running();
        leg.state = state;
        was_running.then_some(started)
    }

    fn on_colocated_ended(&mut self, group: usize, ended: &LegEnd, now: Duration) {
        let retry = match ended.reason {
            LegEndReason::Returned => RetryReason::Returned,
            LegEndReason::Refused => RetryReason::Refused,
            _ => RetryReason::Failed(ended.failure),
        };
        let detail = format!("{}: {}", ended.reason.as_str(), ended.message);
        self.retry(group, retry, &detail, now);
    }

    fn on_prefill_ended(&mut self, group: usize, ended: &LegEnd, now: Duration) {
        let why = &ended.message;
        match ended.reason {
            LegEndReason::HandedOff if self.decode_is_running(group) => {}
            // After a retarget the new decode worker cannot go on without the prefill leg.
            _ if self.decode_can_go_on(group) && !self.is_retargeted(group) => {}
            LegEndReason::Refused => self.retry(group, RetryReason::Refused, why, now),
            LegEndReason::Returned => self.retry(group, RetryReason::Returned, why, now),
            // The lease ran out before the new decode worker had the KV.
            _ if ended.failure == FailureKind::Transport && self.decode_can_go_on(group) => {
                self.retry(group, RetryReason::KvLost, why, now);
            }
            reason => {
                let detail = format!("prefill {}: {why}", reason.as_str());
                self.retry(group, RetryReason::Failed(ended.failure), &detail, now);
            }
        }
    }

    fn on_decode_ended(
        &mut self,
        group: usize,
        from: WorkerKey,
        ended: &LegEnd,
        now: Duration,
        fleet: &mut dyn Fleet,
    ) {
        let why = &ended.message;
        match ended.reason {
            LegEndReason::Refused => {
                if let Some(attempt) = self.groups[group].attempt_mut() {
                    attempt.refused_by.push(from.worker);
                }
                let detail = format!("worker {} refused: {why}", from.worker);
                if !self.retarget(group, FailureKind::Overload, &detail, now, fleet) {
                    self.retry(group, RetryReason::Refused, &detail, now);
                }
            }
            LegEndReason::Returned => self.retry(group, RetryReason::Returned, why, now),
            // The first tokens ended every choice: prefill reports them.
            LegEndReason::Finished if self.first_tokens_follow(group) => {}
            LegEndReason::KvLost => {
                // Before the first token there was no KV to lose; after a retarget
                // the lease may have run out. Neither is what `fail` is about.
                let fail = self.config.on_kv_loss == OnKvLoss::Fail
                    && self.is_prefilled(group)
                    && !self.is_retargeted(group);
                if fail {
                    self.end(Some(ServeError::Failed {
                        kind: ended.failure,
                        message: "the KV cache of the request was lost between prefill and decode"
                            .to_owned(),
                    }));
                } else {
                    self.retry(group, RetryReason::KvLost, why, now);
                }
            }
            reason => {
                let detail = format!("decode {}: {why}", reason.as_str());
                self.retry(group, RetryReason::Failed(ended.failure), &detail, now);
            }
        }
    }

    /// Whether the decode leg can finish the attempt without the prefill leg.
    fn decode_can_go_on(&self, group: usize) -> bool {
        self.decode_is_running(group) && self.is_prefilled(group)
    }

    fn decode_is_running(&self, group: usize) -> bool {
        let attempt = self.groups[group].attempt();
        attempt.is_some_and(|attempt| attempt.decode_is_running())
    }

    /// Whether the first tokens may still come from the prefill leg.
    fn first_tokens_follow(&self, group: usize) -> bool {
        let attempt = self.groups[group].attempt();
        attempt.is_some_and(|a| a.prefill.is_running() && !a.decode_is_first())
    }

    fn is_serial(&self, group: usize) -> bool {
        let attempt = self.groups[group].attempt();
        attempt.is_some_and(Attempt::is_serial)
    }

    fn is_retargeted(&self, group: usize) -> bool {
        let attempt = self.groups[group].attempt();
        attempt.is_some_and(|attempt| attempt.retargeted) && !self.has_decoded(group)
    }
}
