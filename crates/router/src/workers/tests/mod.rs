//! The stream's task against a real gRPC server, and what the registry passes on.

mod connect;
mod registry;
mod roles;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tasuki_core::WorkerView;
use tasuki_flow::AdmissionConfig;
use tasuki_flow::{LegKind, LegSpec};
use tasuki_policy::PolicyConfig;

use super::Registry;

fn registry(workers: usize) -> Arc<Registry> {
    let registry = Registry::new(
        vec![Vec::new()],
        PolicyConfig::default(),
        AdmissionConfig::default(),
        Instant::now(),
    );
    for _ in 0..workers {
        registry.add("local:1");
    }
    Arc::new(registry)
}

fn view(registry: &Registry, worker: usize) -> WorkerView {
    registry
        .read(|known| known.state.view.clone())
        .swap_remove(worker)
}

pub fn spec(kind: LegKind) -> LegSpec {
    LegSpec {
        kind,
        handoff: None,
        waited: Duration::ZERO,
        prompt: (0..10).collect(),
        chunks: tasuki_core::Chunks::default(),
        resumed: Vec::new(),
        choices: vec![0],
        sampling: Arc::default(),
        cache_salt: "".into(),
        opaque: None,
        trace: None,
    }
}
