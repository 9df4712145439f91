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
        match self.arrival.process {
            Process::AllAtOnce => return Some(Duration::ZERO),
            Process::Closed => return None,
            Process::Trace => return Some(request.at.unwrap_or_default()),
            Process::Constant { .. } | Process::Poisson { .. } | Process::Gamma { .. } => {}
        }
        let due_s = self.next_s()?;
        self.expected += self.gap();
        Some(Duration::from_secs_f64(due_s))
    }

    /// Seconds to the end of the next gap of a process that has a rate.
    pub fn gap_ends(&mut self) -> Option<f64> {
        self.expected += self.gap();
        self.next_s()
    }

    /// When the next request of such a process is due.
    fn next_s(&self) -> Option<f64> {
        match self.arrival.process {
            Process::Constant { rate }
            | Process::Poisson { rate }
            | Process::Gamma { rate, .. } => {
                Some(clock_s(self.expected, rate, self.arrival.ramp_s))
            }
            Process::AllAtOnce | Process::Closed | Process::Trace => None,
        }
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;

    use super::*;
    use crate::plan::Prompt;

    const REQUESTS: usize = 40_000;

    fn planned(at: Option<Duration>) -> Planned {
        Planned {
            index: 0,
            prompt: Prompt::Text(String::new()),
            input_tokens: None,
            output_tokens: 1,
            exact_output: true,
            at,
        }
    }

    fn arrival(process: Process, ramp_s: f64) -> Arrival {
        Arrival {
            process,
            max_concurrency: None,
            ramp_s,
        }
    }

    /// When the requests of a process are due, in seconds.
    fn due_s(process: Process, ramp_s: f64, requests: usize) -> Vec<f64> {
        let mut schedule = Schedule::new(arrival(process, ramp_s), 5);
        let mut due = || schedule.due(&planned(None)).unwrap().as_secs_f64();
        (0..requests).map(|_| due()).collect()
    }

    /// Mean and coefficient of variation of the gaps.
    #[allow(clippy::cast_precision_loss)]
    fn gaps(due_s: &[f64]) -> (f64, f64) {
        let gaps: Vec<f64> = due_s.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(gaps.iter().all(|gap| *gap >= 0.0));
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        (mean, variance.sqrt() / mean)
    }

    #[test]
    fn gaps_have_the_mean_and_the_variation_of_their_law() {
        let rate = 20.0;
        let laws = [
            (Process::Poisson { rate }, 1.0),
            (
                Process::Gamma {
                    rate,
                    burstiness: 1.0,
                },
                1.0,
            ),
            (
                Process::Gamma {
                    rate,
                    burstiness: 0.25,
                },
                2.0,
            ),
            (
                Process::Gamma {
                    rate,
                    burstiness: 4.0,
                },
                0.5,
            ),
        ];
        for (process, variation) in laws {
            let (mean, measured) = gaps(&due_s(process, 0.0, REQUESTS));
            // Four standard errors of the mean: 4 CV / sqrt(40,000) of 1 / rate.
            let bound = 0.02 * variation;
            assert!((mean * rate - 1.0).abs() < bound, "{process:?}: {mean}");
            assert!(
                (measured / variation - 1.0).abs() < 0.05,
                "{process:?}: {measured}"
            );
        }
    }

    #[test]
    fn a_constant_rate_does_not_drift() {
        let due = due_s(Process::Constant { rate: 8.0 }, 0.0, REQUESTS);
        assert_eq!(&due[..3], [0.0, 0.125, 0.25]);
        assert_eq!(due[REQUESTS - 1], 39_999.0 / 8.0);
    }

    #[test]
    fn a_ramp_reaches_the_rate_evenly() {
        let due = due_s(Process::Constant { rate: 100.0 }, 10.0, 2_000);
        let by = |t: f64| due.iter().filter(|due| **due < t).count();
        // rate t² / (2 ramp): 5 by 1 s, 125 by 5 s, 500 by 10 s; then 100 per second.
        assert_eq!([by(0.999), by(4.999), by(9.999)], [5, 125, 500]);
        assert_eq!((by(14.999), by(19.999)), (1_000, 1_500));
        let poisson = due_s(Process::Poisson { rate: 100.0 }, 10.0, 2_000);
        let by = |t: f64| poisson.iter().filter(|due| **due < t).count();
        assert!(by(5.0).abs_diff(125) < 50, "{}", by(5.0));
        assert!(by(10.0).abs_diff(500) < 100, "{}", by(10.0));
    }

    #[test]
    fn traces_bursts_and_users_are_due_as_they_say() {
        let mut trace = Schedule::new(arrival(Process::Trace, 0.0), 5);
        let at = Duration::from_millis(1_500);
        assert_eq!(trace.due(&planned(Some(at))), Some(at));
        assert_eq!(due_s(Process::AllAtOnce, 0.0, 3), [0.0, 0.0, 0.0]);
        let closed = Arrival {
            max_concurrency: Some(4),
            ..arrival(Process::Closed, 2.0)
        };
        assert_eq!(Schedule::new(closed, 5).due(&planned(None)), None);
        let starts: Vec<f64> = (0..5)
            .map(|user| closed.user_start(user).as_secs_f64())
            .collect();
        assert_eq!(starts, [0.0, 0.5, 1.0, 1.5, 2.0]);
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: tasuki_searches::count(256),
            failure_persistence: None,
            rng_seed: RngSeed::Fixed(tasuki_searches::seed(7)),
            ..ProptestConfig::default()
        })]

        #[test]
        fn due_times_are_finite_and_in_order(
            rate in 1e-3..1e6, burstiness in 1e-3..1e6, ramp_s in 0.0..604_800.0, seed in 0..9_u64
        ) {
            for process in [
                Process::Constant { rate },
                Process::Poisson { rate },
                Process::Gamma { rate, burstiness },
            ] {
                let mut schedule = Schedule::new(arrival(process, ramp_s), seed);
                let mut before = Duration::ZERO;
                for _ in 0..200 {
                    let due = schedule.due(&planned(None)).unwrap();
                    prop_assert!(due >= before);
                    before = due;
                }
            }
        }
    }

    #[test]
    fn the_description_has_every_key() {
        let gamma = Process::Gamma {
            rate: 2.0,
            burstiness: 0.5,
        };
        let expected = json!({"kind": "gamma", "rate": 2.0, "burstiness": 0.5,
            "max_concurrency": null, "ramp_s": 3.0});
        assert_eq!(arrival(gamma, 3.0).describe(), expected);
        let closed = Arrival {
            max_concurrency: Some(4),
            ..arrival(Process::Closed, 0.0)
        };
        let expected = json!({"kind": "closed", "rate": null, "burstiness": null,
            "max_concurrency": 4, "ramp_s": 0.0});
        assert_eq!(closed.describe(), expected);
    }
}
