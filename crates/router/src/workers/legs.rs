//! The legs that run on the workers: dispatched, reported, aborted.

use std::time::Instant;

use tasuki_core::WorkerId;
use tasuki_flow::fleet::{CacheEvents, LoadReport, WorkerState};
use tasuki_flow::{Input, LegEnd, LegId, LegSpec, Output, Peer, WorkerKey};
use tasuki_wire::v1;
use tokio::sync::mpsc::UnboundedSender;

use super::connection::RoutedLeg;
use super::registry::{Registry, State};

/// What a worker reports at once.
pub struct Report<Outputs, Ends> {
    pub load: Option<LoadReport>,
    /// For metrics alone.
    pub exported: Option<v1::Load>,
    pub cache: Option<CacheEvents>,
    /// Each with the name of its leg on the connection.
    pub outputs: Outputs,
    pub ended: Ends,
}

impl Registry {
    /// Starts a leg under a name of its own on the worker; its messages go to `inbox`.
    /// False: the connection is gone.
    pub fn dispatch(
        &self,
        leg: LegId,
        name: String,
        spec: LegSpec,
        inbox: &UnboundedSender<Input>,
    ) -> bool {
        let mut state = self.lock();
        let Some((fleet, connection)) = state.connected(leg.worker) else {
            return false;
        };
        let Some(slot) = fleet.on_dispatched(leg.worker, &spec) else {
            return false;
        };
        let routed = RoutedLeg {
            attempt: leg.attempt,
            slot,
            inbox: inbox.clone(),
        };
        connection.link.dispatch(&name, slot.number, spec);
        connection.legs.insert(name, routed);
        true
    }

    /// Aborts choices of a leg, or all if there are none in the list.
    pub fn abort(&self, worker: WorkerKey, name: &str, choices: Vec<u32>) {
        if let Some((_, connection)) = self.lock().connected(worker) {
            connection.link.abort(name, choices);
        }
    }

    /// Lets a prefill leg hand over to another decode worker.
    pub fn retarget(&self, worker: WorkerKey, name: &str, peer: Peer) {
        if let Some((_, connection)) = self.lock().connected(worker) {
            connection.link.retarget(name, peer);
        }
    }

    /// Distributes a report among the requests that it is about.
    pub fn on_report<Name: AsRef<str>>(
        &self,
        key: WorkerKey,
        report: Report<impl Iterator<Item = (Name, Output)>, impl Iterator<Item = (Name, LegEnd)>>,
        now: Instant,
    ) {
        let mut state = self.lock();
        let Some((fleet, connection)) = state.connected(key) else {
            return;
        };
        let recovered = fleet.on_report(key, report.load.as_ref(), self.since_start(now));
        if report.exported.is_some() {
            connection.exported = report.exported;
        }
        if let Some(events) = &report.cache
            && !fleet.on_cache_events(key, events)
        {
            connection.link.resync_cache();
        }
        // A task that is gone has sent its aborts.
        for (name, output) in report.outputs {
            if let Some(leg) = connection.legs.get(name.as_ref()) {
                let cached = output.cached_prompt_tokens;
                fleet.on_tokens(key, leg.slot, output.tokens.len(), cached);
                fleet.on_output(key, leg.slot, cached);
                let _ = leg.inbox.send(Input::Output(leg.id(key), output));
            }
        }
        for (name, ended) in report.ended {
            if let Some(leg) = connection.legs.remove(name.as_ref()) {
                fleet.on_outcome(key, leg.slot, &ended);
                fleet.on_ended(key, leg.slot, ended.timings.as_ref());
                let _ = leg.inbox.send(Input::Ended(leg.id(key), ended));
            }
        }
        fleet.recount(key);
        state.settle(self.since_start(now));
        drop(state);
        if recovered {
            self.announce_change();
        }
    }

    /// Aborts the legs whose request has no task any more. Returns how many there were.
    pub fn abort_orphans(&self) -> usize {
        let mut aborted = 0;
        let State { fleet, members, .. } = &mut *self.lock();
        for (&worker, member) in members {
            let Some(connection) = &mut member.connection else {
                continue;
            };
            let key = connection.key(worker);
            connection.legs.retain(|name, leg| {
                let orphan = leg.inbox.is_closed();
                if orphan {
                    connection.link.abort(name, Vec::new());
                    fleet.on_ended(key, leg.slot, None);
                    aborted += 1;
                }
                !orphan
            });
            fleet.recount(key);
        }
        aborted
    }

    /// Legs that run on a worker; 0 if it is not connected.
    pub fn running_legs(&self, worker: WorkerId) -> usize {
        let state = self.lock();
        state
            .fleet
            .worker(worker)
            .map_or(0, WorkerState::running_legs)
    }
}
