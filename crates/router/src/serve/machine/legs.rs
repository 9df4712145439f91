//! What the end of a leg, or of a worker, means for the attempt.

use std::time::Instant;

use tasuki_core::{FailureKind, Retry};
use tasuki_wire::v1::{self, LegEndReason};

use super::Machine;
use super::config::OnKvLoss;
use super::flight::LegState;
use super::io::{Fleet, Part, Setback};
use crate::serve::api::ServeError;
use crate::workers::WorkerKey;

impl Machine {
    pub(super) fn on_ended(
        &mut self,
        from: WorkerKey,
        ended: &v1::LegEnd,
        now: Instant,
        fleet: &mut dyn Fleet,
    ) {
        let Some(group) = self.group_of(&ended.request_id, from) else {
            return;
        };
        let reason = ended.reason();
        let Some((part, submitted)) = self.groups[group].flight_mut().and_then(|flight| {
            let part = flight.part_of(from)?;
            let leg = flight.leg_mut(part);
            let was_running = leg.is_running();
            leg.state = LegState::Ended(reason);
            was_running.then_some((part, flight.submitted))
        }) else {
            return;
        };
        if let Some(timings) = &ended.timings {
            let queued = submitted - self.received;
            let account = &mut self.groups[group].account;
            super::timing::add(&mut self.timings, account, timings, part, queued);
        }
        if self.unfinished(group).is_empty() {
            return;
        }
        if is_failure(reason) && failure_kind(ended).retry() == Retry::Never {
            self.end(Some(ServeError::Rejected(ended.message.clone())));
            return;
        }
        match part {
            Part::Whole => self.on_whole_ended(group, ended, now),
            Part::Prefill => self.on_prefill_ended(group, ended, now),
            Part::Decode => self.on_decode_ended(group, from, ended, now, fleet),
        }
    }

    pub(super) fn on_lost(&mut self, key: WorkerKey, now: Instant, fleet: &mut dyn Fleet) {
        for group in 0..self.groups.len() {
            if self.over {
                return;
            }
            let Some(part) = self.groups[group].flight_mut().and_then(|flight| {
                let part = flight.part_of(key)?;
                let leg = flight.leg_mut(part);
                let was_running = leg.is_running();
                leg.state = LegState::Lost;
                was_running.then_some(part)
            }) else {
                continue;
            };
            if self.unfinished(group).is_empty() {
                continue;
            }
            let detail = format!("worker {} is gone", key.worker);
            match part {
                // With the first token here, decode has the KV or reports its loss itself.
                Part::Prefill if self.decode_can_go_on(group) => {}
                Part::Decode
                    if self.retarget(group, Setback::WorkerLost.kind(), &detail, fleet) => {}
                _ => self.set_back(group, Setback::WorkerLost, &detail, now),
            }
        }
    }

    fn on_whole_ended(&mut self, group: usize, ended: &v1::LegEnd, now: Instant) {
        let reason = ended.reason();
        let setback = match reason {
            LegEndReason::LegEndReturned => Setback::Returned,
            LegEndReason::LegEndRefused => Setback::Refused,
            _ => Setback::Failed(failure_kind(ended)),
        };
        let detail = format!("{}: {}", reason.as_str_name(), ended.message);
        self.set_back(group, setback, &detail, now);
    }

    fn on_prefill_ended(&mut self, group: usize, ended: &v1::LegEnd, now: Instant) {
        let why = &ended.message;
        match ended.reason() {
            LegEndReason::LegEndHandedOff if self.decode_is_running(group) => {}
            _ if self.decode_can_go_on(group) => {
                // The new peer can get nothing from a prefill leg that is gone.
                if self.is_retargeted(group) {
                    self.set_back(group, Setback::KvLost, why, now);
                }
            }
            LegEndReason::LegEndRefused => self.set_back(group, Setback::Refused, why, now),
            LegEndReason::LegEndReturned => self.set_back(group, Setback::Returned, why, now),
            reason => {
                let detail = format!("prefill {}: {why}", reason.as_str_name());
                self.set_back(group, Setback::Failed(failure_kind(ended)), &detail, now);
            }
        }
    }

    fn on_decode_ended(
        &mut self,
        group: usize,
        from: WorkerKey,
        ended: &v1::LegEnd,
        now: Instant,
        fleet: &mut dyn Fleet,
    ) {
        let why = &ended.message;
        match ended.reason() {
            LegEndReason::LegEndRefused => {
                if let Some(flight) = self.groups[group].flight_mut() {
                    flight.refused_by.push(from.worker);
                }
                let detail = format!("worker {} refused: {why}", from.worker);
                if !self.retarget(group, FailureKind::Overload, &detail, fleet) {
                    self.set_back(group, Setback::Refused, &detail, now);
                }
            }
            LegEndReason::LegEndReturned => self.set_back(group, Setback::Returned, why, now),
            // The rest is prefill's to say: first tokens, when they were the last.
            LegEndReason::LegEndFinished if self.prefill_is_running(group) => {}
            LegEndReason::LegEndKvLost => {
                // Before the first token there was no KV to lose; after a retarget
                // the lease may have run out. Neither is what `fail` is about.
                let fail = self.config.on_kv_loss == OnKvLoss::Fail
                    && self.is_prefilled(group)
                    && !self.is_retargeted(group);
                if fail {
                    self.end(Some(ServeError::Failed {
                        kind: failure_kind(ended),
                        message: "the KV cache of the request was lost between prefill and decode"
                            .to_owned(),
                    }));
                } else {
                    self.set_back(group, Setback::KvLost, why, now);
                }
            }
            reason => {
                let detail = format!("decode {}: {why}", reason.as_str_name());
                self.set_back(group, Setback::Failed(failure_kind(ended)), &detail, now);
            }
        }
    }

    /// Whether the decode leg can finish the attempt without the prefill leg.
    fn decode_can_go_on(&self, group: usize) -> bool {
        self.decode_is_running(group) && self.is_prefilled(group)
    }

    fn decode_is_running(&self, group: usize) -> bool {
        let flight = self.groups[group].flight();
        flight.is_some_and(|flight| flight.decode_is_running())
    }

    fn prefill_is_running(&self, group: usize) -> bool {
        let flight = self.groups[group].flight();
        flight.is_some_and(|flight| flight.prefill.is_running())
    }

    fn is_retargeted(&self, group: usize) -> bool {
        let flight = self.groups[group].flight();
        flight.is_some_and(|flight| flight.retargeted) && !self.has_decoded(group)
    }
}

/// Whether a leg ended because something is at fault.
fn is_failure(reason: LegEndReason) -> bool {
    use LegEndReason as R;
    !matches!(
        reason,
        R::LegEndFinished | R::LegEndHandedOff | R::LegEndAborted
    )
}

/// What a worker says is at fault. If it says nothing, a request that it rejects is the client's.
fn failure_kind(ended: &v1::LegEnd) -> FailureKind {
    use v1::FailureKind as Wire;
    match ended.failure() {
        Wire::FailureClient => FailureKind::Client,
        Wire::FailureModel => FailureKind::Model,
        Wire::FailureMemory => FailureKind::Memory,
        Wire::FailureTransport => FailureKind::Transport,
        Wire::FailureOverload => FailureKind::Overload,
        Wire::FailureUnspecified if ended.reason() == LegEndReason::LegEndRejected => {
            FailureKind::Client
        }
        Wire::FailureDevice | Wire::FailureUnspecified => FailureKind::Device,
    }
}
