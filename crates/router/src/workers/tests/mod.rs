//! The link against a real gRPC server, and the registry's bookkeeping.

mod link;
mod registry;

use std::sync::Arc;
use std::time::Instant;

use tasuki_core::WorkerView;
use tasuki_policy::PolicyConfig;
use tasuki_wire::v1::{self, Role};

use super::Registry;
use super::testing::idle;

fn registry(workers: usize) -> Arc<Registry> {
    let policy = PolicyConfig::default();
    Arc::new(Registry::new(workers, policy, Instant::now()))
}

fn view(registry: &Registry, worker: usize) -> WorkerView {
    registry.read(|slots| slots[worker].view.clone())
}

fn submit(attempt: &str, leg: v1::Leg, prompt: usize) -> v1::Submit {
    v1::Submit {
        request_id: attempt.to_owned(),
        leg: leg.into(),
        prompt_tokens: vec![0; prompt],
        choices: vec![0],
        sampling: Some(v1::SamplingParams {
            max_tokens: 1_000,
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn load_report() -> v1::StepReport {
    v1::StepReport {
        load: Some(idle(Role::Mixed)),
        ..Default::default()
    }
}
