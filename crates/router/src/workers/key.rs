//! Who a leg was given to.

use tasuki_core::WorkerId;
use tasuki_wire::v1;

/// One connection to one worker. Legs live and die with it, so a worker that
/// went away and came back is another key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerKey {
    pub worker: WorkerId,
    /// Grows with every connection that the router makes.
    pub connection: u64,
}

/// A worker chosen for a leg, and how its peers reach it.
#[derive(Debug, Clone, PartialEq)]
pub struct Seat {
    pub key: WorkerKey,
    pub peer: v1::Peer,
}
