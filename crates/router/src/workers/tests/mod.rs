//! The stream's task against a real gRPC server, and what the registry passes on.

mod connect;
mod registry;
mod roles;

use std::sync::Arc;
use std::time::Duration;

use tasuki_core::WorkerView;
use tasuki_flow::{LegKind, LegSpec};

use super::Registry;
use super::testing::registry;

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
