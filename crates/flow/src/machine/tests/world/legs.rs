//! The legs on the workers: what each does next, and whether its KV is there.

use tasuki_core::{FirstToken, HandoffKind, Positions};

use super::super::sim_worker::{Progress, SimLeg, ended, handed_off};
use super::{Setup, World, engine};
use crate::leg::{LegEndReason, LegKind};
use crate::machine::{Effect, Input};
use crate::opaque::Opaque;
use crate::worker_ref::LegId;

impl World {
    pub(super) fn advance(&mut self, id: LegId) {
        let Setup { lengths, run, .. } = self.setup;
        let mut leg = self.take_leg(id).expect("only offered for a leg");
        if leg.kind == LegKind::Decode && leg.progress == Progress::Begun {
            self.pull(&leg);
        }
        if leg.kind == LegKind::Prefill && leg.decode_first {
            self.prefill_silently(id, leg);
            return;
        }
        // A prefill leg samples one token of each choice.
        let run = if leg.kind == LegKind::Prefill { 1 } else { run };
        for mut output in leg.step(lengths, run) {
            if self.setup.capabilities.positions == Positions::Counted {
                output.position = 0;
            }
            if self.setup.frames {
                output.frame = Some(Opaque::new(output.tokens.clone()));
            }
            self.report(id.worker, Input::Output(id, output));
        }
        leg.progress = match leg.kind {
            LegKind::Prefill => Progress::Prefilled,
            _ => Progress::Decoding,
        };
        if leg.choices.is_empty() {
            if leg.kind == LegKind::Prefill {
                self.ended_by_prefill.insert(leg.attempt);
            }
            self.report(id.worker, Input::Ended(id, ended(LegEndReason::Finished)));
        } else {
            self.worker_of(id.worker).legs.push(leg);
        }
    }

    /// A prefill leg without output: its KV is there, or it ends with a ticket for it.
    fn prefill_silently(&mut self, id: LegId, mut leg: SimLeg) {
        if self.setup.capabilities.handoff == HandoffKind::Ticket {
            let engine = engine(id.worker);
            let ended = handed_off(&engine);
            self.tickets.extend(ended.ticket.clone());
            self.orphans.insert((id.attempt, engine));
            self.report(id.worker, Input::Ended(id, ended));
        } else {
            leg.progress = Progress::Prefilled;
            self.worker_of(id.worker).legs.push(leg);
        }
    }

    pub(super) fn decode_first(&self) -> bool {
        self.setup.capabilities.first_token == FirstToken::Decode
    }

    /// The decode worker has the KV: prefill's leg is over.
    fn pull(&mut self, decode: &SimLeg) {
        self.orphans.remove(&(decode.attempt, decode.peer.clone()));
        let Some(worker) = self.keys().find(|key| engine(*key) == decode.peer) else {
            return;
        };
        let id = LegId {
            worker,
            attempt: decode.attempt,
        };
        if self.take_leg(id).is_some() {
            self.report(worker, Input::Ended(id, ended(LegEndReason::HandedOff)));
        }
    }

    pub(super) fn can_advance(&self, leg: &SimLeg) -> bool {
        match (leg.kind, leg.progress) {
            (LegKind::Prefill, progress) => progress == Progress::Begun,
            (LegKind::Decode, Progress::Begun) => self.kv_is_there(leg),
            _ => true,
        }
    }

    fn kv_is_there(&self, decode: &SimLeg) -> bool {
        let orphan = (decode.attempt, decode.peer.clone());
        self.orphans.contains(&orphan)
            || self
                .prefill_of(decode)
                .is_some_and(|leg| leg.progress == Progress::Prefilled)
    }

    /// Neither there nor on its way.
    fn kv_is_gone(&self, decode: &SimLeg) -> bool {
        let announced = self.to_worker.values().any(|(key, queue)| {
            engine(*key) == decode.peer
                && queue.iter().any(|effect| match effect {
                    Effect::Dispatch { leg, .. } | Effect::Retarget { leg, .. } => {
                        leg.attempt == decode.attempt
                    }
                    _ => false,
                })
        });
        decode.progress == Progress::Begun
            && !announced
            && !self.kv_is_there(decode)
            && self.prefill_of(decode).is_none()
    }

    /// How a leg ends that waits for KV which will not come.
    pub(super) fn ends_by_itself(&self, leg: &SimLeg) -> Option<LegEndReason> {
        if leg.kind != LegKind::Decode || !self.kv_is_gone(leg) {
            return None;
        }
        Some(if self.ended_by_prefill.contains(&leg.attempt) {
            LegEndReason::Finished
        } else {
            LegEndReason::KvLost
        })
    }

    fn prefill_of(&self, decode: &SimLeg) -> Option<&SimLeg> {
        self.legs()
            .find(|(key, leg)| {
                engine(*key) == decode.peer
                    && leg.attempt == decode.attempt
                    && leg.kind == LegKind::Prefill
            })
            .map(|(_, leg)| leg)
    }
}
