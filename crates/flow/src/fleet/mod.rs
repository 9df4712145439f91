//! The workers of one shell: who they are, what they have to do, who gets a request.
//!
//! Owned by the shell, which passes reports and dispatches on as they happen.

mod models;
mod report;
#[cfg(test)]
mod tests;
mod worker;

use std::collections::BTreeMap;
use std::time::Duration;

use tasuki_core::{CostModel, Health, RequestView, WorkerId, WorkerView};
use tasuki_policy::{Choosing, NoPlacement, Placement, PolicyConfig};

use self::models::Models;
pub use self::report::{LoadReport, WorkerInfo};
pub use self::worker::{DrainReason, LegSlot, WorkerState};
use crate::leg::{LegSpec, LegTimings};
use crate::machine::Fleet;
use crate::worker_ref::{WorkerKey, WorkerRef};

/// Why a worker is not admitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    #[error("worker {0} was removed")]
    Removed(WorkerId),
    #[error("the worker is already connected as worker {0}: it is listed twice")]
    Twice(WorkerId),
    #[error(
        "the worker serves {theirs:?}, the workers before it {ours:?} with other weights: give \
         the router both models by name, or restart it"
    )]
    OtherModel { theirs: String, ours: String },
    #[error(
        "the worker serves {theirs:?}, this router serves {served:?}: give the router that model, \
         or the worker one of these names"
    )]
    NotServed { theirs: String, served: Vec<String> },
}

/// Why requests should not come yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotReady {
    #[error("{waiting} of {workers} workers have not answered yet")]
    Starting { waiting: usize, workers: usize },
    #[error(transparent)]
    NoPlacement(#[from] NoPlacement),
}

/// What a worker's silence means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Silence {
    Fine,
    /// It gets no new work.
    Suspect,
    /// Its requests go elsewhere.
    Lost,
}

/// Readiness waits so long for every worker's first answer: with some of them only,
/// the first requests would be placed on workers of the wrong role.
const FIRST_ANSWERS: Duration = Duration::from_secs(2);

/// What a handoff takes at least: less is below what its account can tell.
const SHORTEST_HANDOFF: Duration = Duration::from_micros(100);

/// Every worker of the deployment, connected or not.
///
/// A worker is *added* when its address appears, *joins* and *leaves* with each connection,
/// and is *removed* when its address is gone and it has drained.
#[derive(Debug)]
pub struct FleetState {
    models: Models,
    workers: BTreeMap<WorkerId, WorkerState>,
    policy: PolicyConfig,
    next_worker: u32,
    costs: CostModel,
    /// By the index that views have, less one.
    machines: Vec<String>,
    next_connection: u64,
    /// Rotates among equally good workers.
    tie: u64,
}

impl FleetState {
    /// Without workers. `models`: of each model that is served, the names that its workers may
    /// give it; a single one takes workers of any name.
    pub fn new(models: Vec<Vec<String>>, policy: PolicyConfig) -> Self {
        Self {
            models: Models::new(models),
            workers: BTreeMap::new(),
            policy,
            next_worker: 0,
            costs: CostModel::new(policy.cost),
            machines: Vec::new(),
            next_connection: 0,
            tie: 0,
        }
    }

    /// A worker's address appeared. Ids count up and are never used again.
    pub fn add(&mut self) -> WorkerId {
        let worker = WorkerId(self.next_worker);
        self.next_worker += 1;
        self.workers.insert(worker, WorkerState::new(worker));
        worker
    }

    /// Forgets a worker, and its connection and legs with it.
    pub fn remove(&mut self, worker: WorkerId) {
        self.workers.remove(&worker);
    }

    /// From now on the worker gets no new work; its legs go on. False: there is no such worker.
    pub fn drain(&mut self, worker: WorkerId, reason: DrainReason) -> bool {
        let state = self.workers.get_mut(&worker);
        state.map(|state| state.drain(reason)).is_some()
    }

    /// Takes one reason to drain back. True: the worker is ready for new work by that.
    pub fn undrain(&mut self, worker: WorkerId, reason: DrainReason) -> bool {
        let state = self.workers.get_mut(&worker);
        state.is_some_and(|state| state.undrain(reason))
    }

    /// Admits a worker that has connected.
    ///
    /// # Errors
    ///
    /// [`JoinError`]: it is removed, is connected already, or its model is not served.
    pub fn join(
        &mut self,
        worker: WorkerId,
        info: WorkerInfo,
        now: Duration,
    ) -> Result<WorkerKey, JoinError> {
        let twin = self.workers.values().find(|known| {
            let engine = known.info.as_ref().map(|info| &info.peer.engine_id);
            known.connection.is_some() && engine == Some(&info.peer.engine_id)
        });
        if let Some(twin) = twin {
            return Err(JoinError::Twice(twin.view.id));
        }
        let model = self.models.of(&info)?;
        if !self.workers.contains_key(&worker) {
            return Err(JoinError::Removed(worker));
        }
        self.set_info(worker, info);
        let connection = self.next_connection;
        self.next_connection += 1;
        if let Some(state) = self.workers.get_mut(&worker) {
            state.model = Some(model);
            state.connect(connection, now);
        }
        Ok(WorkerKey { worker, connection })
    }

    /// An attempt to reach the worker has failed.
    pub fn on_unreachable(&mut self, worker: WorkerId) {
        if let Some(state) = self.workers.get_mut(&worker) {
            state.was_tried = true;
        }
    }

    /// Takes over changed information. False: it is another engine now, or gone.
    pub fn on_info(&mut self, key: WorkerKey, info: WorkerInfo) -> bool {
        let Some(state) = self.connected(key) else {
            return false;
        };
        let engine = state.info.as_ref().map(|known| &known.peer.engine_id);
        let same = engine == Some(&info.peer.engine_id);
        if same {
            self.set_info(key.worker, info);
        }
        same
    }

    /// A worker reported, with or without its load. True: it has recovered by that.
    ///
    /// The outputs and ends of the same report come after it, each with
    /// [`FleetState::on_output`] or [`FleetState::on_ended`], then [`FleetState::recount`].
    pub fn on_report(&mut self, key: WorkerKey, load: Option<&LoadReport>, now: Duration) -> bool {
        let Some(state) = self.connected(key) else {
            return false;
        };
        state.last_report = now;
        let recovered = state.recover();
        if let Some(load) = load {
            let (class, samples) = (state.view.hardware, state.take_load(load));
            for sample in samples {
                self.costs.hardware.learn(class, &sample);
            }
        }
        recovered
    }

    /// A leg is dispatched. `None`: the connection is gone.
    pub fn on_dispatched(&mut self, key: WorkerKey, spec: &LegSpec) -> Option<LegSlot> {
        let cost = self.policy.cost;
        let state = self.connected(key)?;
        let slot = state.add_leg(spec, &cost);
        state.recount();
        Some(slot)
    }

    /// A leg has output.
    pub fn on_output(&mut self, key: WorkerKey, slot: LegSlot) {
        if let Some(state) = self.connected(key) {
            state.on_output(slot);
        }
    }

    /// A leg has ended, with or without an account of its time.
    pub fn on_ended(&mut self, key: WorkerKey, slot: LegSlot, timings: Option<&LegTimings>) {
        let Some(state) = self.connected(key) else {
            return;
        };
        let handoff = state.remove_leg(slot);
        let timings = timings.filter(|timings| timings.transfer_bytes > 0);
        if let (Some((same_machine, tokens)), Some(timings)) = (handoff, timings) {
            let exposed = timings.transfer_exposed.max(SHORTEST_HANDOFF);
            self.costs
                .links
                .learn(same_machine, tokens, exposed.as_secs_f64());
        }
    }

    /// Counts again what a worker's load does not show, after outputs and ends.
    pub fn recount(&mut self, key: WorkerKey) {
        if let Some(state) = self.connected(key) {
            state.recount();
        }
    }

    /// The connection is over, and its legs with it.
    pub fn leave(&mut self, key: WorkerKey) {
        if let Some(state) = self.connected(key) {
            state.disconnect();
        }
    }

    /// What the time since a worker's last report means; a suspect gets no new work.
    pub fn check_silence(
        &mut self,
        key: WorkerKey,
        now: Duration,
        suspect_after: Duration,
        lost_after: Duration,
    ) -> Silence {
        let Some(state) = self.connected(key) else {
            return Silence::Lost;
        };
        let silent = now.saturating_sub(state.last_report);
        if silent >= lost_after {
            Silence::Lost
        } else if silent >= suspect_after {
            state.view.health = Health::Suspect;
            Silence::Suspect
        } else {
            Silence::Fine
        }
    }

    /// Whether every worker has answered, could not be reached or was given its time.
    ///
    /// It does not try a placement: that takes long, and needs only [`FleetState::candidates`].
    ///
    /// # Errors
    ///
    /// [`NotReady::Starting`]: not yet.
    pub fn has_started(&self, now: Duration) -> Result<(), NotReady> {
        let untried = self.workers.values().filter(|state| !state.was_tried);
        let waiting = untried.count();
        if waiting > 0 && now < FIRST_ANSWERS {
            let workers = self.workers.len();
            return Err(NotReady::Starting { waiting, workers });
        }
        Ok(())
    }

    /// Every worker, in the order in which they were added.
    pub fn workers(&self) -> impl Iterator<Item = &WorkerState> {
        self.workers.values()
    }

    /// One worker.
    pub fn worker(&self, worker: WorkerId) -> Option<&WorkerState> {
        self.workers.get(&worker)
    }

    /// Whether a request could be placed, without placing one.
    ///
    /// # Errors
    ///
    /// As [`Fleet::place`].
    pub fn can_place(&self, request: &RequestView) -> Result<(), NoPlacement> {
        self.choose(request).map(drop)
    }

    fn choose(&self, request: &RequestView) -> Result<Placement, NoPlacement> {
        let (views, none) = self.candidates(request);
        let placement = tasuki_policy::place(&views, request, self.choosing());
        placement.map_err(|reason| reason.or(none))
    }

    /// The workers that were ever connected and may run a request, as the policy sees them,
    /// and what it means if none of them is up.
    fn candidates(&self, request: &RequestView) -> (Vec<&WorkerView>, NoPlacement) {
        let of_model = |state: &&WorkerState| state.model == Some(request.model);
        let goes_on = |state: &&WorkerState| {
            let bound_to = request.bound_to;
            bound_to.is_none_or(|identity| state.view.domain.identity == identity)
        };
        let (may, others): (Vec<_>, Vec<_>) =
            self.workers.values().filter(of_model).partition(goes_on);
        let any = |states: &[&WorkerState], health| states.iter().any(|s| s.view.health == health);
        let none = if any(&may, Health::Draining) {
            NoPlacement::AllDraining
        } else if any(&others, Health::Ready) {
            NoPlacement::OtherIdentity
        } else {
            NoPlacement::NoWorker
        };
        (may.into_iter().map(|state| &state.view).collect(), none)
    }

    /// What a worker is, if the key is that of its connection now.
    fn connected(&mut self, key: WorkerKey) -> Option<&mut WorkerState> {
        let state = self.workers.get_mut(&key.worker)?;
        (state.connection == Some(key.connection)).then_some(state)
    }

    fn worker_ref(&self, worker: WorkerId) -> Option<WorkerRef> {
        let state = self.workers.get(&worker)?;
        Some(WorkerRef {
            key: WorkerKey {
                worker,
                connection: state.connection?,
            },
            peer: state.info.as_ref()?.peer.clone(),
            capabilities: state.view.capabilities,
            identity: state.view.domain.identity,
        })
    }

    fn set_info(&mut self, worker: WorkerId, info: WorkerInfo) {
        let hardware = self.costs.hardware.class(&info.hardware);
        let machine = self.machine(worker::host(&info.peer.kv_endpoint));
        if let Some(state) = self.workers.get_mut(&worker) {
            state.set_info(info);
            state.view.hardware = hardware;
            state.view.machine = machine;
        }
    }

    /// The index of a machine, which is added if it is new; 0 without a name.
    fn machine(&mut self, host: &str) -> u32 {
        if host.is_empty() {
            return 0;
        }
        let known = self.machines.iter().position(|machine| machine == host);
        let at = known.unwrap_or_else(|| {
            self.machines.push(host.to_owned());
            self.machines.len() - 1
        });
        u32::try_from(at + 1).expect("fewer machines than 2^32")
    }

    /// How the next request's workers are chosen.
    fn choosing(&self) -> Choosing<'_> {
        Choosing {
            model: &self.costs,
            strict_roles: self.policy.strict_roles,
            tie: self.tie,
        }
    }
}

impl Fleet for FleetState {
    fn place(&mut self, request: &RequestView) -> Result<(WorkerRef, WorkerRef), NoPlacement> {
        self.tie = self.tie.wrapping_add(1);
        let placement = self.choose(request)?;
        let prefill = self.worker_ref(placement.prefill);
        let decode = self.worker_ref(placement.decode);
        prefill.zip(decode).ok_or(NoPlacement::NoWorker)
    }

    fn place_decode(
        &mut self,
        request: &RequestView,
        prefill: WorkerKey,
        tried: &[WorkerId],
    ) -> Option<WorkerRef> {
        self.tie = self.tie.wrapping_add(1);
        let ((views, _), prefill) = (self.candidates(request), prefill.worker);
        let worker = tasuki_policy::place_decode(&views, request, prefill, tried, self.choosing())?;
        self.worker_ref(worker)
    }
}
