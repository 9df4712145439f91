//! What legs show of their workers, and which worker is tried when all have failed.

use tasuki_core::{FailureKind, Health, ModelId, RequestView, WorkerId};
use tasuki_policy::{NoPlacement, Placement};

use super::FleetState;
use super::breaker::Shown;
use super::running_leg::LegSlot;
use crate::leg::{LegEnd, LegEndReason};
use crate::worker_ref::WorkerKey;

impl FleetState {
    /// What a leg's end shows of its worker. Call it before [`FleetState::on_ended`].
    ///
    /// KV that is lost, and a handshake that is refused, are the fault of either side. Both are
    /// counted, unless the prefill worker is away or silent: a side that is well has successes
    /// with others in between.
    pub fn on_outcome(&mut self, key: WorkerKey, slot: LegSlot, end: &LegEnd) {
        let Some(state) = self.connected(key) else {
            return;
        };
        let of_handoff = match end.reason {
            LegEndReason::KvLost => true,
            LegEndReason::Failed => end.failure == FailureKind::Transport && state.hands_over(slot),
            _ => false,
        };
        if of_handoff {
            self.on_kv_lost(key, slot);
            return;
        }
        state.on_shown(slot, shown(end, state.hands_over(slot)));
        let issuer = state.issuer_of(slot);
        self.reindex(key.worker);
        if end.reason == LegEndReason::Finished
            && let Some(issuer) = issuer
        {
            self.on_kv_taken(issuer);
        }
    }

    /// A leg has got KV by a ticket of this engine, hashed.
    fn on_kv_taken(&mut self, issuer: u64) {
        let mut states = self.workers.values_mut();
        if let Some(state) = states.find(|state| state.is_engine(issuer)) {
            let (worker, before) = (state.view.id, state.view.health);
            state.on_kv_asked(true);
            if state.view.health != before {
                self.reindex(worker);
            }
        }
    }

    fn on_kv_lost(&mut self, key: WorkerKey, slot: LegSlot) {
        let Some(peer) = self.connected(key).and_then(|state| state.peer_of(slot)) else {
            return;
        };
        let mut peers = self.workers.values_mut();
        let Some(peer) = peers.find(|state| state.is_engine(peer)) else {
            return;
        };
        peer.on_kv_asked(false);
        let (peer, health) = (peer.view.id, peer.view.health);
        self.reindex(peer);
        if !matches!(health, Health::Ready | Health::Failing) {
            return;
        }
        if let Some(state) = self.connected(key) {
            state.on_shown(slot, Shown::Fails(FailureKind::Transport));
            self.reindex(key.worker);
        }
    }

    /// A placement when the workers that are left cannot take the request: as many of those
    /// that have failed as it takes are tried, the one whose last failure is the longest ago
    /// first.
    pub(super) fn choose_failing(
        &mut self,
        request: &RequestView,
        reason: NoPlacement,
    ) -> Result<Placement, NoPlacement> {
        let failing = self.failing(request.model);
        let mut placement = Err(reason);
        for &worker in &failing {
            self.set_health(worker, Health::Ready);
            placement = self.choose(request);
            if placement.is_ok() {
                break;
            }
        }
        let chosen = placement.as_ref().map(|p| [p.prefill, p.decode]);
        for worker in failing {
            if !chosen.as_ref().is_ok_and(|chosen| chosen.contains(&worker)) {
                self.set_health(worker, Health::Failing);
            }
        }
        placement
    }

    /// Workers of a model without new work because of failures, the one to be tried first first.
    pub(super) fn failing(&self, model: ModelId) -> Vec<WorkerId> {
        let states = self.workers.values();
        let failing = |s: &&_| is_failing(s, model);
        let mut failing: Vec<_> = states.filter(failing).collect();
        failing.sort_by_key(|state| (state.breakers().last_failure(), state.view.id));
        failing.into_iter().map(|state| state.view.id).collect()
    }

    fn set_health(&mut self, worker: WorkerId, health: Health) {
        if let Some(state) = self.workers.get_mut(&worker) {
            state.view.health = health;
        }
        self.reindex(worker);
    }
}

fn is_failing(state: &super::WorkerState, model: ModelId) -> bool {
    state.view.health == Health::Failing && state.model == Some(model)
}

fn shown(end: &LegEnd, hands_over: bool) -> Shown {
    match end.reason {
        // Whether the KV of a ticket gets away is not known yet.
        LegEndReason::HandedOff if end.ticket.is_some() => Shown::Computes,
        LegEndReason::HandedOff => Shown::HandsOver,
        LegEndReason::Finished if hands_over => Shown::HandsOver,
        LegEndReason::Finished => Shown::Computes,
        LegEndReason::Failed | LegEndReason::KvLost => Shown::Fails(end.failure),
        // Of the request, or of the worker's load.
        LegEndReason::Aborted
        | LegEndReason::Refused
        | LegEndReason::Returned
        | LegEndReason::Rejected => Shown::Nothing,
    }
}
