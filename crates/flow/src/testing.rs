//! Workers and legs for tests.

use std::sync::Arc;
use std::time::Duration;

use tasuki_core::{Capabilities, ChunkScheme, Chunks, HardwareClass, Identity, KvDomain, Role};

use crate::fleet::WorkerInfo;
use crate::leg::{LegKind, LegSpec};
use crate::sampling::SamplingParams;
use crate::worker_ref::Peer;

/// A worker of 100 blocks that takes 1,024 tokens.
pub fn info(engine: &str) -> WorkerInfo {
    WorkerInfo {
        peer: Peer {
            engine_id: engine.to_owned(),
            kv_endpoint: format!("{engine}:1"),
        },
        role: Role::Mixed,
        role_epoch: 0,
        role_owner: String::new(),
        model: "tiny".to_owned(),
        further_names: Vec::new(),
        adapters: Vec::new(),
        domain: domain(7),
        capabilities: Capabilities::default(),
        vocab_size: 512,
        max_model_len: 1_024,
        max_sequences: None,
        block_size: 16,
        num_blocks: 100,
        chunks: ChunkScheme::of_blocks(domain(7).identity, 16),
        hardware: HardwareClass::default(),
    }
}

pub fn domain(identity: u8) -> KvDomain {
    KvDomain {
        backend: "test",
        identity: Identity([identity; 16]),
    }
}

/// A leg with one choice.
pub fn leg_spec(kind: LegKind, prompt_tokens: u32, max_tokens: u32) -> LegSpec {
    LegSpec {
        kind,
        handoff: None,
        waited: Duration::ZERO,
        prompt: (0..prompt_tokens).collect(),
        chunks: Chunks::default(),
        resumed: Vec::new(),
        choices: vec![0],
        sampling: Arc::new(SamplingParams {
            max_tokens,
            ..SamplingParams::default()
        }),
        cache_salt: "".into(),
        opaque: None,
        trace: None,
    }
}
