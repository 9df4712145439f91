//! The OpenAI front: owns text, places requests, streams tokens.
//!
//! `openai/` speaks HTTP and text, `serve/` places and follows requests,
//! `workers/` speaks to workers, `discovery/` says where they are,
//! `admin` shows and directs them, `dashboard` is a page for people. `serve::api` is the border between the first
//! two. [`run`] is the process.

mod access_log;
mod admin;
mod alarm;
mod api_keys;
mod app;
mod attached;
mod config;
mod connections;
mod dashboard;
mod discovery;
mod error;
mod event_body;
mod foreign;
#[cfg(test)]
mod fuzz_tests;
mod gate;
mod grammar;
mod health_generate;
mod heartbeat;
mod log;
mod metrics;
mod models;
mod openai;
mod operators;
mod pool;
mod request_log;
mod routes;
mod run;
mod serve;
#[cfg(test)]
mod testing;
mod tls;
mod traces;
mod woken;
mod workers;

pub use run::run;
