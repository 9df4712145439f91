//! What a request does from its first placement to its last token, and what is known of
//! the workers meanwhile. No protocol, no runtime, no clock, no lock.
//!
//! ```text
//!                ┌──────────── a shell: the router, a simulator ────────────┐
//!                │  client                                        workers   │
//!                └────┬──────────────────────────────────────────────┬──────┘
//!        Input (Stop) │ ▲ Effect (Emit)            Input (Output, …) │ ▲ Effect (Dispatch, …)
//!                     ▼ │                                            ▼ │
//!                  Machine: one per request  ── place ──▶  FleetState: one per shell
//! ```
//!
//! A shell converts its protocol's messages into the types here ([`generation`], [`leg`],
//! [`fleet`]), passes the time in, and carries out the effects. Times of a [`Machine`] are
//! durations since its request arrived; times of a [`FleetState`] are durations since the
//! shell started.

#![deny(clippy::disallowed_methods)]

pub mod admission;
pub mod budget;
pub mod fleet;
pub mod generation;
pub mod leg;
pub mod machine;
pub mod opaque;
pub mod roles;
pub mod sampling;
#[cfg(test)]
mod testing;
pub mod worker_ref;

pub use admission::AdmissionConfig;
pub use budget::{BudgetConfig, RetryBudget};
pub use fleet::FleetState;
pub use generation::{Event, Finish, Generation, ServeError, Timings};
pub use leg::{Handoff, LegEnd, LegEndReason, LegKind, LegSpec, LegTimings, Output, Ticket};
pub use machine::{Effect, Fleet, Input, Machine, MachineConfig, OnKvLoss, Placed, RetryReason};
pub use opaque::{Opaque, OpaqueRequest};
pub use sampling::{Grammar, SamplingParams, TokenLogprob, TopLogprob};
pub use worker_ref::{LegId, Peer, WorkerKey, WorkerRef};
