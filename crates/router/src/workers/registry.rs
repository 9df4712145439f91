//! The fleet's state and the connections to its workers, shared by all requests.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tasuki_core::{RequestView, WorkerId};
use tasuki_flow::fleet::{FleetState, JoinError, LegSlot, LoadReport, NotReady, Silence};
use tasuki_flow::fleet::{WorkerInfo, WorkerState};
use tasuki_flow::{Fleet, Input, LegEnd, LegId, LegSpec, Output, Peer, WorkerKey, WorkerRef};
use tasuki_policy::{NoPlacement, PolicyConfig, place};
use tasuki_wire::v1;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;

use super::link::WorkerLink;

/// What a worker reports at once.
pub struct Report<Outputs, Ends> {
    pub load: Option<LoadReport>,
    /// For metrics alone.
    pub exported: Option<v1::Load>,
    /// Each with the name of its leg on the connection.
    pub outputs: Outputs,
    pub ended: Ends,
}

/// Every configured worker, connected or not.
pub struct Registry {
    began: Instant,
    policy: PolicyConfig,
    state: Mutex<State>,
    changes: watch::Sender<u64>,
}

struct State {
    fleet: FleetState,
    /// By worker.
    connections: Vec<Option<Connection>>,
}

struct Connection {
    serial: u64,
    link: Arc<dyn WorkerLink>,
    /// By their name on the connection.
    legs: HashMap<String, RoutedLeg>,
    exported: Option<v1::Load>,
}

/// A leg, and the request that its messages go to.
struct RoutedLeg {
    attempt: u32,
    slot: LegSlot,
    inbox: UnboundedSender<Input>,
}

impl Registry {
    pub fn new(workers: usize, policy: PolicyConfig, now: Instant) -> Self {
        Self {
            began: now,
            policy,
            state: Mutex::new(State {
                fleet: FleetState::new(workers, policy),
                connections: (0..workers).map(|_| None).collect(),
            }),
            changes: watch::Sender::new(0),
        }
    }

    /// Changes whenever a worker joins or recovers.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Admits a worker that has connected.
    ///
    /// # Errors
    ///
    /// [`JoinError`]: it is connected already, or serves another model.
    pub fn join(
        &self,
        worker: WorkerId,
        info: WorkerInfo,
        link: Arc<dyn WorkerLink>,
        now: Instant,
    ) -> Result<WorkerKey, JoinError> {
        let mut state = self.lock();
        let key = state.fleet.join(worker, info, self.since_start(now))?;
        state.connections[worker.0 as usize] = Some(Connection {
            serial: key.connection,
            link,
            legs: HashMap::new(),
            exported: None,
        });
        drop(state);
        self.announce_change();
        Ok(key)
    }

    /// An attempt to reach the worker has failed.
    pub fn on_unreachable(&self, worker: WorkerId) {
        self.lock().fleet.on_unreachable(worker);
    }

    /// Takes over changed information. False: it is another engine now.
    pub fn on_info(&self, key: WorkerKey, info: WorkerInfo) -> bool {
        let same = self.lock().fleet.on_info(key, info);
        self.announce_change();
        same
    }

    /// Distributes a report among the requests that it is about.
    pub fn on_report<Outputs, Ends>(
        &self,
        key: WorkerKey,
        report: Report<Outputs, Ends>,
        now: Instant,
    ) where
        Outputs: Iterator<Item = (String, Output)>,
        Ends: Iterator<Item = (String, LegEnd)>,
    {
        let mut state = self.lock();
        let Some((fleet, connection)) = state.connected(key) else {
            return;
        };
        let recovered = fleet.on_report(key, report.load.as_ref(), self.since_start(now));
        if report.exported.is_some() {
            connection.exported = report.exported;
        }
        // A task that is gone has sent its aborts.
        for (name, output) in report.outputs {
            if let Some(leg) = connection.legs.get(&name) {
                fleet.on_output(key, leg.slot);
                let _ = leg.inbox.send(Input::Output(leg.id(key), output));
            }
        }
        for (name, ended) in report.ended {
            if let Some(leg) = connection.legs.remove(&name) {
                fleet.on_ended(key, leg.slot);
                let _ = leg.inbox.send(Input::Ended(leg.id(key), ended));
            }
        }
        fleet.recount(key);
        drop(state);
        if recovered {
            self.announce_change();
        }
    }

    /// The connection is over, and its legs with it.
    pub fn leave(&self, key: WorkerKey) {
        let mut state = self.lock();
        if state.connected(key).is_none() {
            return;
        }
        state.fleet.leave(key);
        let connection = state.connections[key.worker.0 as usize].take();
        drop(state);
        for leg in connection.into_iter().flat_map(|c| c.legs.into_values()) {
            let _ = leg.inbox.send(Input::Lost(key));
        }
    }

    /// What the time since a worker's last report means; a suspect gets no new work.
    pub fn check_silence(
        &self,
        key: WorkerKey,
        now: Instant,
        suspect_after: Duration,
        lost_after: Duration,
    ) -> Silence {
        let now = self.since_start(now);
        let fleet = &mut self.lock().fleet;
        fleet.check_silence(key, now, suspect_after, lost_after)
    }

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
        connection.legs.insert(name.clone(), routed);
        let link = Arc::clone(&connection.link);
        // The link copies the prompt: nobody else waits for that.
        drop(state);
        link.dispatch(&name, spec);
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

    /// Whether a request could be placed now, without placing one, and every worker
    /// has answered, could not be reached or was given its time.
    ///
    /// The placement is tried on a copy of the workers' state: requests and reports do not
    /// wait for it.
    pub fn readiness(&self, now: Instant) -> Result<(), NotReady> {
        let (views, started) = {
            let fleet = &self.lock().fleet;
            (fleet.views(), fleet.has_started(self.since_start(now)))
        };
        place(&views, &RequestView::new(1, 2), &self.policy, 0)?;
        started
    }

    /// Aborts the legs whose request has no task any more. Returns how many there were.
    pub fn abort_orphans(&self) -> usize {
        let mut aborted = 0;
        let State { fleet, connections } = &mut *self.lock();
        for (worker, connection) in (0u32..).map(WorkerId).zip(connections) {
            let Some(connection) = connection else {
                continue;
            };
            let key = WorkerKey {
                worker,
                connection: connection.serial,
            };
            connection.legs.retain(|name, leg| {
                let orphan = leg.inbox.is_closed();
                if orphan {
                    connection.link.abort(name, Vec::new());
                    fleet.on_ended(key, leg.slot);
                    aborted += 1;
                }
                !orphan
            });
            fleet.recount(key);
        }
        aborted
    }

    /// Reads what is known of each worker, and its last load for metrics.
    pub fn read<T>(&self, read: impl FnOnce(&[WorkerState], &[Option<v1::Load>]) -> T) -> T {
        let state = self.lock();
        let exported = state.connections.iter().map(|c| c.as_ref()?.exported);
        read(state.fleet.workers(), &exported.collect::<Vec<_>>())
    }

    fn since_start(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.began)
    }

    fn announce_change(&self) {
        self.changes.send_modify(|version| *version += 1);
    }

    /// A panic elsewhere leaves the state usable: every change is complete in itself.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The fleet and the connection of that key, if it is still there.
    fn connected(&mut self, key: WorkerKey) -> Option<(&mut FleetState, &mut Connection)> {
        let connection = self.connections.get_mut(key.worker.0 as usize)?.as_mut()?;
        (connection.serial == key.connection).then_some((&mut self.fleet, connection))
    }
}

impl RoutedLeg {
    fn id(&self, worker: WorkerKey) -> LegId {
        LegId {
            worker,
            attempt: self.attempt,
        }
    }
}

impl Fleet for &Registry {
    fn place(&mut self, request: &RequestView) -> Result<(WorkerRef, WorkerRef), NoPlacement> {
        self.lock().fleet.place(request)
    }

    fn place_decode(
        &mut self,
        request: &RequestView,
        prefill: WorkerKey,
        tried: &[WorkerId],
    ) -> Option<WorkerRef> {
        self.lock().fleet.place_decode(request, prefill, tried)
    }
}
