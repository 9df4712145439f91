//! What is known of one worker, and what our legs there are going to take.

use std::collections::BTreeSet;
use std::time::Duration;

use tasuki_core::cost::single_step_s;
use tasuki_core::{
    Capabilities, Capacity, CostConfig, Health, KvDomain, ModelId, Outstanding, ReportedLoad, Role,
    WorkerId, WorkerView,
};

use super::report::{LoadReport, WorkerInfo};
use crate::leg::{LegKind, LegSpec};

/// How much a new measurement of the step time counts.
const STEP_WEIGHT: f64 = 0.2;

/// Speeds that an idle worker measured so many reports (seconds) ago are
/// forgotten: a bad moment must not keep requests away for good.
const IDLE_REPORTS_UNTIL_FORGOTTEN: u32 = 10;

/// One worker of the fleet, connected or not.
#[derive(Debug)]
pub struct WorkerState {
    pub view: WorkerView,
    /// That it serves, as of the last connection.
    pub model: Option<ModelId>,
    /// Of the last connection; kept while the worker is away, for its limits.
    pub info: Option<WorkerInfo>,
    /// A first attempt to reach the worker is over, whether or not it succeeded.
    pub was_tried: bool,
    /// Why it gets no new work; empty: it does.
    drain: BTreeSet<DrainReason>,
    pub(super) connection: Option<u64>,
    pub(super) last_report: Duration,
    /// Of this connection, by [`LegSlot`].
    legs: Vec<Option<RunningLeg>>,
    free_slots: Vec<u32>,
    dispatched_legs: u64,
    idle_reports: u32,
}

/// Why a worker gets no new work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DrainReason {
    /// An operator asked for it.
    Asked,
    /// Its address is not in the deployment any more.
    Unlisted,
}

/// Where a worker's bookkeeping of a leg is, from the leg's dispatch to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LegSlot {
    index: u32,
    /// Counts the legs of a connection in the order of their dispatch, from 1.
    pub number: u64,
}

impl LegSlot {
    #[cfg(test)]
    pub(super) fn index(self) -> u32 {
        self.index
    }
}

/// A leg of ours on the worker.
#[derive(Debug, Clone, Copy)]
struct RunningLeg {
    prefill_tokens: u64,
    promised_blocks: u64,
    number: u64,
    /// The worker's load counts it.
    is_counted: bool,
    has_blocks: bool,
}

impl WorkerState {
    pub(super) fn new(id: WorkerId) -> Self {
        Self {
            view: WorkerView {
                id,
                domain: KvDomain::default(),
                capabilities: Capabilities::default(),
                role: Role::Mixed,
                health: Health::Down,
                capacity: Capacity {
                    max_model_len_tokens: 0,
                    block_size_tokens: 1,
                    total_blocks: 0,
                },
                load: ReportedLoad::default(),
                outstanding: Outstanding::default(),
            },
            model: None,
            info: None,
            was_tried: false,
            drain: BTreeSet::new(),
            connection: None,
            last_report: Duration::ZERO,
            legs: Vec::new(),
            free_slots: Vec::new(),
            dispatched_legs: 0,
            idle_reports: 0,
        }
    }

    /// Takes over what a worker says of itself.
    pub(super) fn set_info(&mut self, info: WorkerInfo) {
        self.view.domain = info.domain;
        self.view.capabilities = info.capabilities;
        self.view.role = info.role;
        self.view.capacity = Capacity {
            max_model_len_tokens: info.max_model_len,
            block_size_tokens: info.block_size.max(1),
            total_blocks: info.num_blocks,
        };
        self.info = Some(info);
    }

    /// A new connection: nothing of ours is there, nothing is measured yet.
    pub(super) fn connect(&mut self, connection: u64, now: Duration) {
        self.view.health = self.health_when_up();
        self.view.load = ReportedLoad {
            free_blocks: self.view.capacity.total_blocks,
            ..ReportedLoad::default()
        };
        self.forget_legs();
        self.connection = Some(connection);
        self.was_tried = true;
        self.last_report = now;
    }

    fn health_when_up(&self) -> Health {
        if self.drain.is_empty() {
            Health::Ready
        } else {
            Health::Draining
        }
    }

    /// The worker reported. True: it gets new work by that.
    pub(super) fn recover(&mut self) -> bool {
        let health = self.health_when_up();
        std::mem::replace(&mut self.view.health, health) != health && health == Health::Ready
    }

    pub(super) fn drain(&mut self, reason: DrainReason) {
        self.drain.insert(reason);
        if self.view.health == Health::Ready {
            self.view.health = Health::Draining;
        }
    }

    /// True: the worker is ready for new work by that.
    pub(super) fn undrain(&mut self, reason: DrainReason) -> bool {
        self.drain.remove(&reason);
        self.view.health == Health::Draining && self.recover()
    }

    /// Whether an operator, or the loss of its address, keeps new work away.
    pub fn drains_because(&self, reason: DrainReason) -> bool {
        self.drain.contains(&reason)
    }

    /// Our legs there.
    pub fn running_legs(&self) -> usize {
        self.legs.len() - self.free_slots.len()
    }

    /// The connection is over, and its legs with it.
    pub(super) fn disconnect(&mut self) {
        self.view.health = Health::Down;
        self.connection = None;
        self.forget_legs();
    }

    fn forget_legs(&mut self) {
        self.legs.clear();
        self.free_slots.clear();
        self.dispatched_legs = 0;
        self.view.outstanding = Outstanding::default();
    }

    /// Counts a report against what was submitted, and takes its load over.
    pub(super) fn take_load(&mut self, load: &LoadReport, cost: &CostConfig) {
        let mut single = self.view.load.single_step_s;
        if load.decode_step_s > 0.0 && load.running_requests > 0 {
            let running = load.running_requests;
            let measured = single_step_s(load.decode_step_s, running, cost.batch_slope);
            single = if single > 0.0 {
                single + STEP_WEIGHT * (measured - single)
            } else {
                measured
            };
        }
        if load.running_requests + load.waiting_requests > 0 {
            self.idle_reports = 0;
        }
        self.idle_reports += 1;
        let forget = self.idle_reports > IDLE_REPORTS_UNTIL_FORGOTTEN;
        let known = |measured: f64| if forget { 0.0 } else { measured };
        self.view.load = ReportedLoad {
            waiting_requests: load.waiting_requests,
            running_requests: load.running_requests,
            waiting_prefill_tokens: load.waiting_prefill_tokens,
            free_blocks: load.free_blocks,
            prefill_tokens_per_s: known(load.prefill_tokens_per_s),
            single_step_s: known(single),
        };
        for leg in self.legs.iter_mut().flatten() {
            leg.is_counted |= load
                .applied_legs
                .is_some_and(|applied| leg.number <= applied);
        }
    }

    /// A leg was sent to the worker.
    pub(super) fn add_leg(&mut self, spec: &LegSpec, cost: &CostConfig) -> LegSlot {
        let tokens = (spec.prompt.len() + spec.resumed.len()) as u64;
        let growth = match spec.kind {
            LegKind::Prefill => 0,
            LegKind::Colocated | LegKind::Decode => {
                spec.sampling.max_tokens.min(cost.headroom_tokens)
            }
        };
        let choices = spec.choices.len() as u64;
        self.dispatched_legs += 1;
        let number = self.dispatched_legs;
        let leg = RunningLeg {
            prefill_tokens: match spec.kind {
                LegKind::Decode => 0,
                LegKind::Colocated | LegKind::Prefill => tokens,
            },
            promised_blocks: self.view.blocks_for(tokens)
                + choices * self.view.blocks_for(u64::from(growth)),
            number,
            is_counted: false,
            has_blocks: false,
        };
        let index = match self.free_slots.pop() {
            Some(index) => {
                self.legs[index as usize] = Some(leg);
                index
            }
            None => {
                self.legs.push(Some(leg));
                u32::try_from(self.legs.len() - 1).expect("fewer legs than 2^32")
            }
        };
        LegSlot { index, number }
    }

    /// A leg has output: it holds its blocks by now, and is in the load, if there is one.
    pub(super) fn on_output(&mut self, slot: LegSlot) {
        if let Some(Some(leg)) = self.legs.get_mut(slot.index as usize) {
            leg.prefill_tokens = 0;
            if self.view.capabilities.reports_load {
                leg.has_blocks = true;
                leg.is_counted = true;
            }
        }
    }

    /// A leg has ended.
    pub(super) fn remove_leg(&mut self, slot: LegSlot) {
        let leg = self.legs.get_mut(slot.index as usize);
        if leg.and_then(Option::take).is_some() {
            self.free_slots.push(slot.index);
        }
    }

    /// Counts what the worker's last report cannot show, from our own legs.
    pub(super) fn recount(&mut self) {
        let mut outstanding = Outstanding::default();
        for leg in self.legs.iter().flatten() {
            if !leg.is_counted {
                outstanding.prefill_tokens += leg.prefill_tokens;
                outstanding.requests += 1;
            }
            if !leg.has_blocks {
                outstanding.promised_blocks += leg.promised_blocks;
            }
        }
        self.view.outstanding = outstanding;
    }
}
