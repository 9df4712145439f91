//! What goes into a request's state machine and what comes out.

use tasuki_core::{FailureKind, RequestView, WorkerId};
use tasuki_policy::{NoPlacement, Why};

use crate::generation::Event;
use crate::leg::{LegEnd, LegSpec, Output};
use crate::worker_ref::{LegId, Peer, WorkerKey, WorkerRef};

/// Something happened.
#[derive(Debug, Clone)]
pub enum Input {
    Output(LegId, Output),
    Ended(LegId, LegEnd),
    /// The connection ended, and with it every leg there.
    Lost(WorkerKey),
    /// A worker joined or recovered.
    WorkersChanged,
    /// The client wants no more of this choice.
    Stop(u32),
    /// The client is gone.
    HangUp,
    /// The shell shuts down and waits no longer.
    Cancel,
    /// A deadline passed.
    Tick,
}

/// Something to do.
#[derive(Debug)]
pub enum Effect {
    /// Start a leg. If the worker is gone, [`Input::Lost`] answers.
    Dispatch {
        leg: LegId,
        spec: Box<LegSpec>,
    },
    Abort {
        leg: LegId,
        /// Empty: all.
        choices: Vec<u32>,
    },
    /// To a prefill leg: hand over to another decode worker.
    Retarget {
        leg: LegId,
        peer: Peer,
    },
    Emit(Event),
    /// For logs and metrics: an attempt is abandoned or retargeted.
    Retry {
        attempt: u32,
        reason: RetryReason,
        detail: String,
    },
}

/// Why an attempt is abandoned or retargeted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RetryReason {
    WorkerLost,
    Failed(FailureKind),
    KvLost,
    Returned,
    Refused,
    /// Only the decode worker changed, for a failure of this kind.
    Retargeted(FailureKind),
}

impl RetryReason {
    /// The word used in logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            RetryReason::WorkerLost => "worker_lost",
            RetryReason::Failed(_) => "failed",
            RetryReason::KvLost => "kv_lost",
            RetryReason::Returned => "returned",
            RetryReason::Refused => "refused",
            RetryReason::Retargeted(_) => "retargeted",
        }
    }

    /// What was at fault.
    pub fn kind(self) -> FailureKind {
        match self {
            RetryReason::WorkerLost => FailureKind::Device,
            RetryReason::KvLost => FailureKind::Transport,
            RetryReason::Returned => FailureKind::Memory,
            RetryReason::Refused => FailureKind::Overload,
            RetryReason::Failed(kind) | RetryReason::Retargeted(kind) => kind,
        }
    }
}

/// Who was chosen for a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    pub prefill: WorkerRef,
    pub decode: WorkerRef,
    /// The costs that were compared, if there are any.
    pub why: Option<Why>,
}

/// The workers as the machine sees them.
pub trait Fleet {
    /// A prefill and a decode worker; the same one twice: it does both.
    ///
    /// # Errors
    ///
    /// [`NoPlacement`] says which kind of worker is missing.
    fn place(&mut self, request: &RequestView) -> Result<Placed, NoPlacement>;

    /// Another decode worker for a request that `prefill` works on; none of `tried`.
    fn place_decode(
        &mut self,
        request: &RequestView,
        prefill: WorkerKey,
        tried: &[WorkerId],
    ) -> Option<WorkerRef>;

    /// A request begins, which pays into the budget of retries.
    fn on_request(&mut self) {}

    /// Takes one retry from the budget of all requests. False: it is used up for now.
    fn may_retry(&mut self) -> bool {
        true
    }
}
