//! Requests for workers of other engines, vLLM and SGLang, which have the text side: they pass
//! through as they are.
//!
//! ```text
//!  client ──HTTP──▶ serve ──Opaque(ForeignRequest)──▶ Machine ──▶ workers/foreign ──HTTP──▶ worker
//!         ◀──────── answer ◀────Opaque(Answer)─────── frames ◀──        leg       ◀────────
//! ```

mod answer;
mod engines;
pub mod estimate;
pub mod events;
mod indivisible;
pub mod native;
pub mod object;
pub mod request;
mod resume;
mod serve;
pub mod template;
#[cfg(test)]
mod tests;

pub use serve::{Incoming, serve};
