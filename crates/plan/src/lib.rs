//! `tasuki simulate` and `tasuki plan`: a workload of `tasuki bench serve` before a deployment in simulated time.
//!
//! The options become a [`tasuki_sim::Config`] and a source of requests; what comes back becomes
//! the report and the result file of `tasuki bench serve`.

mod args;
mod clients;
mod deployment;
mod error;
mod faults;
mod hardware;
mod model_config;
mod plan;
mod replay;
mod result;
mod simulate;
mod steps_file;

pub use plan::{STEP_SHARE, plan_quietly, run_plan};
pub use simulate::run_simulate;
