//! What a worker says of itself.

use tasuki_core::{Capabilities, ChunkScheme, HardwareClass, KvDomain, Role, StepSample};

use crate::worker_ref::Peer;

/// Who a worker is.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerInfo {
    pub peer: Peer,
    pub role: Role,
    /// Only a later one changes the role.
    pub role_epoch: u64,
    /// Who set it; "start" where the worker was started with it.
    pub role_owner: String,
    /// The name of the model that it was started with.
    pub model: String,
    /// By which clients may know it too, where requests are not tokens.
    pub further_names: Vec<String>,
    /// Variants of the model by name, where requests are not tokens. Other workers of the model may
    /// lack them.
    pub adapters: Vec<String>,
    pub domain: KvDomain,
    pub capabilities: Capabilities,
    pub vocab_size: u32,
    /// Prompt plus output of one request, in tokens.
    pub max_model_len: u32,
    /// That it generates at once, so of one request at most. `None`: it tells no limit.
    pub max_sequences: Option<u32>,
    /// In tokens.
    pub block_size: u32,
    pub num_blocks: u32,
    /// How chunks of prompts are named where its cache is reported, or estimated.
    pub chunks: ChunkScheme,
    pub hardware: HardwareClass,
}

/// What a worker has to do at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LoadReport {
    /// The legs that the load counts: all of this connection up to this number, see
    /// [`super::LegSlot::number`]. `None`: not known; a leg is counted when it has output.
    pub applied_legs: Option<u64>,
    pub waiting_requests: u32,
    pub running_requests: u32,
    /// Not yet computed, of all requests there.
    pub waiting_prefill_tokens: u64,
    /// Free or evictable.
    pub free_blocks: u32,
    /// That decode; each choice is one.
    pub running_sequences: u32,
    /// That will decode there and do not yet.
    pub waiting_sequences: u32,
    /// Of these: whose prompt another worker computes, so their KV has not come.
    pub awaited_sequences: u32,
    /// That the decoding ones attend to.
    pub running_kv_tokens: u64,
    /// That the waiting ones attend to when they begin to decode, once for each choice. `None`:
    /// not known; that of our own legs is counted until they have output.
    pub waiting_kv_tokens: Option<u64>,
    /// It was told to end: new work would hold it up.
    pub is_draining: bool,
    /// The last step that only decoded.
    pub last_decode: Option<StepSample>,
    /// The last step that computed prompt tokens.
    pub last_prefill: Option<StepSample>,
}
