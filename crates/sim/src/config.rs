//! What is simulated.

use tasuki_flow::{AdmissionConfig, MachineConfig};
use tasuki_policy::PolicyConfig;

use crate::link::NetworkSpec;
use crate::roles::Roles;
use crate::time::Time;
use crate::worker::WorkerConfig;

/// A deployment, what happens to it, and what is kept of the run.
#[derive(Debug, Clone, Default)]
pub struct Config {
    pub workers: Vec<WorkerConfig>,
    pub policy: PolicyConfig,
    pub admission: AdmissionConfig,
    pub machine: MachineConfig,
    pub roles: Roles,
    /// To compare with: prompts of fewer tokens are not split, longer ones are, whatever `policy`
    /// says.
    pub prompt_threshold: Option<u32>,
    pub network: NetworkSpec,
    /// Of KV that a handoff moves.
    pub kv_bytes_per_token: f64,
    /// Between client and worker, through the router, in one direction.
    pub message_s: f64,
    /// From the last block there to the sequence may be scheduled: messages, and the turn of the
    /// decode worker's threads.
    pub handoff_s: f64,
    /// Whether the router knows who holds which prompt's beginning.
    pub prefix_index: bool,
    /// The router has served before: it knows how long steps take.
    pub warm_router: bool,
    /// Requests of clients in flight at most; more are sent later.
    pub max_in_flight: Option<usize>,
    pub faults: Vec<Fault>,
    /// Keep the time of every token.
    pub token_times: bool,
    /// Keep what the core was told and what it decided.
    pub record: bool,
}

/// Something happens to a worker, or to the links.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fault {
    pub at: Time,
    /// In the order of the configuration.
    pub worker: u32,
    pub kind: FaultKind,
}

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum FaultKind {
    /// The process ends; it is back after so many seconds.
    Crash { back_after_s: f64 },
    /// Every step takes so many times as long, from now on.
    Slow { factor: f64 },
    /// Every link has this part of its bandwidth, from now on.
    Links { factor: f64 },
    /// It gets no new work.
    Drain,
    /// It does again.
    Undrain,
}
