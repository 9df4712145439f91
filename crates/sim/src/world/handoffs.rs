//! How the KV of a split request gets from one worker to the other: credit, blocks, transfers
//! while the prompt is computed, release.

use tasuki_flow::{LegEndReason, LegKind};

use super::legs::ended;
use super::turns::LegReport;
use super::{Event, World};
use crate::link::TransferId;
use crate::time::Time;
use crate::worker::{SeqId, Stage};

/// One handoff.
#[derive(Debug)]
pub(super) struct Handoff {
    live: u32,
    attempt: u32,
    prefill: (u32, SeqId),
    decode: (u32, SeqId),
    /// Of the context.
    tokens: u32,
    computed: u32,
    /// Moved, being moved, or there from the beginning.
    ordered: u32,
    assigned: bool,
    prefilled: Option<Time>,
    transfer: Option<TransferId>,
    began: Option<Time>,
}

/// A decode leg whose KV is lost.
#[derive(Debug)]
pub(super) struct LostKv {
    live: u32,
    attempt: u32,
    decode: (u32, SeqId),
}

impl World<'_> {
    /// A decode leg is on its worker: joins it with the prefill leg of its attempt.
    pub(super) fn begin_handoff(&mut self, place: u32, attempt: u32) {
        let Some(live) = &mut self.live[place as usize] else {
            return;
        };
        let of = |kind| {
            let mut legs = live.legs.iter().rev();
            legs.find(|leg| leg.kind == kind && leg.id.attempt == attempt)
                .map(|leg| (leg.worker, leg.seq))
        };
        let (Some(prefill), Some(decode)) = (of(LegKind::Prefill), of(LegKind::Decode)) else {
            return;
        };
        let sequence = self.workers[prefill.0 as usize].sequence(prefill.1);
        let handoff = Handoff {
            live: place,
            attempt,
            prefill,
            decode,
            tokens: sequence.tokens,
            computed: sequence.computed,
            ordered: 0,
            assigned: false,
            prefilled: (sequence.stage == Stage::Held).then_some(self.now),
            transfer: None,
            began: None,
        };
        let id = match self.free_handoffs.pop() {
            Some(id) => {
                self.handoffs[id as usize] = Some(handoff);
                id
            }
            None => {
                self.handoffs.push(Some(handoff));
                (self.handoffs.len() - 1) as u32
            }
        };
        let both = live.legs.iter_mut().filter(|leg| leg.id.attempt == attempt);
        let mut former = None;
        for leg in both {
            let before = leg.handoff.replace(id);
            former = before.or(former);
        }
        if let Some(former) = former {
            self.end_handoff(former);
        }
        self.credit(id);
    }

    /// Asks the decode worker for room; with it, lets the prefill worker know.
    fn credit(&mut self, id: u32) {
        let Some(handoff) = &self.handoffs[id as usize] else {
            return;
        };
        let ((from, prefill), (to, decode)) = (handoff.prefill, handoff.decode);
        if !self.workers[to as usize].may_credit(decode) {
            return;
        }
        let latency_s = self.network.latency_s(from, to) + self.config.message_s;
        let at = self.now.plus_s(latency_s);
        let state = &mut self.workers[from as usize];
        let number = state.turn_number;
        let started = matches!(
            state.sequence(prefill).stage,
            Stage::Prefilling | Stage::Held
        );
        state.credit(prefill);
        if !started {
            state.wake(at);
            self.schedule_turn(from, number);
        } else {
            self.assign(id);
        }
    }

    /// Room may have become free on a worker: those that were denied ask again.
    pub(super) fn credit_denied(&mut self, worker: u32) {
        for seq in self.workers[worker as usize].denied() {
            let sequence = self.workers[worker as usize].sequence(seq);
            if let Some(id) = self.handoff_of(worker, sequence.leg.request, sequence.leg.attempt) {
                self.credit(id);
            }
        }
    }

    fn handoff_of(&self, worker: u32, place: u32, attempt: u32) -> Option<u32> {
        let live = self.live[place as usize].as_ref()?;
        let mut legs = live.legs.iter();
        legs.find(|leg| leg.worker == worker && leg.id.attempt == attempt)?
            .handoff
    }

    fn handoff_of_sequence(&self, worker: u32, seq: SeqId) -> Option<u32> {
        let leg = &self.workers[worker as usize].sequence(seq).leg;
        self.handoff_of(worker, leg.request, leg.attempt)
    }

    /// Gives the decode leg its blocks.
    fn assign(&mut self, id: u32) {
        let Some(handoff) = &mut self.handoffs[id as usize] else {
            return;
        };
        let (to, decode) = handoff.decode;
        let state = &mut self.workers[to as usize];
        if handoff.assigned || !state.sequence(decode).credited {
            return;
        }
        handoff.assigned = true;
        handoff.ordered = state.assign(decode).min(handoff.tokens);
        self.pump(id);
    }

    pub(super) fn prefill_started(&mut self, worker: u32, seq: SeqId) {
        if let Some(id) = self.handoff_of_sequence(worker, seq) {
            self.assign(id);
        }
    }

    pub(super) fn prefill_computed(&mut self, worker: u32, seq: SeqId) {
        let computed = self.workers[worker as usize].sequence(seq).computed;
        if let Some(id) = self.handoff_of_sequence(worker, seq) {
            if let Some(handoff) = &mut self.handoffs[id as usize] {
                handoff.computed = computed;
            }
            self.pump(id);
        }
    }

    pub(super) fn prefill_ended(&mut self, worker: u32, seq: SeqId) {
        if self.workers[worker as usize].sequence(seq).leg.kind != LegKind::Prefill {
            return;
        }
        if let Some(id) = self.handoff_of_sequence(worker, seq) {
            if let Some(handoff) = &mut self.handoffs[id as usize] {
                handoff.prefilled = Some(self.now);
            }
            self.pump(id);
        }
    }

    /// Orders what is computed and not ordered yet, if nothing is on its way.
    fn pump(&mut self, id: u32) {
        let Some(handoff) = &mut self.handoffs[id as usize] else {
            return;
        };
        if !handoff.assigned || handoff.transfer.is_some() {
            return;
        }
        let size = self.workers[handoff.prefill.0 as usize]
            .config
            .limits
            .block_size;
        let final_tokens = if handoff.prefilled.is_some() {
            handoff.tokens
        } else {
            handoff.computed / size * size
        };
        if handoff.ordered < final_tokens {
            let tokens = final_tokens - handoff.ordered;
            handoff.ordered = final_tokens;
            handoff.began.get_or_insert(self.now);
            let bytes = f64::from(tokens) * self.config.kv_bytes_per_token;
            let (from, to) = (handoff.prefill.0, handoff.decode.0);
            let transfer = self.network.begin(from, to, bytes, self.now);
            handoff.transfer = Some(transfer);
            self.transfers.insert(transfer, id);
        } else if handoff.prefilled.is_some() {
            self.complete(id);
        }
    }

    pub(super) fn transfer_ends(&mut self, id: TransferId, number: u32) {
        if !self.network.is_end(id, number) {
            return;
        }
        self.network.end(id, self.now);
        let Some(handoff) = self.transfers.remove(&id) else {
            return;
        };
        if let Some(handoff) = &mut self.handoffs[handoff as usize] {
            handoff.transfer = None;
        }
        self.pump(handoff);
    }

    /// All KV is there: the decode worker goes on, the prefill worker's blocks are free.
    fn complete(&mut self, id: u32) {
        let Some(handoff) = self.handoffs[id as usize].take() else {
            return;
        };
        self.free_handoffs.push(id);
        let ((from, prefill), (to, decode)) = (handoff.prefill, handoff.decode);
        let at = self.now.plus_s(self.config.handoff_s);
        if let Some(live) = &mut self.live[handoff.live as usize] {
            let since = handoff.prefilled.unwrap_or(self.now);
            live.outcome.exposed_s = at.s_since(since);
            live.outcome.transfer_s = handoff.began.map_or(0.0, |began| self.now.s_since(began));
            for leg in live.legs.iter_mut().filter(|leg| leg.handoff == Some(id)) {
                leg.handoff = None;
            }
        }
        let state = &mut self.workers[to as usize];
        let number = state.turn_number;
        state.arrive(decode, at);
        self.schedule_turn(to, number);
        self.drop_sequence(from, prefill);
        let reported = LegReport {
            live: handoff.live,
            seq: prefill,
            attempt: handoff.attempt,
            output: None,
            end: Some(ended(LegEndReason::HandedOff)),
        };
        self.report(from, vec![reported]);
    }

    /// A handoff is given up: nothing more is moved for it.
    pub(super) fn end_handoff(&mut self, id: u32) {
        let Some(handoff) = self.handoffs[id as usize].take() else {
            return;
        };
        self.free_handoffs.push(id);
        if let Some(transfer) = handoff.transfer {
            self.transfers.remove(&transfer);
            self.network.end(transfer, self.now);
        }
        if let Some(live) = &mut self.live[handoff.live as usize] {
            for leg in live.legs.iter_mut().filter(|leg| leg.handoff == Some(id)) {
                leg.handoff = None;
            }
        }
    }

    /// A worker is gone: gives up the handoffs from it, and says which decode legs need their KV.
    pub(super) fn give_up_handoffs_of(&mut self, worker: u32) -> Vec<LostKv> {
        let mut lost = Vec::new();
        for id in 0..self.handoffs.len() as u32 {
            if let Some(handoff) = &self.handoffs[id as usize]
                && handoff.prefill.0 == worker
            {
                lost.push(LostKv {
                    live: handoff.live,
                    attempt: handoff.attempt,
                    decode: handoff.decode,
                });
                self.end_handoff(id);
            }
        }
        lost
    }

    /// A decode worker notices that the KV of a leg cannot be had.
    pub(super) fn lose_kv(&mut self, lost: &LostKv) {
        let (live, attempt, (worker, seq)) = (lost.live, lost.attempt, lost.decode);
        let request = self.live[live as usize].as_ref();
        let is_there = request.is_some_and(|request| {
            let mut legs = request.legs.iter();
            legs.any(|leg| (leg.worker, leg.seq, leg.id.attempt) == (worker, seq, attempt))
        });
        if is_there {
            self.drop_sequence(worker, seq);
            let end = Some(ended(LegEndReason::KvLost));
            let output = None;
            let reported = LegReport {
                live,
                seq,
                attempt,
                output,
                end,
            };
            self.report(worker, vec![reported]);
        }
    }

    /// Lets machines that wait for a worker look again.
    pub(super) fn workers_changed(&mut self) {
        for place in 0..self.live.len() as u32 {
            // Those that wait to be placed hear of it by admission.
            let live = self.live[place as usize].as_ref();
            if live.is_some_and(|live| live.outcome.admitted.is_some()) {
                self.input(place, tasuki_flow::Input::WorkersChanged);
            }
        }
    }

    pub(super) fn restart_at(&mut self, worker: u32, at: Time) {
        self.at(at, Event::Restart { worker });
    }
}
