//! The legs that run on the workers: dispatched, reported, aborted.

use std::time::Instant;

use tasuki_core::WorkerId;
use tasuki_flow::fleet::{CacheEvents, LegSlot, LoadReport, WorkerState};
use tasuki_flow::{Input, LegEnd, LegId, LegSpec, Output, Peer, WorkerKey};
use tasuki_wire::v1;
use tokio::sync::mpsc::UnboundedSender;

use super::connection::{Joined, Routed, RoutedLeg};
use super::link::NewLeg;
use super::local_leg::LocalLeg;
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

/// What became of a leg that was to be started.
pub enum Dispatched {
    /// The connection is gone.
    Gone,
    /// The worker has it.
    Sent,
    /// The request's task runs it.
    Local(LocalLeg),
}

impl Registry {
    /// Starts a leg under a name of its own on the worker. `inbox` gets its messages, but for those
    /// of a leg that the request's task runs.
    pub fn dispatch(
        &self,
        leg: LegId,
        name: String,
        spec: LegSpec,
        inbox: &UnboundedSender<Input>,
    ) -> Dispatched {
        let mut state = self.lock();
        let Some((fleet, connection)) = state.connected(leg.worker) else {
            return Dispatched::Gone;
        };
        let Some(slot) = fleet.on_dispatched(leg.worker, &spec) else {
            return Dispatched::Gone;
        };
        let routed = RoutedLeg {
            attempt: leg.attempt,
            slot,
            inbox: inbox.clone(),
        };
        let new = NewLeg {
            id: leg,
            name: &name,
            slot,
        };
        // Its first output finds it there, however soon that comes.
        let mut legs = connection.legs.lock();
        let local = connection.link.dispatch(new, spec);
        legs.insert(name, routed);
        local.map_or(Dispatched::Sent, Dispatched::Local)
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
        from: &Joined,
        report: Report<impl Iterator<Item = (Name, Output)>, impl Iterator<Item = (Name, LegEnd)>>,
        now: Instant,
    ) {
        let key = from.key;
        let routed = from.legs.route(key, report.outputs, report.ended);
        let mut state = self.lock();
        let mut recovered = false;
        if let Some((fleet, connection)) = state.connected(key) {
            recovered = fleet.on_report(key, report.load.as_ref(), self.since_start(now));
            if report.exported.is_some() {
                connection.exported = report.exported;
            }
            if let Some(events) = &report.cache
                && !fleet.on_cache_events(key, events)
            {
                connection.link.resync_cache();
            }
            for Routed { slot, input, .. } in &routed {
                match input {
                    Input::Output(_, output) => {
                        let cached = output.cached_prompt_tokens;
                        fleet.on_output(key, *slot, output.tokens.len(), cached);
                    }
                    Input::Ended(_, end) => {
                        fleet.on_outcome(key, *slot, end);
                        fleet.on_ended(key, *slot, end.timings.as_deref());
                    }
                    _ => {}
                }
            }
            fleet.recount(key);
            state.settle(self.since_start(now));
        }
        drop(state);
        // Each wakes a task, which takes longer than all that is done under the lock.
        for Routed { inbox, input, .. } in routed {
            // A task that is gone has sent its aborts.
            let _ = inbox.send(input);
        }
        if recovered {
            self.announce_change();
        }
    }

    /// A leg that its request's task runs has so many tokens more; `cached`: of its prompt. False:
    /// it does not count any more.
    pub fn on_leg_output(
        &self,
        key: WorkerKey,
        slot: LegSlot,
        tokens: usize,
        cached: u32,
        now: Instant,
    ) -> bool {
        let mut state = self.lock();
        let Some((fleet, _)) = state.connected(key) else {
            return false;
        };
        let now = self.since_start(now);
        let recovered = fleet.on_report(key, None, now);
        fleet.on_output(key, slot, tokens, cached);
        if fleet.recount(key) {
            state.settle(now);
        }
        drop(state);
        if recovered {
            self.announce_change();
        }
        true
    }

    /// A leg that its request's task runs has ended, with so many tokens more. False: it does not
    /// count any more.
    pub fn on_leg_end(
        &self,
        key: WorkerKey,
        name: &str,
        tokens: usize,
        end: &LegEnd,
        now: Instant,
    ) -> bool {
        let mut state = self.lock();
        let Some((fleet, connection)) = state.connected(key) else {
            return false;
        };
        let Some(leg) = connection.legs.lock().remove(name) else {
            return false;
        };
        let now = self.since_start(now);
        let recovered = fleet.on_report(key, None, now);
        if tokens > 0 {
            fleet.on_output(key, leg.slot, tokens, 0);
        }
        fleet.on_outcome(key, leg.slot, end);
        fleet.on_ended(key, leg.slot, end.timings.as_deref());
        fleet.recount(key);
        state.settle(now);
        drop(state);
        if recovered {
            self.announce_change();
        }
        true
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
            connection.legs.lock().retain(|name, leg| {
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
