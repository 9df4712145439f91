//! Roles that follow the load: which worker should prefill, decode or do both.
//!
//! ```text
//!  arrivals, outputs ─▶ Demand ─▶ Task ─▶ outlook of every topology ─▶ Order: one worker's role
//!  loads, fitted costs ────────────┘        (the cost model of placement)
//! ```
//!
//! There are no thresholds. Each topology of the workers that are there has a cost in seconds of
//! requests over a horizon ([`outlook`]). A change is made if it pays for itself: if it saves more
//! than the requests lose whose worker changes, and still would if the measured lengths were off by
//! their standard error either way. One worker changes at a time, and the next one after it has
//! reported its new role. A change stops nothing: what runs on a worker goes on there.
//!
//! Where roles are preferences the cost of each placement decides by itself, and roles matter
//! little. They matter where they are strict, and where workers have limits by role.

mod demand;
mod outlook;
mod owner;
mod scale;
mod search;
#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Duration;

use tasuki_core::{Health, ModelId, Payload, Rates, Role, WorkerId};

pub use self::demand::{Demand, Lengths};
pub use self::outlook::{Bound, Objectives, Outlook, Task, Topology};
pub use self::owner::{Claim, Held, OWNER_PREFIX, Ownership};
pub use self::scale::Wanted;
use self::search::{Better, best};
use crate::fleet::{FleetState, WorkerState};

/// The owner of a role that a worker was started with.
const STARTED: &str = "start";
/// A worker that does not report its new role for so long is not waited for.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// How fast the share of our requests in the workers' loads is learnt, for each look.
const SHARE_KEPT: f64 = 0.99;

/// Settings of the balancer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RolesConfig {
    pub objectives: Objectives,
    /// For so long a load is taken to stay as it is, in seconds: a change has that time to pay
    /// for itself.
    pub horizon_s: f64,
}

impl Default for RolesConfig {
    fn default() -> Self {
        Self {
            objectives: Objectives::default(),
            horizon_s: 30.0,
        }
    }
}

/// One worker is to get another role.
#[derive(Debug, Clone, PartialEq)]
pub struct Order {
    pub worker: WorkerId,
    pub from: Role,
    pub to: Role,
    pub reason: Reason,
}

/// Why.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reason {
    better: Better,
    lengths: Lengths,
    horizon_s: f64,
}

impl Reason {
    /// What limits the workers as they are.
    pub fn bound(&self) -> Bound {
        self.better.from.1.bound
    }

    /// Expected to be saved, in seconds of requests over the horizon.
    pub fn gain_s(&self) -> f64 {
        self.better.gain_s
    }

    /// The topology that this is a step to.
    pub fn target(&self) -> Topology {
        self.better.to.0
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Better {
            from,
            to,
            gain_s,
            change_s,
        } = self.better;
        let half = match self.bound() {
            Bound::Prefill => "prefill",
            Bound::Decode => "decode",
        };
        write!(
            f,
            "{:.1} requests/s of {:.0}:{:.0} tokens come; {} can serve {:.1}/s ({half} limits), {} \
             {:.1}/s: saves {:.1} s of requests in {:.0} s, the change takes {:.2} s",
            self.lengths.rate,
            self.lengths.prompt_tokens,
            self.lengths.output_tokens,
            from.0,
            from.1.capacity,
            to.0,
            to.1.capacity,
            gain_s,
            self.horizon_s,
            change_s,
        )
    }
}

/// Moves the workers of one model among the roles.
#[derive(Debug, Clone)]
pub struct Balancer {
    model: ModelId,
    config: RolesConfig,
    /// A change that was ordered and is not reported yet.
    pending: Option<(WorkerId, Role, Duration)>,
    /// Requests in workers' loads, and those of them that are ours.
    shares: [f64; 2],
}

/// The workers of one moment and what is asked of them.
#[derive(Debug, Clone)]
pub struct Look {
    workers: Vec<Seen>,
    /// As they are.
    pub now: Topology,
    /// Of them, those whose roles an operator set.
    kept: Topology,
    pub task: Task,
}

/// A worker, as far as a change of its role depends on it.
#[derive(Debug, Clone, Copy)]
struct Seen {
    id: WorkerId,
    role: Role,
    pinned: bool,
    sequences: f64,
    kv_tokens: f64,
    backlog_tokens: f64,
}

impl Seen {
    fn new(state: &WorkerState) -> Self {
        let view = &state.view;
        Self {
            id: view.id,
            role: view.role,
            pinned: is_pinned(state),
            sequences: f64::from(view.sequences()),
            kv_tokens: view.kv_tokens() as f64,
            backlog_tokens: view.prefill_backlog_tokens() as f64,
        }
    }
}

impl Balancer {
    pub fn new(model: ModelId, config: RolesConfig) -> Self {
        Self {
            model,
            config,
            pending: None,
            shares: [0.0; 2],
        }
    }

    /// Looks at the workers, a few times a second. `waiting`: requests that wait to be placed.
    /// `None`: nothing is asked of them, or they cannot serve.
    pub fn look(&mut self, fleet: &FleetState, waiting: usize, now: Duration) -> Option<Look> {
        self.learn_share(fleet);
        if let Some((worker, role, since)) = self.pending {
            let state = fleet.worker(worker);
            let changed = state.is_none_or(|state| state.view.role == role);
            if changed || now.saturating_sub(since) >= ANSWER_WITHIN {
                self.pending = None;
            }
        }
        self.looked(fleet, waiting, now)
    }

    /// What should change, if anything. It takes a while with many workers: hold no lock.
    pub fn decide(&mut self, look: &Look, now: Duration) -> Option<Order> {
        if self.pending.is_some() {
            return None;
        }
        let (better, moves) = look.better()?;
        let (worker, from, to) = look.first_of(moves)?;
        self.pending = Some((worker, to, now));
        Some(Order {
            worker,
            from,
            to,
            reason: Reason {
                better,
                lengths: look.task.lengths,
                horizon_s: self.config.horizon_s,
            },
        })
    }

    fn learn_share(&mut self, fleet: &FleetState) {
        let mut seen = [0.0; 2];
        for state in self.workers(fleet) {
            seen[0] += f64::from(state.view.requests());
            seen[1] += state.running_legs() as f64;
        }
        for (sum, seen) in self.shares.iter_mut().zip(seen) {
            *sum = *sum * SHARE_KEPT + seen;
        }
    }

    /// Requests of all routers for each of ours.
    fn routers(&self) -> f64 {
        let [all, ours] = self.shares;
        if ours < 1.0 {
            1.0
        } else {
            (all / ours).max(1.0)
        }
    }

    fn workers<'a>(
        &self,
        fleet: &'a FleetState,
    ) -> impl Iterator<Item = &'a WorkerState> + use<'a> {
        let model = self.model;
        fleet.workers().filter(move |state| {
            let view = &state.view;
            state.model == Some(model)
                && view.health == Health::Ready
                && view.capabilities.payload == Payload::Tokens
        })
    }

    fn looked(&self, fleet: &FleetState, waiting: usize, now: Duration) -> Option<Look> {
        let workers: Vec<&WorkerState> = self.workers(fleet).collect();
        let routers = self.routers();
        let mut lengths = fleet.demand(self.model)?.lengths(now)?;
        lengths.rate *= routers;
        let (mut all, mut kept) = (Topology::default(), Topology::default());
        let mut backlog_tokens = 0.0;
        let mut pool_tokens = 0.0;
        for state in &workers {
            *all.of(state.view.role) += 1;
            if is_pinned(state) {
                *kept.of(state.view.role) += 1;
            }
            backlog_tokens += state.view.prefill_backlog_tokens() as f64;
            pool_tokens += state.view.capacity.tokens() as f64;
        }
        let count = workers.len() as f64;
        if !all.serves() {
            return None;
        }
        let costs = fleet.costs();
        let moved = lengths.prompt_tokens * (1.0 - lengths.cached);
        let task = Task {
            rates: mean_rates(workers.iter().map(|state| {
                let rates = costs.hardware.rates().get(state.view.hardware);
                rates.copied().unwrap_or_default()
            })),
            objectives: self.config.objectives,
            pool_tokens: pool_tokens / count,
            handoff_s: costs.links.handoff_s(true, moved),
            queued: waiting as f64 * routers + backlog_tokens / lengths.prompt_tokens.max(1.0),
            horizon_s: self.config.horizon_s,
            lengths,
        };
        Some(Look {
            workers: workers.into_iter().map(Seen::new).collect(),
            now: all,
            kept,
            task,
        })
    }
}

impl Topology {
    fn of(&mut self, role: Role) -> &mut u32 {
        match role {
            Role::Prefill => &mut self.prefill,
            Role::Decode => &mut self.decode,
            Role::Mixed => &mut self.mixed,
        }
    }

    fn count(self, role: Role) -> u32 {
        let mut topology = self;
        *topology.of(role)
    }
}

const ROLES: [Role; 3] = [Role::Prefill, Role::Decode, Role::Mixed];

impl Look {
    /// How many workers of each role the load asks for.
    pub fn wanted(&self) -> Wanted {
        Wanted::new(&self.task, self.now)
    }

    /// The topology to change to, and the single changes that lead there.
    fn better(&self) -> Option<(Better, Vec<(Role, Role)>)> {
        let (target, outlook) = best(&self.task, self.now, self.kept);
        if target == self.now {
            return None;
        }
        let lengths = &self.task.lengths;
        let (prompts, outputs) = (1.0 + lengths.prompt_error, 1.0 + lengths.output_error);
        let gain_s = [
            (1.0, 1.0),
            (prompts, 1.0 / outputs),
            (1.0 / prompts, outputs),
        ]
        .map(|(prompts, outputs)| {
            let task = self.task.tilted(prompts, outputs);
            task.outlook(self.now).cost_s - task.outlook(target).cost_s
        })
        .into_iter()
        .fold(f64::INFINITY, f64::min);
        let moves = self.moves(target);
        let change_s = moves
            .iter()
            .map(|&(from, to)| self.cheapest(from, to).map_or(0.0, |(_, cost_s)| cost_s))
            .sum();
        let better = Better {
            from: (self.now, self.task.outlook(self.now)),
            to: (target, outlook),
            gain_s,
            change_s,
        };
        (gain_s > change_s).then_some((better, moves))
    }

    fn moves(&self, target: Topology) -> Vec<(Role, Role)> {
        let gives = |role: Role| self.now.count(role).saturating_sub(target.count(role));
        let takes = |role: Role| target.count(role).saturating_sub(self.now.count(role));
        let list = |many: &dyn Fn(Role) -> u32| {
            let each = ROLES.map(|role| vec![role; many(role) as usize]);
            each.concat()
        };
        list(&gives).into_iter().zip(list(&takes)).collect()
    }

    /// The change to make first: that after which the workers do best.
    fn first_of(&self, moves: Vec<(Role, Role)>) -> Option<(WorkerId, Role, Role)> {
        let mut moves = moves;
        moves.dedup();
        let after = |&(from, to): &(Role, Role)| {
            let mut topology = self.now;
            *topology.of(from) -= 1;
            *topology.of(to) += 1;
            topology
                .serves()
                .then(|| self.task.outlook(topology).cost_s)
        };
        let possible = moves.iter().filter_map(|step| Some((step, after(step)?)));
        let (&(from, to), _) = possible.min_by(|(_, one), (_, other)| one.total_cmp(other))?;
        let (worker, _) = self.cheapest(from, to)?;
        Some((worker, from, to))
    }

    /// The worker of a role whose change costs least, and what that is.
    fn cheapest(&self, from: Role, to: Role) -> Option<(WorkerId, f64)> {
        let able = self.workers.iter();
        let able = able.filter(|seen| seen.role == from && !seen.pinned);
        let costs = able.map(|seen| (seen.id, self.change_s(seen, to)));
        costs.min_by(|(_, one), (_, other)| one.total_cmp(other))
    }

    /// What requests lose that are on a worker when its role changes: those that decode there
    /// beside the prompts that come, and new ones behind the prompts that wait there.
    fn change_s(&self, seen: &Seen, to: Role) -> f64 {
        let (rates, sequences) = (&self.task.rates, seen.sequences);
        let backlog_s = rates.prompt_token_s * seen.backlog_tokens;
        let step_s = rates.decode_s(sequences, seen.kv_tokens);
        let rest_s = step_s * self.task.lengths.output_tokens / 2.0;
        let stalled_s = if to == Role::Prefill {
            sequences * rest_s / 2.0
        } else {
            0.0
        };
        let arriving = self.task.lengths.rate * backlog_s / self.workers.len() as f64;
        let behind_s = if to == Role::Decode {
            backlog_s * arriving / 2.0
        } else {
            0.0
        };
        stalled_s + behind_s
    }
}

/// Whether an operator set the role: it stays until the worker starts again.
fn is_pinned(state: &WorkerState) -> bool {
    let owner = state.info.as_ref().map_or("", |info| &info.role_owner);
    !(owner.is_empty() || owner == STARTED || owner.starts_with(OWNER_PREFIX))
}

fn mean_rates(all: impl Iterator<Item = Rates>) -> Rates {
    let mut count = 0.0;
    let mut sum = [0.0; 6];
    for rates in all {
        count += 1.0;
        let parts = [
            rates.step_s,
            rates.sequence_s,
            rates.kv_token_s,
            rates.prompt_step_s,
            rates.prompt_token_s,
            rates.prompt_square_s,
        ];
        sum.iter_mut()
            .zip(parts)
            .for_each(|(sum, part)| *sum += part);
    }
    let [
        step_s,
        sequence_s,
        kv_token_s,
        prompt_step_s,
        prompt_token_s,
        prompt_square_s,
    ] = sum.map(|part| part / f64::max(count, 1.0));
    Rates {
        step_s,
        sequence_s,
        kv_token_s,
        prompt_step_s,
        prompt_token_s,
        prompt_square_s,
    }
}
