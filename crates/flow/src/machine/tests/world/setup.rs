//! What a run begins with, and what may happen in it.

use tasuki_core::{Capabilities, Role};

use super::super::sim_worker::Lengths;
use crate::leg::LegEndReason;
use crate::machine::OnKvLoss;
use crate::worker_ref::{LegId, WorkerKey};

#[derive(Debug, Clone)]
pub struct Setup {
    pub roles: Vec<Role>,
    pub n: u32,
    pub lengths: Lengths,
    pub faults: usize,
    pub on_kv_loss: OnKvLoss,
    /// Stops and hang-ups of the client are among the faults.
    pub client_acts: bool,
    /// The client wants the prompt's logprobs.
    pub scored: bool,
    /// Tokens of a choice that a decode step reports as one run.
    pub run: usize,
    /// How often the budget of retries is used up when it is asked.
    pub dry: usize,
    /// Of every worker.
    pub capabilities: Capabilities,
    /// Time may pass while a leg decodes, as a fault.
    pub stalls: bool,
    /// The request and its answer are frames.
    pub frames: bool,
}

impl Setup {
    pub fn new(roles: &[Role], n: u32, first: usize, max_tokens: usize, faults: usize) -> Self {
        Self {
            roles: roles.to_vec(),
            n,
            lengths: Lengths { first, max_tokens },
            faults,
            on_kv_loss: OnKvLoss::Recompute,
            client_acts: false,
            scored: false,
            run: 1,
            dry: 0,
            capabilities: Capabilities::default(),
            stalls: false,
            frames: false,
        }
    }
}

/// One thing that may happen next. The order is that of the undisturbed run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    ToWorker(WorkerKey),
    ToRouter(WorkerKey),
    /// The leg's next step: first tokens, pull and start, or decode.
    Advance(LegId),
    Restart(usize),
    TimePasses,
    // Faults.
    EndLeg(LegId, LegEndReason),
    Crash(usize, Crash),
    Repeat(WorkerKey),
    Stop(u32),
    HangUp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crash {
    /// Messages sent before still arrive.
    AfterFlush,
    /// Messages under way are lost.
    MessagesLost,
    /// Only the stream breaks: peers can still pull announced KV.
    StreamOnly,
}
