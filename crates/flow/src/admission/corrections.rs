//! How far forecasts are off, learnt from what happened.

use std::time::Duration;

/// What happened counts for so many seconds.
const MEMORY_S: f64 = 2.5;
/// A new forecast leaves at least this share of the older ones: for first tokens, and for times per
/// token.
pub(super) const TTFT_KEPT: f64 = 0.98;
pub(super) const TPOT_KEPT: f64 = 0.95;
/// Forecasts that fail by more say nothing about the next one.
const MOST: f64 = 8.0;

/// So many forecasts are taken as right before the first is checked: it may have been made before
/// the costs were learnt, which it must not correct once more.
const TRUSTED: f64 = 5.0;

/// The 95th percentile of a normal distribution, in standard deviations above the mean.
pub(crate) const P95: f64 = 1.64;
/// The standard deviation before anything is learnt, as a share of the mean.
const PRIOR_DEVIATION: f64 = 0.08;
/// A time that is longer than this many means is an outlier: its request is late whatever else is
/// let in.
const OUTLIER: f64 = 1.5;

/// What happened for each second forecast.
#[derive(Debug, Clone, Copy)]
pub(super) struct Correction {
    least_kept: f64,
    /// When it was learnt last.
    at: Duration,
    forecast_s: f64,
    happened_s: f64,
    /// The squares of the ratios of the two, weighted by the forecast.
    squares_s: f64,
}

impl Correction {
    pub fn new(least_kept: f64) -> Self {
        Self {
            least_kept,
            at: Duration::ZERO,
            forecast_s: 0.0,
            happened_s: 0.0,
            squares_s: 0.0,
        }
    }

    pub fn learn(&mut self, forecast_s: f64, happened_s: f64, now: Duration) {
        if forecast_s <= 0.0 {
            return;
        }
        if self.forecast_s == 0.0 {
            (self.forecast_s, self.happened_s) = (TRUSTED * forecast_s, TRUSTED * forecast_s);
            self.squares_s = TRUSTED * forecast_s * (1.0 + PRIOR_DEVIATION * PRIOR_DEVIATION);
        }
        let near_s = happened_s.min(OUTLIER * self.of(forecast_s));
        let passed_s = now.saturating_sub(self.at).as_secs_f64();
        let kept = (-passed_s / MEMORY_S).exp().max(self.least_kept);
        self.at = now;
        self.forecast_s = self.forecast_s * kept + forecast_s;
        self.happened_s = self.happened_s * kept + happened_s;
        self.squares_s = self.squares_s * kept + near_s * near_s / forecast_s;
    }

    pub fn of(&self, forecast_s: f64) -> f64 {
        if self.forecast_s == 0.0 {
            return forecast_s;
        }
        forecast_s * (self.happened_s / self.forecast_s).clamp(1.0 / MOST, MOST)
    }

    /// The 95th percentile of what happens after such a forecast.
    pub fn p95_of(&self, forecast_s: f64) -> f64 {
        if self.forecast_s == 0.0 {
            return forecast_s * (1.0 + P95 * PRIOR_DEVIATION);
        }
        let mean = self.happened_s / self.forecast_s;
        let variance = self.squares_s / self.forecast_s - mean * mean;
        let p95 = mean + P95 * variance.max(0.0).sqrt();
        forecast_s * p95.clamp(1.0 / MOST, MOST)
    }
}

/// The same of all requests, and of those that one worker serves and that two do. Prompts between
/// tokens slow the former, and are no reason for the latter to wait. A kind that is slower than all
/// together does not wait for that: it would hold up the others in the queue.
#[derive(Debug, Clone, Copy)]
pub(super) struct Corrections {
    all: Correction,
    kinds: [Correction; 2],
}

impl Corrections {
    pub fn new(kept: f64) -> Self {
        Self {
            all: Correction::new(kept),
            kinds: [Correction::new(kept); 2],
        }
    }

    pub fn learn(&mut self, split: bool, forecast_s: f64, happened_s: f64, now: Duration) {
        self.all.learn(forecast_s, happened_s, now);
        self.kinds[usize::from(split)].learn(forecast_s, happened_s, now);
    }

    pub fn of(&self, split: bool, forecast_s: f64) -> f64 {
        let kind = &self.kinds[usize::from(split)];
        kind.of(forecast_s).min(self.all.of(forecast_s))
    }

    /// The 95th percentile of what happens after such a forecast.
    pub fn p95_of(&self, split: bool, forecast_s: f64) -> f64 {
        let kind = &self.kinds[usize::from(split)];
        kind.p95_of(forecast_s).min(self.all.p95_of(forecast_s))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::tests::tenths;

    #[test]
    fn one_bad_forecast_hardly_counts_and_many_do() {
        let mut correction = Correction::new(TTFT_KEPT);
        assert_eq!(correction.of(2.0), 2.0);
        correction.learn(1.0, 2.0, Duration::ZERO);
        assert!((1.0..1.2).contains(&correction.of(1.0)));
        tenths(100).for_each(|now| correction.learn(1.0, 2.0, now));
        assert!((1.9..2.0).contains(&correction.of(1.0)));
    }

    #[test]
    fn many_forecasts_of_a_moment_are_not_forgotten_at_once() {
        let mut correction = Correction::new(TPOT_KEPT);
        let now = Duration::from_secs(1);
        (0..1_000).for_each(|_| correction.learn(1.0, 1.0, now));
        // Two thirds of the first thousand still count, though the last 250 all differ.
        let soon = now + Duration::from_secs(1);
        (0..250).for_each(|_| correction.learn(1.0, 2.0, soon));
        assert!((1.2..1.4).contains(&correction.of(1.0)));
    }

    #[test]
    fn the_95th_percentile_grows_with_the_deviation() {
        let after = |happened: [f64; 2]| {
            let mut correction = Correction::new(TPOT_KEPT);
            assert!((1.1..1.2).contains(&correction.p95_of(1.0)));
            for (turn, now) in tenths(200).enumerate() {
                correction.learn(1.0, happened[turn % 2], now);
            }
            assert!((1.15..1.25).contains(&correction.of(1.0)));
            correction.p95_of(1.0)
        };
        let (alike, others) = (after([1.2, 1.2]), after([0.9, 1.5]));
        assert!((1.19..1.23).contains(&alike), "{alike}");
        assert!((1.6..1.8).contains(&others), "{others}");
    }

    #[test]
    fn no_outlier_is_taken_for_a_deviation_and_no_ratio_is_beyond_measure() {
        let mut correction = Correction::new(TPOT_KEPT);
        tenths(200).for_each(|now| correction.learn(1.0, 1.0, now));
        correction.learn(1.0, 3.0, Duration::from_secs(20));
        let p95 = correction.p95_of(1.0);
        assert!((1.05..1.3).contains(&p95), "{p95}");
        tenths(400).for_each(|now| correction.learn(1.0, 1_000.0, now));
        assert_eq!((correction.of(2.0), correction.p95_of(2.0)), (16.0, 16.0));
    }

    #[test]
    fn prompts_between_tokens_do_not_slow_split_requests() {
        let mut corrections = Corrections::new(TPOT_KEPT);
        tenths(100).for_each(|now| corrections.learn(false, 1.0, 2.0, now));
        assert!(corrections.of(false, 1.0) > 1.9);
        assert_eq!(corrections.of(true, 1.0), 1.0);
        // Those that one worker serves do not hold up many others.
        tenths(100).for_each(|now| corrections.learn(true, 1.0, 1.1, now));
        assert!(corrections.of(false, 1.0) < 1.3);
        tenths(100).for_each(|now| corrections.learn(true, 1.0, 2.0, now));
        assert!(corrections.of(true, 1.0) > 1.8);
    }
}
