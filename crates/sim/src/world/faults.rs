//! What goes wrong, and how the router hears of it.

use tasuki_core::{Capabilities, ChunkScheme, HardwareClass, Identity, KvDomain, WorkerId};
use tasuki_flow::fleet::{DrainReason, WorkerInfo};
use tasuki_flow::{Input, Peer};

use super::World;
use super::record::ShellEvent;
use crate::config::FaultKind;
use crate::worker::WorkerConfig;

/// Steps that a router has seen that has served before.
const WARM_STEPS: u64 = 60;

impl World<'_> {
    /// A worker connects.
    pub(super) fn join(&mut self, worker: u32) {
        let info = self.info(worker);
        let now = self.now.since_start();
        let joined = self.fleet.join(WorkerId(worker), info, now);
        self.keys[worker as usize] = joined.ok();
        if self.config.record {
            let at = self.now;
            self.run.record.push(ShellEvent::Joined { at, worker });
        }
    }

    /// Teaches the router what steps take on each class of workers, by a report for each of a few.
    pub(super) fn warm_up(&mut self) {
        let mut known: Vec<std::sync::Arc<str>> = Vec::new();
        for worker in 0..self.workers.len() as u32 {
            let class = std::sync::Arc::clone(&self.workers[worker as usize].config.class);
            if !known.contains(&class) {
                known.push(class);
                for number in 0..WARM_STEPS {
                    self.workers[worker as usize].pretend(number);
                    self.report(worker, Vec::new());
                }
                self.workers[worker as usize].forget_samples();
                self.report(worker, Vec::new());
            }
        }
    }

    fn info(&mut self, worker: u32) -> WorkerInfo {
        self.engines += 1;
        let config = &self.workers[worker as usize].config;
        worker_info(config, worker, self.engines, self.config.prefix_index)
    }

    pub(super) fn fault(&mut self, index: usize) {
        let fault = self.config.faults[index];
        let worker = fault.worker;
        match fault.kind {
            FaultKind::Slow { factor } => self.workers[worker as usize].slowness = factor,
            FaultKind::Links { factor } => self.network.set_speed(factor, self.now),
            FaultKind::Drain => self.drain(worker, true),
            FaultKind::Undrain => self.drain(worker, false),
            FaultKind::Crash { back_after_s } => self.crash(worker, back_after_s),
        }
    }

    fn drain(&mut self, worker: u32, drain: bool) {
        if self.config.record {
            let at = self.now;
            self.run
                .record
                .push(ShellEvent::Drained { at, worker, drain });
        }
        let (id, reason) = (WorkerId(worker), DrainReason::Asked);
        if drain {
            self.fleet.drain(id, reason);
        } else if self.fleet.undrain(id, reason) {
            self.workers_changed();
        }
        self.settle();
    }

    fn crash(&mut self, worker: u32, back_after_s: f64) {
        let Some(key) = self.keys[worker as usize] else {
            return;
        };
        // Tokens of steps that have ended are with the router already.
        let alive = self.workers[worker as usize].crash(self.now);
        let mut reported = Vec::new();
        for seq in alive {
            let sequence = self.workers[worker as usize].sequence_mut(seq);
            if sequence.stage == crate::worker::Stage::Decoding {
                sequence.place.end = u64::MAX;
            }
            reported.extend(self.report_of_lost(worker, seq));
        }
        reported.retain(|one| one.output.is_some());
        if !reported.is_empty() {
            self.report(worker, reported);
        }
        self.keys[worker as usize] = None;
        self.workers[worker as usize].restart();
        self.fleet.leave(key);
        if self.config.record {
            let at = self.now;
            self.run.record.push(ShellEvent::Left { at, worker });
        }
        let lost = self.give_up_handoffs_of(worker);
        let mut places = Vec::new();
        for place in 0..self.live.len() as u32 {
            let Some(live) = &mut self.live[place as usize] else {
                continue;
            };
            let here = live.legs.extract_if(.., |leg| leg.worker == worker);
            let here: Vec<Option<u32>> = here.map(|leg| leg.handoff).collect();
            for id in here.iter().flatten() {
                self.end_handoff(*id);
            }
            if !here.is_empty() {
                places.push(place);
            }
        }
        for place in places {
            self.input(place, Input::Lost(key));
        }
        lost.iter().for_each(|lost| self.lose_kv(lost));
        self.restart_at(worker, self.now.plus_s(back_after_s));
    }

    /// A crashed worker is back, with the role that it started with.
    pub(super) fn restart(&mut self, worker: u32) {
        let at = worker as usize;
        self.workers[at].config.role = self.config.workers[at].role;
        self.join(worker);
        self.workers_changed();
        self.settle();
    }
}

/// What the router knows of a simulated worker. `engine`: new with every start.
pub fn worker_info(
    config: &WorkerConfig,
    worker: u32,
    engine: u64,
    reports_cache: bool,
) -> WorkerInfo {
    let identity = Identity::default();
    WorkerInfo {
        peer: Peer {
            engine_id: format!("engine-{engine}"),
            kv_endpoint: format!("host-{}:{worker}", config.host),
        },
        role: config.role,
        role_epoch: 0,
        role_owner: String::new(),
        model: "simulated".to_owned(),
        further_names: Vec::new(),
        adapters: Vec::new(),
        domain: KvDomain {
            backend: "tasuki",
            identity,
        },
        capabilities: Capabilities {
            reports_cache,
            ..Capabilities::default()
        },
        vocab_size: 1 << 16,
        max_model_len: config.limits.max_model_len,
        max_sequences: Some(config.limits.max_running_requests),
        block_size: config.limits.block_size,
        num_blocks: config.limits.num_blocks,
        chunks: ChunkScheme::of_blocks(identity, config.limits.block_size),
        hardware: HardwareClass {
            device: config.class.to_string(),
            identity,
            tensor_parallel: 1,
        },
    }
}
