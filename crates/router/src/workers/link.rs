//! The border between the router and one worker's protocol.

use tasuki_core::Role;
use tasuki_flow::fleet::LegSlot;
use tasuki_flow::{LegId, LegSpec, Peer};

use super::local_leg::LocalLeg;

/// A leg that is to be started.
#[derive(Debug, Clone, Copy)]
pub struct NewLeg<'a> {
    pub id: LegId,
    /// Unique on the connection; both legs of an attempt have the same.
    pub name: &'a str,
    /// Its number counts the connection's legs, in the order in which they are started.
    pub slot: LegSlot,
}

/// Sends messages to one connected worker, in its own protocol.
///
/// Nothing here waits or fails: if the worker is gone, the task of the connection reports its loss to
/// the registry, which also takes what the worker sends.
pub trait WorkerLink: Send + Sync {
    /// Starts a leg, or gives it back to be run by its request's task, which then aborts it too.
    fn dispatch(&self, leg: NewLeg<'_>, spec: LegSpec) -> Option<LocalLeg>;

    /// Aborts choices of a leg, or all if there are none in the list.
    fn abort(&self, name: &str, choices: Vec<u32>);

    /// Lets a prefill leg hand over to another decode worker.
    fn retarget(&self, name: &str, peer: Peer);

    /// Gives the worker another role; it reports it when it has it. It ignores an `epoch`
    /// that is not later than that of its role. `owner`: who sets it.
    fn set_role(&self, role: Role, owner: &str, epoch: u64);

    /// Lets the worker tell all of its prefix cache again: events were missed.
    fn resync_cache(&self);

    /// Lets the worker empty its prefix cache, before what is sent after this. False: it has no
    /// such message.
    fn flush_cache(&self) -> bool;
}
