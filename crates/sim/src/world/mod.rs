//! The events of a run, in the order of their times.
//!
//! Owns everything; the parts do their own: `requests` what the router's tasks do, `turns` what
//! workers report, `handoffs` how KV gets from one to the other, `faults` what goes wrong.

mod faults;
mod handoffs;
mod held;
mod legs;
mod record;
mod requests;
mod roles;
#[cfg(test)]
mod tests;
mod turns;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;

use tasuki_flow::admission::{Admission, EntrantId};
use tasuki_flow::{BudgetConfig, FleetState, RetryBudget, WorkerKey};

pub use self::faults::worker_info;
use self::handoffs::Handoff;
pub use self::record::{Report, ShellEvent};
use self::requests::Live;
use crate::client::{Clients, Outcome, Request};
use crate::config::Config;
use crate::link::{Network, TransferId};
use crate::prompt_threshold::PromptThreshold;
use crate::roles::{Decider, RoleChange};
use crate::time::Time;
use crate::worker::{Counters, Worker};

/// How often those that wait to be placed are looked at, as in the router.
const LOOK_AGAIN_S: f64 = 0.02;

/// What came of a run.
#[derive(Debug, Default)]
pub struct Run {
    /// In the order in which they ended.
    pub outcomes: Vec<Outcome>,
    pub workers: Vec<Counters>,
    /// Gaps between tokens in seconds, and how many of each.
    pub gaps: Vec<(f32, u32)>,
    pub ended: Time,
    pub events: u64,
    pub moved_bytes: f64,
    pub role_changes: Vec<RoleChange>,
    /// What the core was told and decided, if it was to be kept.
    pub record: Vec<ShellEvent>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Due,
    Turn {
        worker: u32,
        number: u32,
    },
    TransferEnds {
        id: TransferId,
        number: u32,
    },
    /// A machine's deadline.
    Tick {
        live: u32,
        request: u32,
    },
    /// A client sends what follows another request.
    Follow {
        place: u32,
    },
    Fault {
        index: u32,
    },
    Restart {
        worker: u32,
    },
    Settle,
    /// Whoever moves roles looks at the workers.
    Roles,
    /// A worker takes its new role.
    Role {
        worker: u32,
        role: u8,
    },
}

/// A deployment while it runs.
struct World<'a> {
    config: Config,
    clients: &'a mut dyn Clients,
    now: Time,
    heap: BinaryHeap<Reverse<(Time, u64, Event)>>,
    events: u64,
    pending: Option<Request>,
    /// What clients send after other requests, by the number of their place.
    following: HashMap<u32, Request>,
    followed: u32,
    /// Sent by nobody yet: the client's limit is reached.
    held: VecDeque<Request>,
    /// `held` is being sent.
    sending: bool,
    in_flight: usize,

    fleet: FleetState,
    admission: Admission,
    budget: RetryBudget,
    decider: Decider,
    entrants: HashMap<EntrantId, u32>,
    settling: bool,
    keys: Vec<Option<WorkerKey>>,
    engines: u64,

    workers: Vec<Worker>,
    network: Network,
    handoffs: Vec<Option<Handoff>>,
    free_handoffs: Vec<u32>,
    transfers: HashMap<TransferId, u32>,

    live: Vec<Option<Box<Live>>>,
    free_live: Vec<u32>,
    requests: u32,
    prompts: HashMap<u32, Arc<[u32]>>,
    run: Run,
}

fn fleet(config: &Config) -> FleetState {
    let models = vec![Vec::new()];
    match config.prompt_threshold {
        None => FleetState::new(models, config.policy),
        Some(tokens) => FleetState::by(
            models,
            config.policy,
            Box::new(PromptThreshold::new(tokens)),
        ),
    }
}

/// Runs a deployment until every request is over.
pub fn simulate(config: Config, clients: &mut dyn Clients) -> Run {
    let mut world = World::new(config, clients);
    world.run();
    world.finish()
}

impl<'a> World<'a> {
    fn new(config: Config, clients: &'a mut dyn Clients) -> Self {
        let hosts = config.workers.iter().map(|worker| worker.host).collect();
        let workers = config.workers.iter().cloned();
        let (log, tells) = (config.token_times, config.prefix_index);
        let mut world = Self {
            workers: workers.map(|w| Worker::new(w, log, tells)).collect(),
            network: Network::new(config.network, hosts),
            fleet: fleet(&config),
            admission: Admission::new(config.admission),
            budget: RetryBudget::new(BudgetConfig::default()),
            decider: Decider::new(config.roles),
            entrants: HashMap::new(),
            settling: false,
            keys: vec![None; config.workers.len()],
            engines: 0,
            handoffs: Vec::new(),
            free_handoffs: Vec::new(),
            transfers: HashMap::new(),
            live: Vec::new(),
            free_live: Vec::new(),
            requests: 0,
            prompts: HashMap::new(),
            now: Time::ZERO,
            heap: BinaryHeap::new(),
            events: 0,
            pending: None,
            following: HashMap::new(),
            followed: 0,
            held: VecDeque::new(),
            sending: false,
            in_flight: 0,
            run: Run::default(),
            clients,
            config,
        };
        for worker in 0..world.workers.len() as u32 {
            world.fleet.add();
            world.join(worker);
        }
        if world.config.warm_router {
            world.warm_up();
        }
        world.hold_prompts();
        for (index, fault) in world.config.faults.clone().into_iter().enumerate() {
            world.at(
                fault.at,
                Event::Fault {
                    index: index as u32,
                },
            );
        }
        world.begin_roles();
        world.schedule_next();
        world
    }

    fn at(&mut self, time: Time, event: Event) {
        self.events += 1;
        self.heap.push(Reverse((time, self.events, event)));
    }

    fn run(&mut self) {
        while let Some(Reverse((at, _, event))) = self.heap.pop() {
            if self.is_over() {
                return;
            }
            self.now = self.now.max(at);
            self.run.events += 1;
            match event {
                Event::Due => {
                    if let Some(request) = self.pending.take() {
                        self.send(request);
                    }
                    self.schedule_next();
                }
                Event::Turn { worker, number } => self.turn(worker, number),
                Event::TransferEnds { id, number } => self.transfer_ends(id, number),
                Event::Tick { live, request } => self.tick(live, request),
                Event::Follow { place } => {
                    if let Some(request) = self.following.remove(&place) {
                        self.send(request);
                    }
                }
                Event::Fault { index } => self.fault(index as usize),
                Event::Restart { worker } => self.restart(worker),
                Event::Settle => {
                    self.settling = false;
                    self.settle();
                }
                Event::Roles => self.look_at_roles(),
                Event::Role { worker, role } => self.take_role(worker, role),
            }
            self.reschedule_transfers();
        }
    }

    /// Nothing is in flight and nothing is to come.
    fn is_over(&self) -> bool {
        let comes = self.pending.is_some() || !self.following.is_empty();
        self.in_flight == 0 && !comes && self.held.is_empty()
    }

    fn schedule_next(&mut self) {
        self.pending = self.clients.next();
        if let Some(request) = &self.pending {
            self.at(request.due.max(self.now), Event::Due);
        }
    }

    /// Puts a worker's next turn among the events, if it is another one than `number`.
    fn schedule_turn(&mut self, worker: u32, number: u32) {
        let state = &self.workers[worker as usize];
        let (next, turn) = (state.next, state.turn_number);
        if turn != number && next != Time::NEVER {
            let number = turn;
            self.at(next.max(self.now), Event::Turn { worker, number });
        }
    }

    fn reschedule_transfers(&mut self) {
        for at in 0..self.network.rescheduled.len() {
            let (id, number, ends) = self.network.rescheduled[at];
            self.at(ends, Event::TransferEnds { id, number });
        }
        self.network.rescheduled.clear();
    }

    fn finish(mut self) -> Run {
        self.run.ended = self.now;
        self.run.moved_bytes = self.network.moved_bytes;
        for worker in &mut self.workers {
            self.run.workers.push(worker.counters);
            self.run.gaps.append(&mut worker.log.gaps);
        }
        self.run
    }
}
