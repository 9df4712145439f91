//! What is known of one worker, and what runs there for us.

use std::collections::HashMap;
use std::time::Instant;

use tasuki_core::cost::single_step_s;
use tasuki_core::{
    Capacity, CostConfig, Health, Identity, Outstanding, ReportedLoad, Role, WorkerId, WorkerView,
};
use tasuki_wire::v1;
use tokio::sync::mpsc::UnboundedSender;

use super::Mail;

/// How much a new measurement of the step time counts.
const STEP_WEIGHT: f64 = 0.2;

/// Speeds that an idle worker measured so many reports (seconds) ago are
/// forgotten: a bad moment must not keep requests away for good.
const IDLE_REPORTS_UNTIL_FORGOTTEN: u32 = 10;

/// A report that was under way when we submitted cannot have counted it; the next one has.
const REPORTS_UNTIL_COUNTED: u8 = 2;

pub struct Slot {
    pub view: WorkerView,
    /// Of the last connection; kept while the worker is away, for its limits.
    pub info: Option<v1::WorkerInfo>,
    /// Of this connection.
    pub load: Option<v1::Load>,
    pub connection: Option<Connection>,
    pub last_heard: Instant,
    /// A first attempt to reach the worker is over, well or badly.
    pub was_asked: bool,
    idle_reports: u32,
}

pub struct Connection {
    pub serial: u64,
    pub messages: UnboundedSender<v1::RouterMessage>,
    pub legs: HashMap<String, RunningLeg>,
}

/// A leg of ours on the worker.
pub struct RunningLeg {
    pub mail: UnboundedSender<Mail>,
    prefill_tokens: u64,
    promised_blocks: u64,
    reports_since: u8,
    has_blocks: bool,
}

impl Slot {
    pub fn new(id: WorkerId, now: Instant) -> Self {
        Self {
            view: WorkerView {
                id,
                identity: Identity::default(),
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
            info: None,
            load: None,
            connection: None,
            last_heard: now,
            was_asked: false,
            idle_reports: 0,
        }
    }

    /// Takes over what a worker says of itself.
    pub fn set_info(&mut self, info: v1::WorkerInfo, identity: Identity) {
        self.view.identity = identity;
        self.view.role = role_from_wire(info.role()).unwrap_or(Role::Mixed);
        self.view.capacity = Capacity {
            max_model_len_tokens: info.max_model_len,
            block_size_tokens: info.block_size.max(1),
            total_blocks: info.num_blocks,
        };
        self.info = Some(info);
    }

    /// A new connection: nothing of ours is there, nothing is measured yet.
    pub fn connect(&mut self, connection: Connection, now: Instant) {
        self.view.health = Health::Ready;
        self.view.outstanding = Outstanding::default();
        self.view.load = ReportedLoad {
            free_blocks: self.view.capacity.total_blocks,
            ..ReportedLoad::default()
        };
        self.load = None;
        self.connection = Some(connection);
        self.was_asked = true;
        self.last_heard = now;
    }

    /// Counts a report against what was submitted, and takes its load over.
    pub fn take_load(&mut self, load: v1::Load) {
        if let Some(role) = role_from_wire(load.role()) {
            self.view.role = role;
        }
        let mut single = self.view.load.single_step_s;
        if load.decode_step_s > 0.0 && load.running_requests > 0 {
            let slope = CostConfig::default().batch_slope;
            let measured = single_step_s(load.decode_step_s, load.running_requests, slope);
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
        if let Some(connection) = &mut self.connection {
            for leg in connection.legs.values_mut() {
                leg.reports_since = leg.reports_since.saturating_add(1);
            }
        }
        self.load = Some(load);
    }

    /// What a submission is going to take here.
    pub fn new_leg(&self, submit: &v1::Submit, mail: UnboundedSender<Mail>) -> RunningLeg {
        let tokens = (submit.prompt_tokens.len() + submit.resumed_tokens.len()) as u64;
        let decodes = submit.leg() != v1::Leg::Prefill;
        let headroom = CostConfig::default().headroom_tokens;
        let output = submit.sampling.as_ref().map_or(1, |s| s.max_tokens);
        let growth = if decodes { output.min(headroom) } else { 0 };
        let choices = submit.choices.len() as u64;
        RunningLeg {
            mail,
            prefill_tokens: if submit.leg() == v1::Leg::Decode {
                0
            } else {
                tokens
            },
            promised_blocks: self.view.blocks_for(tokens)
                + choices * self.view.blocks_for(u64::from(growth)),
            reports_since: 0,
            has_blocks: false,
        }
    }

    /// What the worker's last report cannot show, from our own legs.
    pub fn recount(&mut self) {
        let mut outstanding = Outstanding::default();
        for leg in self.connection.iter().flat_map(|c| c.legs.values()) {
            if leg.reports_since < REPORTS_UNTIL_COUNTED {
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

impl RunningLeg {
    /// The leg says something: it holds its blocks by now, and is in the load.
    pub fn heard(&mut self) {
        self.has_blocks = true;
        self.reports_since = REPORTS_UNTIL_COUNTED;
    }
}

/// The role on the wire; `None` when it is not set.
pub fn role_from_wire(role: v1::Role) -> Option<Role> {
    match role {
        v1::Role::Unspecified => None,
        v1::Role::Prefill => Some(Role::Prefill),
        v1::Role::Decode => Some(Role::Decode),
        v1::Role::Mixed => Some(Role::Mixed),
    }
}
