//! Names of workers and of the legs on them.

use tasuki_core::{Capabilities, Identity, WorkerId};

/// One connection to one worker. Legs live and die with it, so a worker that
/// went away and came back has another key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerKey {
    pub worker: WorkerId,
    /// Grows with every connection that the shell makes.
    pub connection: u64,
}

/// How the other worker of a handoff reaches a worker.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Peer {
    /// New at every start of the process.
    pub engine_id: String,
    /// Where its peers reach it: host:port, behind which other engines' legs may keep more.
    pub kv_endpoint: String,
}

/// A worker chosen for a leg.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerRef {
    pub key: WorkerKey,
    pub peer: Peer,
    pub capabilities: Capabilities,
    /// Workers of one identity give one answer to a request.
    pub identity: Identity,
}

/// A leg of one request: there is at most one of an attempt on a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LegId {
    pub worker: WorkerKey,
    /// Attempts of a request are counted from 0; both legs of one attempt share the number.
    pub attempt: u32,
}
