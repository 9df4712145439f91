//! `tasuki bench serve`: sends a workload to an OpenAI-compatible server and
//! tells what its users would have seen.
//!
//! A [`plan::Workload`] says what to send, an arrival process when; the client
//! sends it and the recorder keeps every time; the summary makes metrics of
//! them, the report rows, and the result file.

pub mod args;
pub mod arrivals;
pub mod client;
pub mod console;
pub mod error;
pub mod fake;
pub mod live;
pub mod load;
pub mod machine;
pub mod options;
pub mod pacer;
pub mod phases;
pub mod plan;
pub mod recorder;
pub mod report;
pub mod result;
mod run;
pub mod seeds;
pub mod serve;
pub mod slo;
pub mod stats;
pub mod summary;
pub mod tokens;
pub mod workload;

pub use run::run;
