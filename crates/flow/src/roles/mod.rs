//! Roles that follow the load: which worker should prefill, decode or do both.
//!
//! ```text
//!  arrivals, outputs ─▶ Demand ─▶ Tasks ─▶ outlook of every topology ─▶ Orders: a worker's role each
//!  loads, fitted costs ────────────┘         (the cost model of placement)
//! ```
//!
//! A prompt that takes longer than the TTFT objective on an idle worker is late whatever the roles
//! are ([`Objectives::in_reach`]). Roles follow the other requests, if there are any. The late ones
//! are served all the same, and count for how many workers there should be ([`Wanted`]).
//!
//! There are no thresholds. Each topology of the workers that are there has a cost in seconds of
//! requests over a horizon ([`outlook`]). A change is made if it pays for itself: if it saves more
//! than the requests lose whose worker changes, and still would if the measured lengths were off by
//! their standard error either way. A load that is not expected to last for the horizon counts as
//! long as it lasts, and those that came before it until roles follow them ([`ahead`]). One worker
//! of every [`AT_ONCE`] changes at a time, and the next ones after these have reported their new
//! roles. A change stops nothing: what runs on a worker goes on there.
//!
//! Where roles are preferences the cost of each placement decides by itself, and roles matter
//! little. They matter where they are strict, and where workers have limits by role.

mod ahead;
mod answers;
mod arrivals;
mod demand;
mod loads;
mod look;
mod outlook;
mod owner;
mod scale;
mod search;
#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Duration;

use tasuki_core::{Health, ModelId, Payload, Rates, Role, WorkerId};

use self::ahead::Ahead;
pub use self::demand::{Demand, Lengths};
pub use self::look::Look;
use self::look::{Seen, is_pinned};
pub use self::outlook::{Bound, Objectives, Outlook, Task, Topology};
pub use self::owner::{Claim, Held, OWNER_PREFIX, Ownership};
pub use self::scale::Wanted;
use self::search::Better;
use crate::fleet::{FleetState, WorkerState};

/// A worker that does not report its new role for so long is not waited for.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// Of so many workers one changes at a time: all that a large fleet lacks is done in seconds, and
/// what was begun can still be left.
const AT_ONCE: usize = 16;
/// How fast the share of our requests in the workers' loads is learnt, for each look.
const SHARE_KEPT: f64 = 0.99;

/// Settings of the balancer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RolesConfig {
    pub objectives: Objectives,
    /// A change has so many seconds to pay for itself.
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
    /// Requests a second that come besides, and are late whatever the roles are.
    beyond: f64,
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
            "{:.1} requests/s of {:.0}:{:.0} tokens come",
            self.lengths.rate, self.lengths.prompt_tokens, self.lengths.output_tokens,
        )?;
        if self.beyond > 0.0 {
            write!(f, ", and {:.1}/s too long for the objective", self.beyond)?;
        }
        write!(
            f,
            "; {} can serve {:.1}/s ({half} limits), {} {:.1}/s: saves {:.1} s of requests in \
             {:.0} s, the change takes {:.2} s",
            from.0, from.1.capacity, to.0, to.1.capacity, gain_s, self.horizon_s, change_s,
        )
    }
}

/// Moves the workers of one model among the roles.
#[derive(Debug, Clone)]
pub struct Balancer {
    model: ModelId,
    config: RolesConfig,
    /// Changes that were ordered and are not reported yet.
    pending: Vec<(WorkerId, Role)>,
    /// When they were ordered.
    ordered: Duration,
    /// Requests in workers' loads, and those of them that are ours.
    shares: [f64; 2],
}

impl Balancer {
    pub fn new(model: ModelId, config: RolesConfig) -> Self {
        Self {
            model,
            config,
            pending: Vec::new(),
            ordered: Duration::ZERO,
            shares: [0.0; 2],
        }
    }

    /// Looks at the workers, a few times a second. `waiting`: requests that wait to be placed.
    /// `None`: nothing is asked of them, or there are none.
    pub fn look(&mut self, fleet: &FleetState, waiting: usize, now: Duration) -> Option<Look> {
        self.learn_share(fleet);
        let waits = now.saturating_sub(self.ordered) < ANSWER_WITHIN;
        self.pending.retain(|&(worker, role)| {
            let state = fleet.worker(worker);
            waits && state.is_some_and(|state| state.view.role != role)
        });
        self.looked(fleet, waiting, now)
    }

    /// What should change, if anything. It takes a while with many workers: hold no lock.
    pub fn decide(&mut self, look: &Look, now: Duration) -> Vec<Order> {
        if !self.pending.is_empty() {
            return Vec::new();
        }
        let Some((better, moves)) = look.better() else {
            return Vec::new();
        };
        let lengths = look.ahead.now().lengths;
        let reason = Reason {
            better,
            lengths,
            beyond: look.load.lengths.rate - lengths.rate,
            horizon_s: self.config.horizon_s,
        };
        let most = look.workers.len().div_ceil(AT_ONCE);
        let orders: Vec<_> = look
            .first_of(moves, most)
            .into_iter()
            .map(|(worker, from, to)| Order {
                worker,
                from,
                to,
                reason,
            })
            .collect();
        self.pending = orders.iter().map(|one| (one.worker, one.to)).collect();
        self.ordered = now;
        orders
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
        let demand = fleet.demand(self.model)?;
        let rates = mean_rates(fleet, &workers);
        let all_lengths = demand.lengths(now)?;
        let in_reach = |prompt_tokens: f64| {
            let objectives = &self.config.objectives;
            objectives.in_reach(&rates, prompt_tokens, all_lengths.cached)
        };
        let lengths = demand.lengths_where(in_reach, now)?;
        let (mut all, mut kept) = (Topology::default(), Topology::default());
        for state in &workers {
            *all.of(state.view.role) += 1;
            if is_pinned(state) {
                *kept.of(state.view.role) += 1;
            }
        }
        if workers.is_empty() {
            return None;
        }
        let task = self.tasks(fleet, &workers, rates);
        let backlog = workers.iter();
        let backlog = backlog.map(|state| state.view.prefill_backlog_tokens() as f64);
        let mut load = task(all_lengths);
        load.queued = waiting as f64 * self.routers()
            + backlog.sum::<f64>() / all_lengths.prompt_tokens.max(1.0);
        let mut present = task(lengths);
        present.queued = load.queued * lengths.rate / all_lengths.rate;
        let ahead = match demand.expected_where(in_reach, now) {
            Some((rest_s, before)) => {
                let before = before.into_iter();
                let before = before.map(|(share, lengths)| (share, task(lengths)));
                Ahead::changing(present, rest_s, before.collect())
            }
            None => Ahead::steady(present),
        };
        Some(Look {
            workers: workers.into_iter().map(Seen::new).collect(),
            now: all,
            kept,
            ahead,
            load,
        })
    }

    /// What these workers are to serve where this router is asked for requests of some lengths.
    fn tasks(
        &self,
        fleet: &FleetState,
        workers: &[&WorkerState],
        rates: Rates,
    ) -> impl Fn(Lengths) -> Task + use<> {
        let pools = workers
            .iter()
            .map(|state| state.view.capacity.tokens() as f64);
        let pool_tokens = pools.sum::<f64>() / workers.len() as f64;
        let (links, routers, config) = (fleet.costs().links, self.routers(), self.config);
        move |mut lengths| {
            lengths.rate *= routers;
            let moved = lengths.prompt_tokens * (1.0 - lengths.cached);
            Task {
                rates,
                objectives: config.objectives,
                pool_tokens,
                handoff_s: links.handoff_s(true, moved),
                queued: 0.0,
                horizon_s: config.horizon_s,
                lengths,
            }
        }
    }
}

fn mean_rates(fleet: &FleetState, workers: &[&WorkerState]) -> Rates {
    let hardware = fleet.costs().hardware.rates();
    Rates::mean(workers.iter().map(|state| {
        let rates = hardware.get(state.view.hardware);
        rates.copied().unwrap_or_default()
    }))
}
