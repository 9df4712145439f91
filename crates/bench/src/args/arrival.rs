//! The options that say when requests are sent.

use clap::{Args, ValueEnum};

use super::values::{factor, rate, seconds};
use crate::arrivals::{Arrival, Process};
use crate::error::PlanError;

/// The words for [`Process`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ArrivalKind {
    /// Every request at the start: how fast is the server if it never waits for work?
    AllAtOnce,
    /// Closed loop: --max-concurrency users, each of whom sends when its last request is
    /// answered. The rate then follows the server, so a slow server looks better than it is.
    Closed,
    /// Open loop: a request every 1 / --request-rate seconds.
    Constant,
    /// Open loop: exponential gaps, as many independent users make them.
    Poisson,
    /// Open loop: gamma gaps; see --burstiness.
    Gamma,
    /// When the trace says.
    Trace,
}

/// When requests are sent.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Arrivals")]
pub struct ArrivalArgs {
    /// How requests arrive. Default: trace for --workload trace; with --request-rate poisson, or
    /// gamma if --burstiness is given; with --max-concurrency alone closed; else all-at-once.
    #[arg(long, value_enum, value_name = "KIND")]
    pub arrival: Option<ArrivalKind>,

    /// Mean requests (of conversations: first turns) per second; inf sends all at once.
    #[arg(long, value_name = "PER_SECOND", value_parser = rate)]
    pub request_rate: Option<f64>,

    /// Shape of gamma gaps, whose coefficient of variation is 1 / sqrt(BURSTINESS): 1 is Poisson,
    /// less comes in bursts, more is steadier.
    #[arg(long, value_parser = factor)]
    pub burstiness: Option<f64>,

    /// Requests in flight at most. In an open loop, one over the limit waits, and its wait
    /// counts in TTFT and shows as client queue.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_concurrency: Option<u32>,

    /// Reach the rate (closed: the number of users) evenly during this time instead of at once;
    /// a start in one burst inflates the high percentiles of TTFT.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub ramp_s: Option<f64>,
}

impl ArrivalArgs {
    /// The arrival process. `has_times`: the workload says itself when requests are due.
    ///
    /// # Errors
    /// [`PlanError::Missing`], [`PlanError::Foreign`].
    pub fn arrival(&self, has_times: bool) -> Result<Arrival, PlanError> {
        let rate = self.request_rate.filter(|rate| rate.is_finite());
        let kind = self.arrival.unwrap_or(match (rate, self.burstiness) {
            (Some(_), Some(_)) => ArrivalKind::Gamma,
            (Some(_), None) => ArrivalKind::Poisson,
            (None, _) if has_times && self.request_rate.is_none() => ArrivalKind::Trace,
            (None, _) if self.max_concurrency.is_some() => ArrivalKind::Closed,
            (None, _) => ArrivalKind::AllAtOnce,
        });
        let has_rate = matches!(
            kind,
            ArrivalKind::Constant | ArrivalKind::Poisson | ArrivalKind::Gamma
        );
        let is_closed = kind == ArrivalKind::Closed;
        let belongs = |option, given: bool, is_allowed: bool, belongs_to| {
            if given && !is_allowed {
                let chosen = named(kind);
                return Err(PlanError::Foreign {
                    option,
                    chosen,
                    belongs_to,
                });
            }
            Ok(())
        };
        belongs(
            "request-rate",
            rate.is_some(),
            has_rate,
            "--arrival constant, poisson and gamma",
        )?;
        let is_gamma = kind == ArrivalKind::Gamma;
        belongs(
            "burstiness",
            self.burstiness.is_some(),
            is_gamma,
            "--arrival gamma",
        )?;
        let ramps = has_rate || is_closed;
        let belongs_to = "--request-rate and to --arrival closed";
        belongs("ramp-s", self.ramp_s.is_some(), ramps, belongs_to)?;
        belongs(
            "arrival trace",
            kind == ArrivalKind::Trace,
            has_times,
            "--workload trace",
        )?;
        let needs = |option, example| PlanError::Missing {
            option,
            needed_by: named(kind),
            example,
        };
        let needed_rate = || rate.ok_or_else(|| needs("request-rate", "4"));
        let process = match kind {
            ArrivalKind::AllAtOnce => Process::AllAtOnce,
            ArrivalKind::Closed if self.max_concurrency.is_none() => {
                return Err(needs("max-concurrency", "16"));
            }
            ArrivalKind::Closed => Process::Closed,
            ArrivalKind::Constant => Process::Constant {
                rate: needed_rate()?,
            },
            ArrivalKind::Poisson => Process::Poisson {
                rate: needed_rate()?,
            },
            ArrivalKind::Gamma => Process::Gamma {
                rate: needed_rate()?,
                burstiness: self.burstiness.ok_or_else(|| needs("burstiness", "0.5"))?,
            },
            ArrivalKind::Trace => Process::Trace,
        };
        Ok(Arrival {
            process,
            max_concurrency: self.max_concurrency.map(|users| users as usize),
            ramp_s: self.ramp_s.unwrap_or_default(),
        })
    }
}

fn named(kind: ArrivalKind) -> String {
    let name = kind.to_possible_value();
    let name = name
        .as_ref()
        .map_or_else(String::new, |name| name.get_name().to_owned());
    format!("--arrival {name}")
}
