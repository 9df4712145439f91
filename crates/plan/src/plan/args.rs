//! The command line of `tasuki plan`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser};
use tasuki_bench::args::WorkloadArgs;
use tasuki_bench::slo::Slo;

use crate::args::{HardwareArgs, above_zero, share};
use crate::error::SimulateError;

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
    /// Request log of a router (--request-log), whose requests are the workload: lengths, what
    /// prompts share, and the pattern of arrivals. Without --steps, --rates or --gpu, workers are
    /// as fast as it says.
    #[arg(long, value_name = "LOG")]
    pub from: Option<PathBuf>,

    /// Objectives of a request, such as ttft=1s,tpot=30ms; both are needed.
    #[arg(long)]
    pub slo: Slo,

    /// GPUs (with --steps and --rates: workers) to divide among the roles.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub gpus: u32,

    /// Share of the requests that must meet the objectives.
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, value_parser = share)]
    pub attainment: f64,

    /// Requests a second that are expected, every turn of a conversation: the plan says what they
    /// see [default: 80% of the highest rate of the best design; with --from: as logged].
    #[arg(long, value_name = "PER_SECOND", value_parser = above_zero)]
    pub request_rate: Option<f64>,

    /// Leave out designs whose workers may do another role's work. Otherwise each is tried with strict
    /// roles and without.
    #[arg(long)]
    pub strict_roles: bool,

    /// What a GPU costs an hour, for the cost of a million output tokens: KIND=PER_HOUR with the name
    /// of --gpu, such as h200=3.5, or a number for any.
    #[arg(long, value_name = "KIND=PER_HOUR")]
    pub price: Option<Price>,

    /// GPUs on one machine.
    #[arg(long, value_name = "N", default_value_t = 8,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub gpus_per_host: u32,

    /// Designs that are simulated.
    #[arg(long, value_name = "N", default_value_t = 12,
          value_parser = clap::value_parser!(u32).range(1..=200))]
    pub designs: u32,

    /// Requests of one simulated run at least; up to 4 times as many, so that it lasts 20 times
    /// the TTFT objective. A run fails if more and more of its requests wait.
    #[arg(long, value_name = "N", default_value_t = 2_000,
          value_parser = clap::value_parser!(u32).range(50..=100_000))]
    pub probe_requests: u32,

    /// Take a fraction of a second: at most 4 designs, short runs, one size of step, and none of what
    /// --no-variations leaves out. `tasuki serve` plans so. It is for choosing a design: rates
    /// can be a quarter too high.
    #[arg(long)]
    pub quick: bool,

    /// Do not look at what would change the answer, or at lost workers.
    #[arg(long)]
    pub no_variations: bool,

    /// Write the plan as JSON.
    #[arg(long, short, value_name = "PATH")]
    pub output: Option<PathBuf>,

    /// Write values for the Helm chart (deploy/helm/tasuki) that start the best design, if one
    /// meets the objectives.
    #[arg(long, value_name = "PATH")]
    pub values: Option<PathBuf>,

    /// Draw the designs, the Pareto front and the design that was chosen: a file that ends in .png or
    /// .html.
    #[arg(long, value_name = "PATH", requires = "output")]
    pub plot: Option<PathBuf>,
}

impl GoalArgs {
    /// # Errors
    ///
    /// Two files have one path.
    pub fn refuse_one_path(&self) -> Result<(), SimulateError> {
        let paths = [
            ("--output", &self.output),
            ("--values", &self.values),
            ("--plot", &self.plot),
        ];
        let mut given = paths
            .iter()
            .filter_map(|(name, path)| Some((*name, path.as_ref()?)));
        while let Some((first, path)) = given.next() {
            if let Some((second, _)) = given.clone().find(|(_, other)| *other == path) {
                let path = path.clone();
                return Err(SimulateError::OnePath {
                    first,
                    second,
                    path,
                });
            }
        }
        Ok(())
    }
}

/// What a GPU costs.
#[derive(Debug, Clone, PartialEq)]
pub struct Price {
    /// Empty: any.
    pub kind: String,
    pub per_hour: f64,
}

impl Price {
    /// Whether it is what hardware of this name costs: an `h20` is no `h200`, an `l4` no `l40s`.
    pub fn is_of(&self, name: &str) -> bool {
        let (kind, name) = (self.kind.to_lowercase(), name.to_lowercase());
        let mut places = name.match_indices(&kind);
        places.any(|(at, _)| {
            let next = name[at + kind.len()..].chars().next();
            kind.is_empty() || next.is_none_or(|next| !next.is_alphanumeric() || next == 'x')
        })
    }
}

impl FromStr for Price {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        let (kind, number) = given.rsplit_once('=').unwrap_or(("", given));
        match number.trim().parse::<f64>() {
            Ok(per_hour) if per_hour > 0.0 && per_hour.is_finite() => Ok(Self {
                kind: kind.trim().to_owned(),
                per_hour,
            }),
            _ => Err(format!(
                "{number:?} must be a number above 0, such as h200=3.5"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_price_is_of_hardware_that_has_its_whole_name() {
        let is_of = |price: &str, name| price.parse::<Price>().unwrap().is_of(name);
        for name in ["h200 x1", "NVIDIA H200", "2xH200x2 chat"] {
            assert!(is_of("h200=3.5", name) && is_of("3.5", name), "{name}");
            assert!(
                !is_of("h20=3.5", name) && !is_of("h100=3.5", name),
                "{name}"
            );
        }
        assert!(is_of("l40s=1", "NVIDIA L40S") && !is_of("l4=1", "l40s x2"));
        assert!(!is_of("a10=1", "a100 x1") && is_of("a10=1", "NVIDIA A10, not A100"));
    }
}
