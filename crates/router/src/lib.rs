//! The OpenAI front: owns text, places requests, streams tokens.
//!
//! `openai/` speaks HTTP and text, `serve/` places and follows requests,
//! `workers/` speaks to workers. `serve::api` is the border between the first
//! two.

mod app;
mod error;
mod gate;
mod openai;
#[cfg(test)]
mod openai_tests;
#[cfg(test)]
mod testing;
pub mod serve;
mod workers;
