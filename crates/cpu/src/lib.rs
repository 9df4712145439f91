//! The forward pass of Llama-family models on the CPU, in bfloat16: one call a step.
//!
//! Weights are packed once (`x86/panels.rs`); a step's embedding, norms, products,
//! rotation, cache, attention and logits are then one run of a team of threads
//! (`team.rs`, `x86/forward.rs`). Where the processor cannot, `why_not` says so and
//! there is no `Model` to be had.

// What only the kernels use is there, unused, without them.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]

mod batch;
mod error;
mod greedy;
mod memory;
mod shape;
mod team;
#[cfg(test)]
mod testing;
#[cfg(not(target_arch = "x86_64"))]
mod unavailable;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use batch::{Batch, Pool};
pub use error::CpuError;
pub use greedy::greedy;
pub use shape::{LayerWeights, Shape};
#[cfg(not(target_arch = "x86_64"))]
pub use unavailable::{Model, Product, supported};
#[cfg(target_arch = "x86_64")]
pub use x86::{Model, Product, supported};

/// Why a model cannot run here; `None`: it can.
pub fn why_not(shape: &Shape) -> Option<String> {
    supported().or_else(|| shape.why_not())
}
