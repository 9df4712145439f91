//! A deployment in simulated time: the router's own core ([`tasuki_flow`] and its policies: the
//! state machine of requests, placement, admission, retries, drains) before workers that are
//! models of steps, over links that are shared.
//!
//! ```text
//!  Clients ──▶ World ──▶ FleetState, Admission, Machine: the core, as the router drives it
//!                │ ▲
//!                ▼ │ reports
//!             Worker: the scheduler's rules, a StepModel ──▶ Network: the KV's way
//! ```
//!
//! Nothing of the core is written again here, so a decision is the router's. What is modelled is
//! what the core cannot know: how long steps take, when blocks run out, how KV moves. Events are
//! changes: steps that only decode the same sequences are one event, however many they are.
//!
//! Without runtime, protocol and clock; the same configuration and requests give the same run.

#![deny(clippy::disallowed_methods)]

mod client;
mod config;
mod link;
mod prompt_threshold;
mod roles;
pub mod steps;
mod time;
mod worker;
mod world;

pub use client::{Clients, Outcome, Request};
pub use config::{Config, Fault, FaultKind};
pub use link::{LinkSpec, NetworkSpec};
pub use roles::{RoleChange, Roles, Thresholds};
pub use time::Time;
pub use worker::{Counters, Limits, WorkerConfig};
pub use world::{Report, Run, ShellEvent, simulate, worker_info};
