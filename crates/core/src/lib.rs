//! What router, simulator and benchmark agree on: who workers and requests are,
//! what work costs, how blocks are named, how options are read. No I/O, no clock, no randomness.

#![deny(clippy::disallowed_methods)]

pub mod block_hash;
pub mod capabilities;
pub mod chunks;
pub mod cost;
pub mod failure;
pub mod ids;
pub mod mix;
pub mod options;
pub mod request;
pub mod worker;

pub use block_hash::{BlockHash, BlockHasher, block_hashes};
pub use capabilities::{Capabilities, FirstToken, HandoffKind, Payload, Positions, RoleUse};
pub use chunks::{ChunkScheme, Chunks};
pub use cost::{
    ChunkFit, CostConfig, CostModel, Forecast, Hardware, HardwareClass, Links, Load, Price, Rates,
    StepFit, StepSample,
};
pub use failure::{FailureKind, Retry};
pub use ids::{Identity, KvDomain, ModelId, Role, WorkerId};
pub use mix::mix;
pub use request::{Indivisible, RequestView, Warm};
pub use worker::{Capacity, Health, Outstanding, ReportedLoad, WorkerView};
