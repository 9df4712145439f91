//! One sequence of a worker.

use std::sync::Arc;
use std::time::Duration;

use tasuki_flow::LegKind;

use super::decodes::Place;
use crate::time::Time;

/// A sequence's place in its worker; used again when it is gone.
pub type SeqId = u32;

/// What a worker is given.
#[derive(Debug, Clone)]
pub struct NewLeg {
    /// Of the simulation; names the request.
    pub request: u32,
    pub attempt: u32,
    /// Since a worker first got a leg of the request.
    pub waited: Duration,
    pub kind: LegKind,
    /// Counts the legs of a connection.
    pub number: u64,
    /// To prefill: the prompt, and what earlier attempts produced.
    pub tokens: u32,
    /// Of these, output of earlier attempts.
    pub resumed: u32,
    /// Output in all.
    pub output_tokens: u32,
    /// Names of the prompt's chunks: as the worker names them, once it is submitted.
    pub chunks: Arc<[u64]>,
}

/// A sequence's place in line: when a worker first got the request, then the order of coming.
pub type Age = (Time, u64);

/// Where a sequence is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Waiting,
    Prefilling,
    /// A prefill leg whose prompt is computed.
    Held,
    /// A decode leg without blocks, or with blocks that are being filled.
    Inbound,
    Decoding,
    Gone,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Sequence {
    pub leg: NewLeg,
    pub age: Age,
    /// When the worker has the leg.
    pub ready: Time,
    pub stage: Stage,
    /// To compute before it decodes.
    pub tokens: u32,
    pub computed: u32,
    /// Of the first scheduling.
    pub cached: u32,
    /// Output so far, when it began to decode.
    pub produced: u32,
    pub place: Place,
    /// Held, that no chunk names.
    pub(super) blocks: u32,
    /// Leading chunks that it holds by name.
    pub(super) named: usize,
    /// A prefill leg: the peer has room. A decode leg: room is held back for it.
    pub credited: bool,
    /// A decode leg that asked for room in vain.
    pub(super) denied: bool,
    /// Held back for a decode leg.
    pub(super) reserved: u32,
    pub scheduled: Option<Time>,
    pub second: Option<Time>,
}

impl Sequence {
    pub fn new(leg: NewLeg, age: Age, ready: Time) -> Self {
        let decode = leg.kind == LegKind::Decode;
        Self {
            age,
            ready,
            stage: if decode {
                Stage::Inbound
            } else {
                Stage::Waiting
            },
            tokens: leg.tokens,
            computed: 0,
            cached: 0,
            // A decode leg goes on from the first token that the other leg sampled.
            produced: leg.resumed + u32::from(decode),
            place: Place::default(),
            blocks: 0,
            named: 0,
            credited: leg.kind == LegKind::Colocated,
            denied: false,
            reserved: 0,
            scheduled: None,
            second: None,
            leg,
        }
    }

    /// Its KV is this worker's own, and another worker needs it.
    pub fn hands_over(&self) -> bool {
        self.leg.kind == LegKind::Prefill
    }
}
