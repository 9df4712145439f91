//! The command line of `tasuki plan`.

use std::path::PathBuf;

use clap::{Args, Parser};
use tasuki_bench::args::WorkloadArgs;
use tasuki_bench::slo::Slo;

use crate::args::HardwareArgs;

/// Says which topology serves a workload best within objectives: a first estimate of every design,
/// then a simulation of the best ones.
#[derive(Debug, Clone, Parser)]
#[command(name = "tasuki plan", version)]
pub struct PlanArgs {
    #[command(flatten)]
    pub goal: GoalArgs,
    #[command(flatten)]
    pub hardware: HardwareArgs,
    #[command(flatten)]
    pub workload: WorkloadArgs,
}

/// What is asked for.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Plan")]
pub struct GoalArgs {
    /// Objectives of a request, such as ttft=1s,tpot=30ms; both are needed.
    #[arg(long)]
    pub slo: Slo,

    /// GPUs (with --steps and --rates: workers) to divide among the roles.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub gpus: u32,

    /// Share of the requests that must meet the objectives.
    #[arg(long, value_name = "SHARE", default_value_t = 0.9)]
    pub attainment: f64,

    /// Requests a second that are expected: the plan says what they see [default: 80% of the
    /// highest rate of the best design].
    #[arg(long, value_name = "PER_SECOND")]
    pub request_rate: Option<f64>,

    /// GPUs on one machine.
    #[arg(long, value_name = "N", default_value_t = 8,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub gpus_per_host: u32,

    /// Designs that are simulated.
    #[arg(long, value_name = "N", default_value_t = 12,
          value_parser = clap::value_parser!(u32).range(1..=200))]
    pub designs: u32,

    /// Requests of one simulated run at least; up to ten times as many, so that it lasts 20 times
    /// the TTFT objective.
    #[arg(long, value_name = "N", default_value_t = 400,
          value_parser = clap::value_parser!(u32).range(50..=100_000))]
    pub probe_requests: u32,

    /// Do not look at what would change the answer.
    #[arg(long)]
    pub no_variations: bool,

    /// Write the plan as JSON.
    #[arg(long, short, value_name = "PATH")]
    pub output: Option<PathBuf>,
}
