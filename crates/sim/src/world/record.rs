//! What the core was told in a run and what it decided, so that a run of the real router can be
//! compared with it.

use std::sync::Arc;

use tasuki_flow::fleet::{CacheEvents, LoadReport};
use tasuki_flow::{LegEnd, LegKind, Output};

use crate::time::Time;

/// One report of a worker; legs are named by the request's index and the attempt.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    pub worker: u32,
    pub load: LoadReport,
    pub cache: Option<CacheEvents>,
    pub outputs: Vec<(usize, u32, Output)>,
    pub ended: Vec<(usize, u32, LegEnd)>,
}

/// Something that a shell tells its core, or the core decides.
#[expect(clippy::large_enum_variant, reason = "most of them are reports")]
#[derive(Debug, Clone, PartialEq)]
pub enum ShellEvent {
    Arrived {
        at: Time,
        index: usize,
        prompt_tokens: u32,
        output_tokens: u32,
        chunks: Arc<[u64]>,
        tenant: Arc<str>,
        priority: i32,
    },
    Reported {
        at: Time,
        report: Report,
    },
    Joined {
        at: Time,
        worker: u32,
    },
    Left {
        at: Time,
        worker: u32,
    },
    Drained {
        at: Time,
        worker: u32,
        drain: bool,
    },
    /// A decision: a leg goes to a worker.
    Dispatched {
        at: Time,
        index: usize,
        attempt: u32,
        kind: LegKind,
        worker: u32,
    },
    /// A decision: the request is refused.
    Refused {
        at: Time,
        index: usize,
    },
}

impl ShellEvent {
    pub fn is_decision(&self) -> bool {
        matches!(self, Self::Dispatched { .. } | Self::Refused { .. })
    }
}
