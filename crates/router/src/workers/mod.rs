//! The workers: one stream to each, and one registry of what is known of them.
//!
//! ```text
//!  link (one task per worker) ──reports──▶ Registry ──mail──▶ requests' tasks
//!        ▲                                    │ ▲
//!        └────── messages to the worker ──────┘ └── place, submit, send
//! ```
//!
//! The registry's one mutex is held for short, never across an await.

mod collector;
mod key;
mod link;
mod mail;
mod registry;
mod slot;
#[cfg(test)]
pub mod testing;
#[cfg(test)]
mod tests;

pub use collector::WorkerCollector;
pub use key::{Seat, WorkerKey};
pub use link::{Liveness, keep_connected};
pub use mail::Mail;
pub use registry::{NotReady, Registry};
