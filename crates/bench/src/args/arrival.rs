//! The options that say when requests are sent.

use clap::{Args, ValueEnum};

use super::foreign::refuse_foreign;
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
        use ArrivalKind as K;
        let rate = self.request_rate.filter(|rate| rate.is_finite());
        let kind = self.kind(has_times);
        let has_rate = matches!(kind, K::Constant | K::Poisson | K::Gamma);
        let rates = "--arrival constant, poisson and gamma";
        let ramps = "--request-rate and to --arrival closed";
        let (shape, ramp) = (self.burstiness, self.ramp_s);
        refuse_foreign(
            &named(kind),
            &[
                ("request-rate", rate.is_some() && !has_rate, rates),
                (
                    "burstiness",
                    shape.is_some() && kind != K::Gamma,
                    "--arrival gamma",
                ),
                (
                    "ramp-s",
                    ramp.is_some() && !has_rate && kind != K::Closed,
                    ramps,
                ),
            ],
        )?;
        let needs = |option, example| PlanError::Missing {
            option,
            needed_by: named(kind),
            example,
        };
        let rate = || rate.ok_or_else(|| needs("request-rate", "4"));
        let process = match kind {
            K::AllAtOnce => Process::AllAtOnce,
            K::Closed if self.max_concurrency.is_none() => {
                return Err(needs("max-concurrency", "16"));
            }
            K::Closed => Process::Closed,
            K::Constant => Process::Constant { rate: rate()? },
            K::Poisson => Process::Poisson { rate: rate()? },
            K::Gamma => Process::Gamma {
                rate: rate()?,
                burstiness: shape.ok_or_else(|| needs("burstiness", "0.5"))?,
            },
            K::Trace if !has_times => return Err(needs("workload", "trace")),
            K::Trace => Process::Trace,
        };
        Ok(Arrival {
            process,
            max_concurrency: self.max_concurrency.map(|users| users as usize),
            ramp_s: ramp.unwrap_or_default(),
        })
    }

    /// The kind given, or else the one that the other options mean.
    fn kind(&self, has_times: bool) -> ArrivalKind {
        self.arrival.unwrap_or(match self.request_rate {
            Some(rate) if rate.is_finite() && self.burstiness.is_some() => ArrivalKind::Gamma,
            Some(rate) if rate.is_finite() => ArrivalKind::Poisson,
            None if has_times => ArrivalKind::Trace,
            _ if self.max_concurrency.is_some() => ArrivalKind::Closed,
            _ => ArrivalKind::AllAtOnce,
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
