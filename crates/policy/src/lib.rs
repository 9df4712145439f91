//! Where a request runs. Pure: time and randomness are arguments.

#![deny(clippy::disallowed_methods)]

pub mod config;
pub mod error;
pub mod placement;
pub mod policy;
pub mod simple;
mod why;

pub use config::PolicyConfig;
pub use error::NoPlacement;
pub use placement::{Choosing, Placement, WorkerIndex};
pub use policy::{Policy, PolicyKind};
pub use simple::{Rule, SimplePolicy};
pub use why::{Cost, Other, Why};
