//! Workers of other engines: watched and asked by HTTP.
//!
//! ```text
//!  watch ──health, models, metrics──▶ worker          one task for each worker
//!  leg   ──request, answer──────────▶ worker          in the request's task
//! ```
//!
//! `vllm` and `sglang` know what each engine needs of a request to hand its KV over.

mod client;
mod exchange;
mod forward;
mod identify;
mod leg;
mod parts;
mod prometheus;
mod ranks;
mod recomputed;
mod release;
mod scrape;
mod sglang;
mod vllm;
mod watch;

pub use client::Client;
#[cfg(feature = "otel")]
pub use client::collect;
pub use identify::UNKNOWN_CONTEXT;
pub use recomputed::{Recomputed, RecomputedCounts};
pub use sglang::{MODEL_INFO, SERVER_INFO};
pub use watch::keep_watched;

/// What the fuzzing tests read answers with.
#[cfg(test)]
pub mod fuzzed {
    pub use super::forward::first_error;
    pub use super::sglang::{merge, merge_events, prompt_logprobs};
    pub use super::vllm::ticket;
}
