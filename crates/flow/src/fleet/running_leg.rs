//! What is kept of a leg of ours while it runs.

use std::hash::{DefaultHasher, Hash, Hasher};

use tasuki_core::Outstanding;

use super::prefixes::PlacedPrompt;
use super::report::WorkerInfo;
use crate::leg::{Handoff, LegKind, LegSpec};

/// Where a worker's bookkeeping of a leg is, from the leg's dispatch to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LegSlot {
    pub(super) index: u32,
    /// Counts the legs of a connection in the order of their dispatch, from 1.
    pub number: u64,
}

/// A leg of ours on the worker.
#[derive(Debug)]
pub(super) struct RunningLeg {
    pub prefill_tokens: u64,
    /// Until there is output.
    pub placed: Option<PlacedPrompt>,
    pub promised_blocks: u64,
    pub sequences: u32,
    pub kv_tokens: u64,
    /// Of a decode leg: whether it is within one machine.
    pub handoff: Option<bool>,
    /// Of a decode leg: the engine that it gets its KV from, hashed.
    pub peer: Option<u64>,
    /// By a ticket: the other leg's end does not show that its KV gets away.
    pub redeems: bool,
    pub number: u64,
    /// Tokens of output.
    pub produced: u32,
    /// The worker's load counts it.
    pub is_counted: bool,
    pub has_blocks: bool,
}

impl RunningLeg {
    /// Tokens of the prompt, and of each choice's answer so far. `None`: it does not decode.
    pub fn answer(&self) -> Option<(u64, u32)> {
        let sequences = self.sequences;
        let prompt_tokens = self.kv_tokens.checked_div(u64::from(sequences))?;
        Some((prompt_tokens, self.produced / sequences))
    }

    /// Its answer has so many tokens more: tokens of the prompt, and how many it had and has.
    pub fn produce(&mut self, tokens: u32) -> Option<(u64, u32, u32)> {
        let (prompt_tokens, had) = self.answer()?;
        self.produced += tokens;
        let (_, has) = self.answer()?;
        Some((prompt_tokens, had, has))
    }

    /// It decodes here, and its prompt is computed elsewhere still.
    fn awaits_kv(&self) -> bool {
        self.placed.is_some() && self.prefill_tokens == 0
    }

    /// What the worker's last report cannot show of it. `knows_waiting_kv`: the worker reports the
    /// KV of sequences that wait.
    pub fn outstanding(&self, knows_waiting_kv: bool) -> Outstanding {
        let mut outstanding = Outstanding::default();
        if !self.is_counted {
            outstanding.prefill_tokens = self.prefill_tokens;
            outstanding.requests = 1;
            outstanding.sequences = self.sequences;
            if self.awaits_kv() {
                outstanding.awaited_sequences = self.sequences;
            }
        }
        // Some workers report how many sequences wait, and not their KV.
        if !self.is_counted || (self.placed.is_some() && !knows_waiting_kv) {
            outstanding.kv_tokens = self.kv_tokens;
        }
        if !self.has_blocks {
            outstanding.promised_blocks = self.promised_blocks;
            if self.is_counted && knows_waiting_kv {
                outstanding.waiting_kv_tokens = self.kv_tokens;
            }
        }
        outstanding
    }
}

/// The engine that a decode leg gets its KV from.
pub(super) fn peer(spec: &LegSpec) -> Option<u64> {
    match (&spec.handoff, spec.kind) {
        (Some(Handoff::With(peer)), LegKind::Decode) => Some(hash(&peer.engine_id)),
        (Some(Handoff::Redeem { from, .. }), LegKind::Decode) => Some(hash(from)),
        _ => None,
    }
}

/// Whether a decode leg's handoff is within one machine; `None`: it has none.
pub(super) fn handoff(spec: &LegSpec, worker: Option<&WorkerInfo>) -> Option<bool> {
    match (&spec.handoff, spec.kind, worker) {
        (Some(Handoff::With(peer)), LegKind::Decode, Some(own)) => {
            Some(host(&peer.kv_endpoint) == host(&own.peer.kv_endpoint))
        }
        _ => None,
    }
}

/// The machine in `host:port`, as far as addresses tell.
pub(super) fn host(endpoint: &str) -> &str {
    endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host)
}

pub(super) fn hash(engine_id: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    engine_id.hash(&mut hasher);
    hasher.finish()
}
