//! Workers come and go: their addresses, connections and silences.

use std::time::Duration;

use tasuki_core::{Health, WorkerId};

use super::{FleetState, JoinError, NotReady, Silence, WorkerInfo, WorkerState, running_leg};
use crate::worker_ref::WorkerKey;

/// Readiness waits so long for every worker's first answer: with some of them only,
/// the first requests would be placed on workers of the wrong role.
const FIRST_ANSWERS: Duration = Duration::from_secs(2);

impl FleetState {
    /// A worker's address appeared. Ids count up and are never used again.
    pub fn add(&mut self) -> WorkerId {
        let worker = WorkerId(self.next_worker);
        self.next_worker += 1;
        self.workers.insert(worker, WorkerState::new(worker));
        worker
    }

    /// Forgets a worker, and its connection and legs with it.
    pub fn remove(&mut self, worker: WorkerId) {
        self.chosen.take();
        self.workers.remove(&worker);
        self.models.forget(worker);
        self.policy.remove(worker);
        self.prefixes.forget(worker);
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
        self.models.learn_names(worker, model, &info);
        let chunks = (info.chunks, info.capabilities.reports_cache);
        self.set_info(worker, info);
        let connection = self.next_connection;
        self.next_connection += 1;
        if let Some(state) = self.workers.get_mut(&worker) {
            state.model = Some(model);
            state.connect(connection, now);
            let pool_tokens = state.view.capacity.tokens();
            self.prefixes.join(worker, model, chunks, pool_tokens);
        }
        self.reindex(worker);
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
        if same && let Some(model) = state.model {
            self.models.learn_names(key.worker, model, &info);
            self.set_info(key.worker, info);
            self.reindex(key.worker);
        }
        same
    }

    /// The connection is over, and its legs with it.
    pub fn leave(&mut self, key: WorkerKey) {
        if let Some(state) = self.connected(key) {
            state.disconnect();
            self.prefixes.forget(key.worker);
            self.reindex(key.worker);
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
            self.reindex(key.worker);
            Silence::Suspect
        } else {
            Silence::Fine
        }
    }

    /// Whether every worker has answered, could not be reached or was given its time;
    /// `known_for`: since the first one's address appeared.
    ///
    /// It does not try a placement: see [`FleetState::can_place`].
    ///
    /// # Errors
    ///
    /// [`NotReady::Starting`]: not yet.
    pub fn has_started(&self, known_for: Duration) -> Result<(), NotReady> {
        let untried = self.workers.values().filter(|state| !state.was_tried);
        let waiting = untried.count();
        if waiting > 0 && known_for < FIRST_ANSWERS {
            let workers = self.workers.len();
            return Err(NotReady::Starting { waiting, workers });
        }
        Ok(())
    }

    fn set_info(&mut self, worker: WorkerId, info: WorkerInfo) {
        let hardware = self.costs.hardware.class(&info.hardware);
        let used = self.workers.values().map(|state| state.view.machine);
        let host = running_leg::host(&info.peer.kv_endpoint);
        let machine = self.machines.number(host, used);
        if let Some(state) = self.workers.get_mut(&worker) {
            state.set_info(info);
            state.view.hardware = hardware;
            state.view.machine = machine;
        }
    }
}
