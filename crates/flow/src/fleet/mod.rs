//! The workers of one shell: who they are, what they have to do, who gets a request.
//!
//! Owned by the shell, which passes reports and dispatches on as they happen.

mod answers;
mod breaker;
mod connections;
mod failing;
mod machines;
mod models;
mod placing;
mod prefixes;
mod report;
mod running_leg;
mod running_legs;
#[cfg(test)]
mod tests;
mod worker;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use tasuki_core::{ChunkScheme, CostModel, Hardware, ModelId, Payload, RequestView, WorkerId};
use tasuki_policy::{NoPlacement, Placement, Policy, PolicyConfig};

pub use self::answers::{JoinError, NotReady, Silence};
use self::machines::Machines;
use self::models::Models;
pub use self::models::OpaqueModel;
pub use self::prefixes::CacheEvents;
use self::prefixes::PrefixIndex;
pub use self::report::{LoadReport, WorkerInfo};
pub use self::running_leg::LegSlot;
use self::worker::EndedLeg;
pub use self::worker::{DrainReason, WorkerState};
use crate::leg::{LegSpec, LegTimings};
use crate::roles::Demand;
use crate::worker_ref::{WorkerKey, WorkerRef};

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
    /// Knows the workers that were ever connected.
    policy: Box<dyn Policy>,
    config: PolicyConfig,
    next_worker: u32,
    costs: CostModel,
    prefixes: PrefixIndex,
    demands: BTreeMap<ModelId, Demand>,
    machines: Machines,
    next_connection: u64,
    /// Rotates among equally good workers.
    tie: u64,
    /// The last placement that was chosen, until anything changes: a request that does not wait
    /// is forecast when it comes and when it is let in, and then placed.
    chosen: RefCell<Option<(RequestView, Placement)>>,
}

impl FleetState {
    /// Without workers. `models`: of each model that is served, the names that its workers may
    /// give it; a single one takes workers of any name.
    pub fn new(models: Vec<Vec<String>>, config: PolicyConfig) -> Self {
        Self::by(models, config, config.kind.build())
    }

    /// With a policy that is none of those that are known by name, and knows no worker yet.
    pub fn by(models: Vec<Vec<String>>, config: PolicyConfig, policy: Box<dyn Policy>) -> Self {
        Self {
            models: Models::new(models),
            workers: BTreeMap::new(),
            policy,
            config,
            next_worker: 0,
            costs: CostModel::new(config.cost),
            prefixes: PrefixIndex::default(),
            demands: BTreeMap::new(),
            machines: Machines::default(),
            next_connection: 0,
            tie: config.seed,
            chosen: RefCell::default(),
        }
    }

    /// What steps take, as far as it was learnt.
    pub fn hardware(&self) -> &Hardware {
        &self.costs.hardware
    }

    /// From now on the worker gets no new work; its legs go on. False: there is no such worker.
    pub fn drain(&mut self, worker: WorkerId, reason: DrainReason) -> bool {
        let state = self.workers.get_mut(&worker);
        let known = state.map(|state| state.drain(reason)).is_some();
        self.reindex(worker);
        known
    }

    /// Takes one reason to drain back. True: the worker is ready for new work by that.
    pub fn undrain(&mut self, worker: WorkerId, reason: DrainReason) -> bool {
        let state = self.workers.get_mut(&worker);
        let ready = state.is_some_and(|state| state.undrain(reason));
        self.reindex(worker);
        ready
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
        if let Some(load) = load {
            state.take_ending(load.is_draining);
        }
        let health = state.view.health;
        let recovered = state.recover();
        if load.is_none() && state.view.health == health {
            return recovered; // outputs alone, as most reports of other engines are
        }
        if let Some(load) = load {
            let (class, samples) = (state.view.hardware, state.take_load(load));
            for sample in samples {
                self.costs.hardware.learn(class, &sample);
            }
        }
        self.reindex(key.worker);
        recovered
    }

    /// A worker reported what its prefix cache has stored and dropped, before the outputs of
    /// the same report. False: it is to be asked to begin again.
    pub fn on_cache_events(&mut self, key: WorkerKey, events: &CacheEvents) -> bool {
        self.chosen.take();
        self.connected(key).is_none() || self.prefixes.on_events(key.worker, events)
    }

    /// How the workers of a model name the chunks of prompts.
    pub fn chunk_schemes(&self, model: ModelId) -> Vec<ChunkScheme> {
        self.prefixes.schemes(model)
    }

    /// Chunks that a worker is taken to hold.
    pub fn chunks_held(&self, worker: WorkerId) -> usize {
        self.prefixes.chunks(worker)
    }

    /// A request arrives, whatever becomes of it.
    pub fn on_arrival(&mut self, request: &RequestView, now: Duration) {
        let demand = self.demands.entry(request.model).or_default();
        demand.on_arrival(request.prompt_tokens, now);
    }

    /// What the clients of a model have asked for lately.
    pub fn demand(&self, model: ModelId) -> Option<&Demand> {
        self.demands.get(&model)
    }

    /// What is known of costs.
    pub fn costs(&self) -> &CostModel {
        &self.costs
    }

    /// A leg is dispatched. `None`: the connection is gone.
    pub fn on_dispatched(&mut self, key: WorkerKey, spec: &LegSpec) -> Option<LegSlot> {
        self.connected(key)?;
        let cost = self.config.cost;
        let placed = self.prefixes.on_placed(key.worker, spec);
        let state = self.connected(key)?;
        let slot = state.add_leg(spec, &cost, placed);
        state.recount();
        self.reindex(key.worker);
        Some(slot)
    }

    /// A leg has produced so many tokens more: it holds its blocks by now, and is in the load, if
    /// there is one. `cached`: with the first of a request, tokens of its prompt that were found
    /// cached.
    pub fn on_output(&mut self, key: WorkerKey, slot: LegSlot, tokens: usize, cached: u32) {
        let Some(state) = self.connected(key) else {
            return;
        };
        let answer = state.count_output(slot, tokens as u32);
        let placed = state.on_output(slot);
        let model = state.model;
        // What an opaque answer had cached is not known with its first part.
        let told = state.view.capabilities.payload == Payload::Tokens;
        if let Some(demand) = model.and_then(|model| self.demands.get_mut(&model)) {
            demand.on_cached(cached);
            if let Some((prompt_tokens, had, has)) = answer {
                demand.on_output(prompt_tokens, had, has);
            }
        }
        if let Some(placed) = placed {
            let cached = told.then_some(cached);
            self.prefixes.on_settled(key.worker, &placed, cached);
            self.chosen.take();
        }
    }

    /// A leg has ended, with or without an account of its time.
    pub fn on_ended(&mut self, key: WorkerKey, slot: LegSlot, timings: Option<&LegTimings>) {
        let Some(state) = self.connected(key) else {
            return;
        };
        let model = state.model;
        let Some(EndedLeg {
            handoff,
            placed,
            answer,
        }) = state.remove_leg(slot)
        else {
            return;
        };
        self.chosen.take();
        let demand = model.and_then(|model| self.demands.get_mut(&model));
        if let Some((demand, (prompt_tokens, output_tokens))) = demand.zip(answer) {
            demand.on_ended(prompt_tokens, output_tokens);
        }
        if let Some(placed) = placed {
            self.prefixes.on_settled(key.worker, &placed, None);
        }
        // The first one of a pair also waits until the two have met.
        let usual = |of: &&LegTimings| of.transfer_bytes > 0 && of.handshake.is_zero();
        let timings = timings.filter(usual);
        if let (Some((same_machine, tokens)), Some(timings)) = (handoff, timings) {
            let exposed = timings.transfer_exposed.max(SHORTEST_HANDOFF);
            self.costs
                .links
                .learn(same_machine, tokens, exposed.as_secs_f64());
        }
    }

    /// Counts again what a worker's load does not show, after outputs and ends. False: that is as
    /// it was.
    pub fn recount(&mut self, key: WorkerKey) -> bool {
        let changed = self.connected(key).is_some_and(WorkerState::recount);
        if changed {
            self.reindex(key.worker);
        }
        changed
    }

    /// Every worker, in the order in which they were added.
    pub fn workers(&self) -> impl Iterator<Item = &WorkerState> {
        self.workers.values()
    }

    /// Models of workers that take requests as they are.
    pub fn opaque_models(&self) -> impl Iterator<Item = OpaqueModel<'_>> {
        self.models.opaque()
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
        let failing = || !self.failing(request.model).is_empty();
        let placement = self.choose(request).map(drop);
        placement.or_else(|reason| if failing() { Ok(()) } else { Err(reason) })
    }

    /// Shows the policy what has changed of a worker.
    fn reindex(&mut self, worker: WorkerId) {
        self.chosen.take();
        if let Some(state) = self.workers.get(&worker)
            && let Some(model) = state.model
        {
            self.policy.update(model, &state.view);
        }
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
}
