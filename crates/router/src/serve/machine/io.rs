//! What goes into a request's state machine and what comes out.

use tasuki_core::{FailureKind, RequestView, WorkerId};
use tasuki_policy::NoPlacement;
use tasuki_wire::v1;

use crate::serve::api::Event;
use crate::workers::{Seat, WorkerKey};

/// Something happened.
#[derive(Debug, Clone)]
pub enum Input {
    Output(WorkerKey, v1::Output),
    Ended(WorkerKey, v1::LegEnd),
    /// The connection ended, and with it every leg there.
    Lost(WorkerKey),
    /// A worker joined or recovered.
    WorkersChanged,
    /// The client wants no more of this choice.
    Stop(u32),
    /// The client is gone.
    HangUp,
    /// The router shuts down and waits no longer.
    Cancel,
    /// A deadline passed.
    Tick,
}

/// Which leg of a flight a message is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Whole,
    Prefill,
    Decode,
}

/// Something to do.
#[derive(Debug)]
pub enum Effect {
    Submit {
        to: WorkerKey,
        submit: v1::Submit,
    },
    Abort {
        to: WorkerKey,
        abort: v1::Abort,
    },
    Retarget {
        to: WorkerKey,
        retarget: v1::Retarget,
    },
    Emit(Event),
    /// For logs and metrics: an attempt is given up.
    Setback {
        attempt: String,
        setback: Setback,
        detail: String,
    },
}

/// Why an attempt was given up, or bent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Setback {
    WorkerLost,
    Failed(FailureKind),
    KvLost,
    Returned,
    Refused,
    /// Only the decode worker changed; what its predecessor failed of.
    Retargeted(FailureKind),
}

impl Setback {
    /// The word used in logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Setback::WorkerLost => "worker_lost",
            Setback::Failed(_) => "failed",
            Setback::KvLost => "kv_lost",
            Setback::Returned => "returned",
            Setback::Refused => "refused",
            Setback::Retargeted(_) => "retargeted",
        }
    }

    /// What was at fault.
    pub fn kind(self) -> FailureKind {
        match self {
            Setback::WorkerLost => FailureKind::Device,
            Setback::KvLost => FailureKind::Transport,
            Setback::Returned => FailureKind::Memory,
            Setback::Refused => FailureKind::Overload,
            Setback::Failed(kind) | Setback::Retargeted(kind) => kind,
        }
    }
}

/// The workers as the machine sees them.
pub trait Fleet {
    /// A prefill and a decode seat; the same twice: one worker does both.
    fn place(&mut self, request: &RequestView) -> Result<(Seat, Seat), NoPlacement>;

    /// Another decode seat for a request that `prefill` works on; none of `tried`.
    fn place_decode(
        &mut self,
        request: &RequestView,
        prefill: WorkerKey,
        tried: &[WorkerId],
    ) -> Option<Seat>;
}
