//! What is sent: one file per kind of workload.
//!
//! Everything about a request (its tokens, its lengths) is a function of the
//! seed and its index, so neither arrivals nor the order of answers change it.

pub mod decode_only;
pub mod lengths;
mod lines;
pub mod multi_turn;
pub mod plan;
pub mod prompts;
pub mod random;
#[cfg(test)]
mod testing;
pub mod trace;

pub use plan::{Shape, WorkloadPlan};

use crate::tokens::PromptMaker;

/// What every synthetic workload is made with.
#[derive(Debug)]
pub struct Making {
    pub maker: PromptMaker,
    pub seed: u64,
    pub requests: usize,
    /// Whether answers have all their tokens, or end by themselves.
    pub exact_output: bool,
}
