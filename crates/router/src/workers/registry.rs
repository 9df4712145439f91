//! The fleet's state and the connections to its workers, shared by all requests. `legs.rs` has
//! what runs on the workers.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tasuki_core::{Hardware, ModelId, RequestView, Role, WorkerId};
use tasuki_flow::admission::{Admission, AdmissionConfig, EntrantId, Verdict};
use tasuki_flow::fleet::{
    DrainReason, FleetState, JoinError, NotReady, Silence, WorkerInfo, WorkerState,
};
use tasuki_flow::{BudgetConfig, RetryBudget, WorkerKey};
use tasuki_policy::PolicyConfig;
use tasuki_wire::v1;
use tokio::sync::{oneshot, watch};

use super::catalog::Catalog;
use super::connection::{Connection, Joined, RoutedLegs};
use super::foreign::RecomputedCounts;
use super::link::WorkerLink;
use super::roles::Follower;

/// Owns the roles that the admin API sets.
const OPERATOR: &str = "router admin";

/// Every worker of the deployment, connected or not.
pub struct Registry {
    began: Instant,
    pub(super) state: Mutex<State>,
    budget: Mutex<RetryBudget>,
    changes: watch::Sender<u64>,
    pub recomputed: RecomputedCounts,
}

/// What is known of one worker.
pub struct Known<'a> {
    pub state: &'a WorkerState,
    /// host:port.
    pub address: &'a str,
    /// Chunks of prompts that it is taken to hold.
    pub chunks: usize,
    /// Its last load, for metrics.
    pub exported: Option<&'a v1::Load>,
}

pub(super) struct State {
    pub fleet: FleetState,
    pub admission: Admission,
    /// The requests in it.
    pub waiters: HashMap<EntrantId, oneshot::Sender<Verdict>>,
    pub roles: Vec<Follower>,
    pub members: BTreeMap<WorkerId, Member>,
    /// When the first worker's address appeared.
    pub first_added: Option<Instant>,
    /// `None`: a worker has come, changed or gone since it was made.
    pub catalog: Option<Arc<Catalog>>,
}

/// A worker's address, and the connection to it while there is one.
pub(super) struct Member {
    pub address: Arc<str>,
    pub connection: Option<Connection>,
}

impl Registry {
    /// Without workers. `models`: of each one, the names that its workers may give it.
    pub fn new(
        models: Vec<Vec<String>>,
        policy: PolicyConfig,
        admission: AdmissionConfig,
        now: Instant,
    ) -> Self {
        Self {
            began: now,
            state: Mutex::new(State {
                fleet: FleetState::new(models, policy),
                admission: Admission::new(admission),
                waiters: HashMap::new(),
                roles: Vec::new(),
                members: BTreeMap::new(),
                first_added: None,
                catalog: None,
            }),
            budget: Mutex::new(RetryBudget::new(BudgetConfig::default())),
            changes: watch::Sender::new(0),
            recomputed: RecomputedCounts::default(),
        }
    }

    /// Retries that the budget of all requests has left, and how often it had none.
    pub fn retry_budget(&self) -> (f64, u64) {
        let now = self.since_start(Instant::now());
        let mut budget = self.lock_budget();
        (budget.left(now), budget.refused())
    }

    /// A worker's address appeared.
    pub fn add(&self, address: &str) -> WorkerId {
        let mut state = self.lock();
        state.first_added.get_or_insert_with(Instant::now);
        let worker = state.fleet.add();
        let member = Member {
            address: address.into(),
            connection: None,
        };
        state.members.insert(worker, member);
        worker
    }

    /// Forgets a worker. Legs that are still there are lost to their requests.
    pub fn remove(&self, worker: WorkerId) {
        let mut state = self.lock();
        state.fleet.remove(worker);
        state.catalog = None;
        let member = state.members.remove(&worker);
        drop(state);
        if let Some(connection) = member.and_then(|member| member.connection) {
            connection.lose_legs(worker);
        }
    }

    /// From now on the worker gets no new work; its legs go on. False: there is no such worker.
    pub fn drain(&self, worker: WorkerId, reason: DrainReason) -> bool {
        self.lock().fleet.drain(worker, reason)
    }

    /// Takes one reason to drain back.
    pub fn undrain(&self, worker: WorkerId, reason: DrainReason) {
        let ready = self.lock().fleet.undrain(worker, reason);
        if ready {
            self.announce_change();
        }
    }

    /// Changes whenever a worker gets new work from now on: it joined, recovered, or does not
    /// drain any more.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Admits a worker that has connected.
    ///
    /// # Errors
    ///
    /// [`JoinError`]: it is removed, is connected already, or serves another model.
    pub fn join(
        &self,
        worker: WorkerId,
        info: WorkerInfo,
        link: Arc<dyn WorkerLink>,
        now: Instant,
    ) -> Result<Joined, JoinError> {
        let mut state = self.lock();
        let key = state.fleet.join(worker, info, self.since_start(now))?;
        state.catalog = None;
        let legs = Arc::<RoutedLegs>::default();
        if let Some(member) = state.members.get_mut(&worker) {
            member.connection = Some(Connection {
                serial: key.connection,
                link,
                legs: Arc::clone(&legs),
                exported: None,
            });
        }
        drop(state);
        self.announce_change();
        Ok(Joined { key, legs })
    }

    /// An attempt to reach the worker has failed.
    pub fn on_unreachable(&self, worker: WorkerId) {
        self.lock().fleet.on_unreachable(worker);
    }

    /// Takes over changed information. False: it is another engine now.
    pub fn on_info(&self, key: WorkerKey, info: WorkerInfo) -> bool {
        let mut state = self.lock();
        let role = info.role;
        let known = state.fleet.worker(key.worker);
        // The owner of roles sets them again now and then as they are.
        let new = known.is_none_or(|known| known.view.role != role);
        let same = state.fleet.on_info(key, info);
        state.catalog = None;
        drop(state);
        if new || !same {
            self.announce_change();
        }
        same
    }

    /// The connection is over, and its legs with it.
    pub fn leave(&self, key: WorkerKey) {
        let mut state = self.lock();
        if state.connected(key).is_none() {
            return;
        }
        state.fleet.leave(key);
        let member = state.members.get_mut(&key.worker);
        let connection = member.and_then(|member| member.connection.take());
        drop(state);
        if let Some(connection) = connection {
            connection.lose_legs(key.worker);
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

    /// Gives a worker another role; it reports it when it has it. False: it is not connected.
    pub fn set_role(&self, worker: WorkerId, role: Role) -> bool {
        let state = self.lock();
        let known = state.fleet.worker(worker);
        let info = known.and_then(|worker| worker.info.as_ref());
        let epoch = info.map_or(0, |info| info.role_epoch + 1);
        state.set_role(worker, role, OPERATOR, epoch)
    }

    /// Whether a request to a model could be placed now, without placing one, and every worker
    /// has answered, could not be reached or was given its time.
    pub fn readiness(&self, model: ModelId, now: Instant) -> Result<(), NotReady> {
        let state = self.lock();
        let request = RequestView {
            model,
            ..RequestView::new(1, 2)
        };
        state.fleet.can_place(&request)?;
        let since = |first| now.saturating_duration_since(first);
        let known_for = state.first_added.map_or(Duration::ZERO, since);
        state.fleet.has_started(known_for)
    }

    /// When a worker of a model reported tokens of a request that it decodes, last.
    pub fn last_decoded(&self, model: ModelId) -> Option<Instant> {
        let last = self.lock().fleet.last_decoded(model);
        last.map(|since_start| self.began + since_start)
    }

    /// What steps take, as far as it was learnt.
    pub fn hardware(&self) -> Hardware {
        self.lock().fleet.hardware().clone()
    }

    /// Reads what is known of each worker, in the order in which they were added.
    pub fn read<T>(&self, read: impl FnMut(Known<'_>) -> T) -> Vec<T> {
        let State { fleet, members, .. } = &*self.lock();
        let known = fleet.workers().filter_map(|state| {
            let member = members.get(&state.view.id)?;
            Some(Known {
                state,
                address: &member.address,
                chunks: fleet.chunks_held(state.view.id),
                exported: member.connection.as_ref().and_then(|c| c.exported.as_ref()),
            })
        });
        known.map(read).collect()
    }

    pub fn since_start(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.began)
    }

    pub(super) fn announce_change(&self) {
        self.changes.send_modify(|version| *version += 1);
    }

    pub(super) fn lock_budget(&self) -> MutexGuard<'_, RetryBudget> {
        self.budget.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A panic elsewhere leaves the state usable: every change is complete in itself.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Gives a worker another role, set by `owner`. False: it is not connected.
    pub fn set_role(&self, worker: WorkerId, role: Role, owner: &str, epoch: u64) -> bool {
        let member = self.members.get(&worker);
        let connection = member.and_then(|member| member.connection.as_ref());
        connection
            .map(|connection| connection.link.set_role(role, owner, epoch))
            .is_some()
    }

    /// The fleet and the connection of that key, if it is still there.
    pub(super) fn connected(
        &mut self,
        key: WorkerKey,
    ) -> Option<(&mut FleetState, &mut Connection)> {
        let connection = self.members.get_mut(&key.worker)?.connection.as_mut()?;
        (connection.serial == key.connection).then_some((&mut self.fleet, connection))
    }
}
