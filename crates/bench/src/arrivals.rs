//! When requests are due. Pure: times are offsets from the run's start.
//!
//! A random process is drawn in *operational time*, in which one request
//! arrives per unit on average, and mapped to the clock through the inverse of
//! the number of requests expected by then. That makes a ramp of the rate exact:
//! a ramped Poisson process is the inhomogeneous Poisson process of that rate.

use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Exp1, Gamma};
use serde_json::{Value, json};

use crate::plan::Planned;
use crate::seeds::{Purpose, generator, stream};

/// The law that says when requests are due.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Process {
    /// Every request at the start.
    AllAtOnce,
    /// As many users as `max_concurrency`; each sends when it has its answer.
    Closed,
    /// Every gap is `1 / rate`.
    Constant { rate: f64 },
    /// Exponential gaps: independent users.
    Poisson { rate: f64 },
    /// Gamma gaps of shape `burstiness`; their coefficient of variation is
    /// `1 / sqrt(burstiness)`: 1 is Poisson, less comes in bursts.
    Gamma { rate: f64, burstiness: f64 },
    /// When the workload says ([`Planned::at`]).
    Trace,
}

/// How requests arrive. Rates are requests per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arrival {
    pub process: Process,
    /// Requests in flight at most; always given for [`Process::Closed`].
    pub max_concurrency: Option<usize>,
    /// The rate grows evenly from nothing (closed: users join one by one)
    /// during this time.
    pub ramp_s: f64,
}

impl Arrival {
    /// The `arrival` of a result file.
    #[must_use]
    pub fn describe(&self) -> Value {
        let (kind, rate, burstiness) = match self.process {
            Process::AllAtOnce => ("all_at_once", None, None),
            Process::Closed => ("closed", None, None),
            Process::Constant { rate } => ("constant", Some(rate), None),
            Process::Poisson { rate } => ("poisson", Some(rate), Some(1.0)),
            Process::Gamma { rate, burstiness } => ("gamma", Some(rate), Some(burstiness)),
            Process::Trace => ("trace", None, None),
        };
        json!({
            "kind": kind,
            "rate": rate,
            "burstiness": burstiness,
            "max_concurrency": self.max_concurrency,
            "ramp_s": self.ramp_s,
        })
    }

    /// Whether a request is due when a user is free, rather than at a set time.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.process == Process::Closed
    }

    /// When a user of a closed loop sends its first request; `user` counts from 0.
    #[must_use]
    pub fn user_start(&self, user: usize) -> Duration {
        #[allow(clippy::cast_precision_loss)]
        let share = user as f64 / self.max_concurrency.unwrap_or(1).max(1) as f64;
        Duration::from_secs_f64(self.ramp_s * share.min(1.0))
    }
}

/// The due times of one run, request by request.
#[derive(Debug)]
pub struct Schedule {
    arrival: Arrival,
    generator: ChaCha8Rng,
    /// Operational time of the next request.
    expected: f64,
}

impl Schedule {
    /// The schedule that `seed` draws.
    #[must_use]
    pub fn new(arrival: Arrival, seed: u64) -> Self {
        Self {
            arrival,
            generator: generator(seed, stream(Purpose::Arrivals, 0)),
            expected: 0.0,
        }
    }

    /// When the next request is due; the first of a random process is due at
    /// once. None in a closed loop: when a user is free.
    pub fn due(&mut self, request: &Planned) -> Option<Duration> {
        let rate = match self.arrival.process {
            Process::AllAtOnce => return Some(Duration::ZERO),
            Process::Closed => return None,
            Process::Trace => return Some(request.at.unwrap_or_default()),
            Process::Constant { rate }
            | Process::Poisson { rate }
            | Process::Gamma { rate, .. } => rate,
        };
        let due_s = clock_s(self.expected, rate, self.arrival.ramp_s);
        self.expected += self.gap();
        Some(Duration::from_secs_f64(due_s))
    }

    /// A gap in operational time: of mean 1.
    fn gap(&mut self) -> f64 {
        match self.arrival.process {
            Process::Poisson { .. } => Exp1.sample(&mut self.generator),
            Process::Gamma { burstiness, .. } => match Gamma::new(burstiness, burstiness.recip()) {
                Ok(gamma) => gamma.sample(&mut self.generator),
                Err(_) => 1.0,
            },
            _ => 1.0,
        }
    }
}

/// When `expected` requests are expected, if the rate grows from 0 to `rate`
/// during `ramp_s`: by time t of the ramp, `rate t² / (2 ramp_s)` are.
fn clock_s(expected: f64, rate: f64, ramp_s: f64) -> f64 {
    let during_ramp = rate * ramp_s / 2.0;
    if expected < during_ramp {
        (2.0 * ramp_s * expected / rate).sqrt()
    } else {
        ramp_s + (expected - during_ramp) / rate
    }
}
