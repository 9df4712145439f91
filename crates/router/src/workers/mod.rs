//! The workers: a link to each, and the registry of what is known of them.
//!
//! ```text
//!  addresses ──follow──▶ (workers added and removed)
//!  connect (one task per worker) ──reports──▶ Registry ──inputs──▶ tasks of the requests
//!                                              │   ▲
//!        worker ◀──WorkerLink── messages ──────┘   └── place, dispatch, abort
//! ```
//!
//! The registry's one mutex is never held across an await. What a token needs it for is to be
//! counted; to its request it finds its way by a lock of its worker's connection.

mod admission;
mod cache;
mod catalog;
mod collector;
mod connect;
mod connection;
pub mod foreign;
mod grpc_link;
mod legs;
mod link;
mod local_leg;
mod membership;
mod placing;
mod registry;
mod roles;
#[cfg(test)]
pub mod testing;
#[cfg(test)]
mod tests;
mod wire;

pub use catalog::Catalog;
pub use collector::WorkerCollector;
pub use connect::{Dialling, Liveness};
#[cfg(test)]
pub use connection::Joined;
pub use legs::Dispatched;
#[cfg(test)]
pub use legs::Report;
pub use local_leg::LocalLeg;
pub use membership::follow;
pub use registry::{Known, Registry};
pub use roles::{RolesMode, RolesSettings};

/// What the fuzzing tests read messages with.
#[cfg(test)]
pub mod fuzzed {
    pub use super::wire::{info as info_from_wire, report as report_from_wire};
}
