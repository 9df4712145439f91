//! Who moves the workers' roles while a deployment runs.

use std::time::Duration;

use tasuki_core::{Health, ModelId, RequestView, Role, WorkerId};
use tasuki_flow::FleetState;
use tasuki_flow::roles::{Balancer, Order, RolesConfig};

use crate::time::Time;

/// How roles change.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Roles {
    /// They stay what they are.
    #[default]
    Fixed,
    /// They follow the load: the router's balancer.
    Follow(RolesConfig),
    /// By thresholds, to compare with.
    Thresholds(Thresholds),
}

/// A decider as autoscalers have it (Dynamo's planner with a pinned number of GPUs): a pool all of
/// whose workers are beyond the objective takes a worker from the other pool, if all of that one
/// would be below a share of theirs with one worker less. One worker at a time, in long intervals.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    pub ttft_s: f64,
    pub itl_s: f64,
    /// A pool is idle below this share of its objective.
    pub low: f64,
    pub every_s: f64,
}

/// A worker got another role.
#[derive(Debug, Clone, PartialEq)]
pub struct RoleChange {
    pub at: Time,
    pub worker: u32,
    pub from: Role,
    pub to: Role,
    pub reason: String,
}

/// What decides.
#[derive(Debug)]
pub(crate) enum Decider {
    Fixed,
    Follow(Box<Balancer>),
    Thresholds(Thresholds),
}

impl Decider {
    pub fn new(roles: Roles) -> Self {
        match roles {
            Roles::Fixed => Self::Fixed,
            Roles::Follow(config) => {
                Self::Follow(Box::new(Balancer::new(ModelId::default(), config)))
            }
            Roles::Thresholds(thresholds) => Self::Thresholds(thresholds),
        }
    }

    /// How often it looks, in seconds.
    pub fn every_s(&self) -> Option<f64> {
        match self {
            Self::Fixed => None,
            Self::Follow(_) => Some(0.1),
            Self::Thresholds(thresholds) => Some(thresholds.every_s),
        }
    }

    /// The workers whose roles are to change, from what to what, and why.
    pub fn look(
        &mut self,
        fleet: &FleetState,
        waiting: (usize, u64),
        now: Duration,
    ) -> Vec<(WorkerId, Role, Role, String)> {
        match self {
            Self::Fixed => Vec::new(),
            Self::Follow(balancer) => {
                let look = balancer.look(fleet, waiting.0, now);
                let orders = look.map_or_else(Vec::new, |look| balancer.decide(&look, now));
                let told = |order: &Order| {
                    let reason = order.reason.to_string();
                    (order.worker, order.from, order.to, reason)
                };
                orders.iter().map(told).collect()
            }
            Self::Thresholds(thresholds) => thresholds.look(fleet, waiting).into_iter().collect(),
        }
    }
}

impl Thresholds {
    fn look(
        &self,
        fleet: &FleetState,
        (requests, tokens): (usize, u64),
    ) -> Option<(WorkerId, Role, Role, String)> {
        let of = |role: Role| {
            let ready = fleet
                .workers()
                .filter(|state| state.view.health == Health::Ready);
            ready.filter(move |state| state.view.role == role)
        };
        let costs = fleet.costs();
        let request = RequestView::new((tokens / (requests as u64).max(1)).max(512) as u32, 2);
        // What waits in the router waits for all of the pool.
        let share = |count: usize| tokens as f64 / count.max(1) as f64;
        let (prefill, decode) = (of(Role::Prefill).count(), of(Role::Decode).count());
        let ttft_s = |factor: f64| {
            of(Role::Prefill).map(move |state| {
                let rates = costs.hardware.rates()[state.view.hardware];
                let backlog = state.view.prefill_backlog_tokens() as f64 + share(prefill);
                rates.prompt_token_s * (backlog * factor + f64::from(request.prompt_tokens))
            })
        };
        let itl_s = |factor: f64| {
            of(Role::Decode).map(move |state| {
                let rates = costs.hardware.rates()[state.view.hardware];
                let (sequences, kv) = (state.view.sequences(), state.view.kv_tokens());
                rates.decode_s(f64::from(sequences) * factor, kv as f64 * factor)
            })
        };
        let fewer = |count: usize| count as f64 / (count as f64 - 1.0);
        let move_from = |from: Role, to: Role, reason: &str| {
            let least = of(from).min_by_key(|state| state.view.requests())?;
            Some((least.view.id, from, to, reason.to_owned()))
        };
        if prefill > 0
            && decode > 1
            && ttft_s(1.0).all(|s| s > self.ttft_s)
            && itl_s(fewer(decode)).all(|s| s < self.low * self.itl_s)
        {
            return move_from(
                Role::Decode,
                Role::Prefill,
                "all prefill workers are too slow",
            );
        }
        if decode > 0
            && prefill > 1
            && itl_s(1.0).all(|s| s > self.itl_s)
            && ttft_s(fewer(prefill)).all(|s| s < self.low * self.ttft_s)
        {
            return move_from(
                Role::Prefill,
                Role::Decode,
                "all decode workers are too slow",
            );
        }
        None
    }
}
