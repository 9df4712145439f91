//! What an operator may say about serving.

use std::time::Duration;

use tasuki_core::CostConfig;
use tasuki_flow::roles::{Objectives, RolesConfig};
use tasuki_flow::{AdmissionConfig, MachineConfig, OnKvLoss};
use tasuki_policy::{PolicyConfig, PolicyKind};

use crate::discovery::Sources;
use crate::tls::fleet::WorkerTransport;
use crate::workers::{Liveness, RolesMode, RolesSettings};

/// Settings of the serving layer.
#[derive(Debug, Clone)]
pub struct Config {
    /// Of each model, the names that its workers may give it.
    pub models: Vec<Vec<String>>,
    /// Where the workers are.
    pub workers: Sources,
    /// Plain connections to them, or mTLS.
    pub transport: WorkerTransport,
    /// How long the requests of a worker go on whose address is gone.
    pub worker_drain: Duration,
    pub on_kv_loss: OnKvLoss,
    pub policy: PolicyKind,
    /// Refuse to place a leg on a worker of another role.
    pub strict_roles: bool,
    /// Whether roles follow the load.
    pub roles: RolesMode,
    /// See [`CostConfig::role_preference`].
    pub role_preference: f64,
    /// How long an accepted request waits for a worker when none is left.
    pub recover: Duration,
    /// See [`MachineConfig::stalled`].
    pub stalled: Option<Duration>,
    pub admission: AdmissionConfig,
}

impl Default for Config {
    fn default() -> Self {
        let machine = MachineConfig::default();
        Self {
            models: vec![Vec::new()],
            workers: Sources::default(),
            transport: WorkerTransport::default(),
            worker_drain: Duration::from_secs(600),
            on_kv_loss: machine.on_kv_loss,
            policy: PolicyKind::default(),
            strict_roles: false,
            roles: RolesMode::default(),
            role_preference: CostConfig::default().role_preference,
            recover: machine.recover,
            stalled: machine.stalled,
            admission: AdmissionConfig::default(),
        }
    }
}

/// What follows from [`Config`], and what only tests change.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tuning {
    pub worker_drain: Duration,
    pub machine: MachineConfig,
    pub policy: PolicyConfig,
    pub admission: AdmissionConfig,
    pub liveness: Liveness,
    pub roles: RolesSettings,
}

impl From<&Config> for Tuning {
    fn from(config: &Config) -> Self {
        let objectives = Objectives {
            ttft_s: config.admission.ttft.map(|ttft| ttft.as_secs_f64()),
            tpot_s: config.admission.tpot.map(|tpot| tpot.as_secs_f64()),
        };
        Self {
            worker_drain: config.worker_drain,
            machine: MachineConfig {
                on_kv_loss: config.on_kv_loss,
                recover: config.recover,
                stalled: config.stalled,
                ..MachineConfig::default()
            },
            policy: PolicyConfig {
                kind: config.policy,
                strict_roles: config.strict_roles,
                cost: CostConfig {
                    role_preference: config.role_preference,
                    tpot_s: objectives.tpot_s,
                    ..CostConfig::default()
                },
                seed: rand::random(),
            },
            admission: config.admission,
            roles: RolesSettings {
                mode: config.roles,
                config: RolesConfig {
                    objectives,
                    ..RolesConfig::default()
                },
            },
            liveness: Liveness {
                stalled: config.stalled,
                ..Liveness::default()
            },
        }
    }
}
