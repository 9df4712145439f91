//! A deployment of `tasuki simulate`, and what the simulator is told of it.

use std::time::Duration;

use tasuki_core::CostConfig;
use tasuki_flow::AdmissionConfig;
use tasuki_flow::roles::{Objectives, RolesConfig};
use tasuki_policy::PolicyConfig;
use tasuki_sim::{Config, Fault, Roles, WorkerConfig};

use crate::args::{RolesName, RouterArgs, TopologyArgs};
use crate::hardware::Hardware;

/// Workers, how the router decides, and what happens to the workers.
pub struct Deployment {
    pub workers: Vec<WorkerConfig>,
    pub topology: TopologyArgs,
    pub router: RouterArgs,
    pub faults: Vec<Fault>,
}

impl Deployment {
    /// On this hardware, with any number of requests in flight.
    pub fn config(&self, hardware: &Hardware) -> Config {
        Config {
            workers: self.workers.clone(),
            policy: policy(&self.router, self.topology.strict_roles),
            admission: admission(&self.router),
            roles: roles(&self.router),
            network: hardware.network,
            kv_bytes_per_token: hardware.kv_bytes_per_token,
            message_s: hardware.message_s,
            handoff_s: hardware.handoff_s,
            prefix_index: !self.router.no_prefix_index,
            warm_router: true,
            faults: self.faults.clone(),
            token_times: true,
            ..Config::default()
        }
    }
}

pub fn policy(router: &RouterArgs, strict_roles: bool) -> PolicyConfig {
    PolicyConfig {
        kind: router.policy.into(),
        strict_roles,
        cost: CostConfig {
            role_preference: router.role_preference,
            tpot_s: target_s(router.tpot_target_ms),
            ..CostConfig::default()
        },
        seed: 0,
    }
}

fn target_s(ms: Option<f64>) -> Option<f64> {
    ms.map(|ms| ms.max(0.0) / 1e3)
}

fn roles(router: &RouterArgs) -> Roles {
    if router.roles == RolesName::Fixed {
        return Roles::Fixed;
    }
    Roles::Follow(RolesConfig {
        objectives: Objectives {
            ttft_s: target_s(router.ttft_target_ms),
            tpot_s: target_s(router.tpot_target_ms),
        },
        ..RolesConfig::default()
    })
}

fn admission(router: &RouterArgs) -> AdmissionConfig {
    let target = |ms| target_s(ms).map(Duration::from_secs_f64);
    AdmissionConfig {
        off: router.no_admission,
        ttft: target(router.ttft_target_ms),
        tpot: target(router.tpot_target_ms),
        ..AdmissionConfig::default()
    }
}
