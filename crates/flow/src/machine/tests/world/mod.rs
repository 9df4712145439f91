//! Workers, connections and a client around one machine; the test chooses every step.

mod actions;
mod checks;
mod legs;
mod setup;
mod views;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use tasuki_core::{Chunks, ModelId, Role, WorkerId};

use self::checks::Client;
pub use self::setup::{Action, Setup};
use super::sim_worker::{SimLeg, ended};
use crate::generation::Generation;
use crate::leg::{LegEndReason, Ticket};
use crate::machine::{Effect, Input, Machine, MachineConfig};
use crate::opaque::{Opaque, OpaqueRequest};
use crate::sampling::SamplingParams;
use crate::worker_ref::{LegId, WorkerKey};

struct Worker {
    role: Role,
    key: Option<WorkerKey>,
    legs: Vec<SimLeg>,
}

pub struct World {
    setup: Setup,
    pub machine: Machine,
    workers: Vec<Worker>,
    to_router: BTreeMap<u64, (WorkerKey, VecDeque<Input>)>,
    to_worker: BTreeMap<u64, (WorkerKey, VecDeque<Effect>)>,
    /// Tickets that were issued and not used yet.
    tickets: Vec<Ticket>,
    /// KV that outlived its leg, by attempt and engine.
    orphans: BTreeSet<(u32, String)>,
    /// Attempts that ended with their first tokens.
    ended_by_prefill: BTreeSet<u32>,
    next_connection: u64,
    tie: u64,
    dry: usize,
    now: Duration,
    faults_left: usize,
    pub client: Client,
    pub trace: Vec<String>,
    legs_dispatched: BTreeSet<LegId>,
    opaque: Option<OpaqueRequest>,
}

impl World {
    pub fn new(setup: Setup) -> Self {
        let opaque = setup.frames.then(|| OpaqueRequest {
            content: Opaque::new("a request"),
            sequences: 1,
            adapters: Vec::new(),
            indivisible: None,
            bound_to: None,
            resumes: false,
        });
        let request = Generation {
            model: ModelId::default(),
            request_id: "r".to_owned(),
            prompt: (0..40).collect(),
            n: setup.n,
            sampling: SamplingParams {
                max_tokens: setup.lengths.max_tokens as u32,
                prompt_logprobs: setup.scored.then_some(0),
                ..Default::default()
            },
            cache_salt: String::new(),
            tenant: "".into(),
            priority: 0,
            opaque: opaque.clone(),
        };
        let config = MachineConfig {
            on_kv_loss: setup.on_kv_loss,
            recover: Duration::from_secs(3_600),
            stalled: setup.stalls.then_some(Duration::from_secs(1)),
            max_failures: 8,
            max_losses_in_a_row: 8,
            max_kv_losses: 8,
            ..MachineConfig::default()
        };
        let workers = setup.roles.iter().enumerate().map(|(index, &role)| Worker {
            role,
            key: Some(WorkerKey {
                worker: WorkerId(index as u32),
                connection: index as u64,
            }),
            legs: Vec::new(),
        });
        let mut world = Self {
            workers: workers.collect(),
            next_connection: setup.roles.len() as u64,
            machine: Machine::new(request, Chunks::default(), config),
            to_router: BTreeMap::new(),
            to_worker: BTreeMap::new(),
            tickets: Vec::new(),
            orphans: BTreeSet::new(),
            ended_by_prefill: BTreeSet::new(),
            tie: 0,
            dry: setup.dry,
            now: Duration::ZERO,
            faults_left: setup.faults,
            client: Client::default(),
            trace: Vec::new(),
            legs_dispatched: BTreeSet::new(),
            opaque,
            setup,
        };
        let mut views = world.views();
        world.machine.start(false, &[], world.now, &mut views);
        world.apply();
        world
    }

    pub fn act(&mut self, action: &Action) {
        self.trace.push(format!("{action:?}"));
        match action {
            Action::ToWorker(key) => {
                let effect = pop(&mut self.to_worker, *key);
                self.deliver(*key, effect);
            }
            Action::ToRouter(key) => {
                let input = pop(&mut self.to_router, *key);
                self.feed(input);
            }
            Action::Advance(leg) => self.advance(*leg),
            Action::Restart(at) => {
                let key = WorkerKey {
                    worker: WorkerId(*at as u32),
                    connection: self.next_connection,
                };
                self.next_connection += 1;
                self.workers[*at].key = Some(key);
                self.feed(Input::WorkersChanged);
            }
            Action::TimePasses => {
                let deadline = self.machine.deadline().expect("only offered with one");
                self.now = self.now.max(deadline);
                self.faults_left -= self.faults_left.min(usize::from(self.setup.stalls));
                self.feed(Input::Tick);
            }
            fault => self.fault(fault),
        }
    }

    fn deliver(&mut self, key: WorkerKey, effect: Effect) {
        match effect {
            Effect::Dispatch { leg, spec } => {
                let leg = SimLeg::new(leg.attempt, &spec, self.decode_first());
                self.worker_of(key).legs.push(leg);
            }
            Effect::Abort { leg: id, choices } => {
                let Some(mut leg) = self.take_leg(id) else {
                    return;
                };
                leg.choices
                    .retain(|(choice, _)| !choices.is_empty() && !choices.contains(choice));
                if leg.choices.is_empty() {
                    self.report(key, Input::Ended(id, ended(LegEndReason::Aborted)));
                } else {
                    self.worker_of(key).legs.push(leg);
                }
            }
            Effect::Retarget { leg: id, peer } => match self.take_leg(id) {
                Some(mut leg) => {
                    leg.peer = peer.engine_id;
                    self.worker_of(key).legs.push(leg);
                }
                None => self.report(key, Input::Ended(id, ended(LegEndReason::Failed))),
            },
            other => unreachable!("{other:?} is not for a worker"),
        }
    }

    fn feed(&mut self, input: Input) {
        let mut views = self.views();
        self.machine.handle(input, self.now, &mut views);
        self.tie = views.tie;
        self.dry = views.dry;
        self.apply();
    }

    /// What a shell does with effects.
    fn apply(&mut self) {
        while let Some(effect) = self.machine.next_effect() {
            let to = match effect {
                Effect::Dispatch { leg, ref spec } => {
                    self.check_dispatch(leg, spec);
                    leg.worker
                }
                Effect::Abort { leg, .. } | Effect::Retarget { leg, .. } => leg.worker,
                Effect::Emit(event) => {
                    self.show_client(event);
                    continue;
                }
                Effect::Retry { .. } => continue,
            };
            if self.keys().any(|key| key == to) {
                let queue = self.to_worker.entry(to.connection);
                queue
                    .or_insert_with(|| (to, VecDeque::new()))
                    .1
                    .push_back(effect);
            } else if matches!(effect, Effect::Dispatch { .. }) {
                self.report(to, Input::Lost(to));
            }
        }
    }

    fn report(&mut self, key: WorkerKey, input: Input) {
        let queue = self.to_router.entry(key.connection);
        queue
            .or_insert_with(|| (key, VecDeque::new()))
            .1
            .push_back(input);
    }

    fn keys(&self) -> impl Iterator<Item = WorkerKey> {
        self.workers.iter().filter_map(|worker| worker.key)
    }

    fn legs(&self) -> impl Iterator<Item = (WorkerKey, &SimLeg)> {
        self.workers.iter().flat_map(|worker| {
            let legs = worker.legs.iter();
            legs.filter_map(|leg| Some((worker.key?, leg)))
        })
    }

    fn leg(&self, id: LegId) -> Option<&SimLeg> {
        self.legs()
            .find(|(key, leg)| leg_id(*key, leg) == id)
            .map(|(_, leg)| leg)
    }

    fn worker_of(&mut self, key: WorkerKey) -> &mut Worker {
        &mut self.workers[key.worker.0 as usize]
    }

    fn take_leg(&mut self, id: LegId) -> Option<SimLeg> {
        let legs = &mut self.worker_of(id.worker).legs;
        let at = legs.iter().position(|leg| leg.attempt == id.attempt)?;
        Some(legs.remove(at))
    }
}

fn leg_id(worker: WorkerKey, leg: &SimLeg) -> LegId {
    LegId {
        worker,
        attempt: leg.attempt,
    }
}

fn engine(key: WorkerKey) -> String {
    format!("engine-{}", key.connection)
}

fn pop<T>(queues: &mut BTreeMap<u64, (WorkerKey, VecDeque<T>)>, key: WorkerKey) -> T {
    let queue = queues
        .get_mut(&key.connection)
        .expect("only offered when there");
    queue.1.pop_front().expect("only offered when not empty")
}
