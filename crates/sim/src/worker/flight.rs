//! What runs between two moments at which something changes.

use super::SeqId;
use crate::steps::Work;
use crate::time::Time;

/// One step with prompts in it, or several that only decode the same sequences.
#[derive(Debug, Clone, Default)]
pub struct Flight {
    pub began: Time,
    pub ends: Time,
    pub steps: u64,
    /// Of its first step, and of what lies between that and the next one.
    pub first_s: f64,
    /// What of that is no step.
    pub between_s: f64,
    /// How long before its end the next one is planned.
    pub lead_s: f64,
    /// By which each step is longer than the one before.
    pub longer_s: f64,
    /// Prompts in it, and tokens of each.
    pub chunks: Vec<(SeqId, u32)>,
    /// In its first step.
    pub work: Work,
    /// Sequences that decode in it.
    pub decodes: u32,
}

/// A flight that was cut short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    pub before: u64,
    pub after: u64,
}

impl Flight {
    /// What its first `steps` steps take.
    pub fn seconds(&self, steps: u64) -> f64 {
        let steps = steps as f64;
        steps * self.first_s + self.longer_s * steps * (steps - 1.0) / 2.0
    }

    /// Steps that have ended by then.
    pub fn ended_by(&self, at: Time) -> u64 {
        let passed_s = at.s_since(self.began);
        if passed_s >= self.seconds(self.steps) {
            return self.steps;
        }
        // Of the quadratic; a step may be off by rounding.
        let b = self.first_s - self.longer_s / 2.0;
        let a = self.longer_s / 2.0;
        let root = if a.abs() * passed_s < 1e-9 * b * b {
            passed_s / b
        } else {
            ((b * b + 4.0 * a * passed_s).max(0.0).sqrt() - b) / (2.0 * a)
        };
        let mut steps = (root as u64).min(self.steps);
        while steps > 0 && self.seconds(steps) > passed_s {
            steps -= 1;
        }
        while steps < self.steps && self.seconds(steps + 1) <= passed_s {
            steps += 1;
        }
        steps
    }

    /// Lets it end with the first step that ends at `at` or later; `None`: it does so already.
    pub fn cut(&mut self, at: Time) -> Option<Cut> {
        if self.steps < 2 || at >= self.ends {
            return None;
        }
        let ended = self.ended_by(at);
        let after = if self.began.plus_s(self.seconds(ended)) >= at && ended > 0 {
            ended
        } else {
            ended + 1
        };
        if after >= self.steps {
            return None;
        }
        let before = std::mem::replace(&mut self.steps, after);
        self.ends = self.began.plus_s(self.seconds(after));
        Some(Cut { before, after })
    }
}

/// When the steps that decoded ended, and how long the gaps between tokens were.
#[derive(Debug, Default)]
pub struct TokenLog {
    /// Begin, steps before it, steps, first step's time, growth of it.
    runs: Option<Vec<Run>>,
    /// Gaps in seconds, and between how many pairs of tokens.
    pub gaps: Vec<(f32, u32)>,
}

#[derive(Debug, Clone, Copy)]
struct Run {
    began: Time,
    before: u64,
    steps: u64,
    first_s: f64,
    longer_s: f64,
}

impl TokenLog {
    /// `all`: the time of every token can be asked for.
    pub fn new(all: bool) -> Self {
        Self {
            runs: all.then(Vec::new),
            gaps: Vec::new(),
        }
    }

    /// A flight has decoded, `before` steps after the first.
    pub fn add(&mut self, flight: &Flight, before: u64, newcomers: u32) {
        if flight.decodes == 0 || flight.steps == 0 {
            return;
        }
        let middle_s = flight.first_s + flight.longer_s * (flight.steps - 1) as f64 / 2.0;
        let pairs = flight.steps as u32 * flight.decodes;
        let gap = (middle_s as f32, pairs.saturating_sub(newcomers));
        match self.gaps.last_mut() {
            Some(last) if last.0 == gap.0 => last.1 += gap.1,
            _ => self.gaps.push(gap),
        }
        if let Some(runs) = &mut self.runs {
            runs.push(Run {
                began: flight.began,
                before,
                steps: flight.steps,
                first_s: flight.first_s,
                longer_s: flight.longer_s,
            });
        }
    }

    /// When decode steps `begin + 1` to `end` ended; empty unless all are kept.
    pub fn times(&self, begin: u64, end: u64) -> impl Iterator<Item = Time> + '_ {
        let runs = self.runs.as_deref().unwrap_or_default();
        let first = runs.partition_point(|run| run.before + run.steps <= begin);
        runs[first..]
            .iter()
            .take_while(move |run| run.before < end)
            .flat_map(move |run| {
                let from = begin.max(run.before) - run.before;
                let to = end.min(run.before + run.steps) - run.before;
                (from..to).map(move |step| {
                    let steps = (step + 1) as f64;
                    let s = steps * run.first_s + run.longer_s * steps * (steps - 1.0) / 2.0;
                    run.began.plus_s(s)
                })
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flight(longer_s: f64) -> Flight {
        let mut flight = Flight {
            began: Time::from_s(10.0),
            steps: 20,
            first_s: 0.5,
            longer_s,
            decodes: 3,
            ..Flight::default()
        };
        flight.ends = flight.began.plus_s(flight.seconds(20));
        flight
    }

    #[test]
    fn steps_that_have_ended_are_counted_whatever_their_growth() {
        for longer_s in [0.0, 1e-12, 0.01, -0.001] {
            let flight = flight(longer_s);
            let mut at_s = 0.0;
            for step in 0..20 {
                at_s += 0.5 + longer_s * f64::from(step);
                let (before, after) = (at_s - 1e-3, at_s + 1e-3);
                let ended = [before, after].map(|s| flight.ended_by(Time::from_s(10.0 + s)));
                assert_eq!(ended, [step as u64, step as u64 + 1], "{longer_s}");
            }
        }
    }

    #[test]
    fn a_cut_flight_ends_with_the_step_that_runs() {
        let mut cut = flight(0.0);
        assert_eq!(
            cut.cut(Time::from_s(11.2)),
            Some(Cut {
                before: 20,
                after: 3
            })
        );
        assert_eq!(cut.ends, Time::from_s(11.5));
        assert_eq!(cut.cut(Time::from_s(11.2)), None);
        assert_eq!(cut.cut(Time::from_s(30.0)), None);
    }

    #[test]
    fn tokens_have_the_times_of_their_steps() {
        let mut log = TokenLog::new(true);
        log.add(&flight(0.01), 0, 1);
        log.add(
            &Flight {
                began: Time::from_s(30.0),
                ..flight(0.0)
            },
            20,
            0,
        );
        let times: Vec<f64> = log.times(18, 22).map(Time::as_s).collect();
        let last_s = 10.0 + 20.0 * 0.5 + 0.01 * 190.0;
        assert_eq!(times.len(), 4);
        assert!((times[1] - last_s).abs() < 1e-6, "{times:?}");
        assert!((times[2] - 30.5).abs() < 1e-6);
        assert_eq!(log.gaps[0].1, 59);
    }
}
