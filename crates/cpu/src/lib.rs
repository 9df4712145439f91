//! The forward pass of Llama-family models on the CPU: one call a step.
//!
//! Weights are packed once (`kernels/panels.rs`); a step's embedding, norms, GEMMs,
//! rotation, cache, attention and logits are then one run of a team of threads
//! (`team.rs`, `kernels/forward.rs`). The kernels are written once (`kernels/`) over vectors
//! of several processors (`simd/`), and `Instance::best` is what this processor runs.

mod batch;
mod error;
mod greedy;
mod kernels;
mod memory;
mod model;
mod shape;
mod simd;
mod team;
#[cfg(test)]
mod testing;

pub use batch::{Batch, Pool};
pub use error::CpuError;
pub use greedy::greedy;
pub use kernels::{Format, Linear};
pub use model::Model;
pub use shape::{LayerWeights, Shape};
pub use simd::Instance;
