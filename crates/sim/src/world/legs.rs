//! Legs on workers: how they begin, and how they are stopped.

use std::sync::Arc;

use tasuki_flow::fleet::LegSlot;
use tasuki_flow::{Input, LegEnd, LegEndReason, LegId, LegKind, LegSpec};

use super::World;
use super::record::ShellEvent;
use crate::worker::{NewLeg, SeqId};

/// A leg on a worker.
pub(super) struct Leg {
    pub id: LegId,
    pub slot: LegSlot,
    pub worker: u32,
    pub seq: SeqId,
    pub kind: LegKind,
    pub handoff: Option<u32>,
    /// Output tokens of the request that the machine has got by the time of this leg.
    pub delivered: u32,
    /// Those that the fleet has counted, once the router has got the first ones of this leg.
    pub counted: Option<u32>,
}

impl World<'_> {
    pub(super) fn dispatch(&mut self, place: u32, id: LegId, spec: &LegSpec) {
        let worker = id.worker.worker.0;
        let alive = self.keys[worker as usize] == Some(id.worker);
        let slot = alive
            .then(|| self.fleet.on_dispatched(id.worker, spec))
            .flatten();
        let Some(slot) = slot else {
            self.input(place, Input::Lost(id.worker));
            return;
        };
        let Some(live) = &mut self.live[place as usize] else {
            return;
        };
        if self.config.record {
            self.run.record.push(ShellEvent::Dispatched {
                at: self.now,
                index: live.request.index,
                attempt: id.attempt,
                kind: spec.kind,
                worker,
            });
        }
        let resumed = spec.resumed.len() as u32;
        let leg = NewLeg {
            request: place,
            attempt: id.attempt,
            waited: spec.waited,
            kind: spec.kind,
            number: slot.number,
            tokens: live.request.prompt_tokens + resumed,
            resumed,
            output_tokens: live.request.output_tokens,
            chunks: Arc::clone(&live.request.chunks),
        };
        match spec.kind {
            LegKind::Decode => live.outcome.decode = worker,
            LegKind::Prefill => live.outcome.prefill = worker,
            LegKind::Colocated => {
                (live.outcome.prefill, live.outcome.decode) = (worker, worker);
            }
        }
        let state = &mut self.workers[worker as usize];
        let number = state.turn_number;
        let seq = state.submit(leg, self.now.plus_s(self.config.message_s));
        live.legs.push(Leg {
            id,
            slot,
            worker,
            seq,
            kind: spec.kind,
            handoff: None,
            delivered: resumed + u32::from(spec.kind == LegKind::Decode),
            counted: None,
        });
        self.schedule_turn(worker, number);
        if spec.kind == LegKind::Decode {
            self.begin_handoff(place, id.attempt);
        }
    }

    pub(super) fn abort(&mut self, place: u32, id: LegId) {
        let Some(live) = &mut self.live[place as usize] else {
            return;
        };
        let Some(at) = live.legs.iter().position(|leg| leg.id == id) else {
            return;
        };
        let leg = live.legs.remove(at);
        if let Some(handoff) = leg.handoff {
            self.end_handoff(handoff);
        }
        self.drop_sequence(leg.worker, leg.seq);
        let end = ended(LegEndReason::Aborted);
        self.fleet.on_outcome(id.worker, leg.slot, &end);
        self.fleet.on_ended(id.worker, leg.slot, None);
        self.fleet.recount(id.worker);
        self.input(place, Input::Ended(id, end));
    }

    /// Stops a sequence on its worker.
    pub(super) fn drop_sequence(&mut self, worker: u32, seq: SeqId) {
        let at = self.now;
        let state = &mut self.workers[worker as usize];
        let number = state.turn_number;
        state.remove(seq);
        state.wake(at);
        self.schedule_turn(worker, number);
        self.credit_denied(worker);
    }
}

/// The end of a leg, without more to say.
pub(super) fn ended(reason: LegEndReason) -> LegEnd {
    LegEnd {
        reason,
        failure: reason.usual_failure(),
        message: String::new(),
        answer: None,
        ticket: None,
        timings: None,
    }
}
