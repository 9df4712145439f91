//! How fast a queue moves, what prompts take of the workers' time, and how far forecasts are off:
//! learnt from what happened.

use std::time::Duration;

use tasuki_core::Forecast;

/// How long the past counts.
const MEMORY_S: f64 = 5.0;
/// So much work for each worker is taken as seen before anything is.
const PRIOR_S: f64 = 1.0;

/// Work let in for each second in which requests waited.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Pace {
    work_s: f64,
    time_s: f64,
    /// When something was let in last, or the first one began to wait.
    since: Option<Duration>,
}

impl Pace {
    /// From now on requests wait, before so many workers, which are counted if need be.
    pub fn begin(&mut self, workers: impl FnOnce() -> usize, now: Duration) {
        if self.time_s == 0.0 {
            self.work_s = workers().max(1) as f64 * PRIOR_S;
            self.time_s = PRIOR_S;
        }
        self.since = Some(now);
    }

    /// A request that waited is let in.
    pub fn let_in(&mut self, work_s: f64, now: Duration) {
        let Some(since) = self.since else { return };
        let time_s = now.saturating_sub(since).as_secs_f64();
        let kept = (-time_s / MEMORY_S).exp();
        self.work_s = self.work_s * kept + work_s;
        self.time_s = self.time_s * kept + time_s;
        self.since = Some(now);
    }

    /// How long so much work takes to be let in.
    pub fn time_s(&self, work_s: f64, now: Duration) -> f64 {
        let since = self
            .since
            .map_or(Duration::ZERO, |at| now.saturating_sub(at));
        work_s * (self.time_s + since.as_secs_f64()) / self.work_s.max(f64::MIN_POSITIVE)
    }
}

/// Of the workers' time, what prompts between tokens are taken to use at most.
const MOST_PROMPTS: f64 = 0.8;

/// Workers are counted again after that.
const COUNTED: Duration = Duration::from_millis(100);

/// Prompts that were let in lately, to be computed between tokens.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Between {
    work_s: f64,
    at: Duration,
    workers: usize,
    counted: Duration,
}

impl Between {
    /// A request is let in to one of the workers, which are counted if need be.
    pub fn let_in(&mut self, forecast: &Forecast, workers: impl FnOnce() -> usize, now: Duration) {
        if self.workers == 0 || now >= self.counted + COUNTED {
            (self.workers, self.counted) = (workers().max(1), now);
        }
        let own_s = if forecast.split {
            0.0
        } else {
            forecast.prefill_s
        };
        (self.work_s, self.at) = (self.left_s(now) + own_s, now);
    }

    /// With the time that a token takes: of the step, and of the prompts between two.
    pub fn with_prompts(&self, forecast: Forecast, now: Duration) -> Forecast {
        if forecast.split {
            return forecast;
        }
        let used = self.left_s(now) / (LATELY_S * self.workers.max(1) as f64);
        Forecast {
            step_s: forecast.step_s / (1.0 - used.min(MOST_PROMPTS)),
            ..forecast
        }
    }

    fn left_s(&self, now: Duration) -> f64 {
        self.work_s * (-now.saturating_sub(self.at).as_secs_f64() / LATELY_S).exp()
    }
}

/// How long what comes often counts.
const LATELY_S: f64 = 2.5;
/// What is left at least of older forecasts with each new one: of first tokens, and of times per token.
pub(super) const TTFT_KEPT: f64 = 0.98;
pub(super) const TPOT_KEPT: f64 = 0.95;
/// Forecasts that fail by more say nothing about the next one.
const MOST: f64 = 8.0;

/// So many forecasts are taken as right before the first is checked: it may have been made before
/// the costs were learnt, which it must not correct once more.
const TRUSTED: f64 = 5.0;

/// So many standard deviations above the mean are as much as nineteen of twenty see, nearly.
const NEARLY_ALL: f64 = 1.64;
/// The standard deviation before anything is learnt, as a share of the mean.
const USUAL_SPREAD: f64 = 0.08;
/// What takes more times as long as the mean is late whatever is let in.
const FAR: f64 = 1.5;

/// What happened for each second forecast.
#[derive(Debug, Clone, Copy)]
pub(super) struct Correction {
    least_kept: f64,
    /// When it was learnt last.
    at: Duration,
    forecast_s: f64,
    happened_s: f64,
    /// Of the squares of how many times as long it took as forecast, weighted by the forecast.
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
            self.squares_s = TRUSTED * forecast_s * (1.0 + USUAL_SPREAD * USUAL_SPREAD);
        }
        let near_s = happened_s.min(FAR * self.of(forecast_s));
        let passed_s = now.saturating_sub(self.at).as_secs_f64();
        let kept = (-passed_s / LATELY_S).exp().max(self.least_kept);
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

    /// What nearly all with such a forecast stay below.
    pub fn most_of(&self, forecast_s: f64) -> f64 {
        if self.forecast_s == 0.0 {
            return forecast_s * (1.0 + NEARLY_ALL * USUAL_SPREAD);
        }
        let mean = self.happened_s / self.forecast_s;
        let variance = self.squares_s / self.forecast_s - mean * mean;
        let most = mean + NEARLY_ALL * variance.max(0.0).sqrt();
        forecast_s * most.clamp(1.0 / MOST, MOST)
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

    /// What nearly all with such a forecast stay below.
    pub fn most_of(&self, split: bool, forecast_s: f64) -> f64 {
        let kind = &self.kinds[usize::from(split)];
        kind.most_of(forecast_s).min(self.all.most_of(forecast_s))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tenths of a second.
    fn times(many: u64) -> impl Iterator<Item = Duration> {
        (0..many).map(|tenth| Duration::from_millis(100 * tenth))
    }

    #[test]
    fn prompts_take_their_time_between_tokens_as_long_as_they_come() {
        let mut between = Between::default();
        let forecast = |split| Forecast {
            prefill_s: 0.08,
            step_s: 1.0,
            split,
            ..Forecast::default()
        };
        // Each takes 80 ms of two workers' 200.
        for now in times(200) {
            between.let_in(&forecast(false), || 2, now);
            between.let_in(&forecast(true), || 2, now);
        }
        let now = Duration::from_secs(20);
        let token_s = |split, now| between.with_prompts(forecast(split), now).step_s;
        assert!((1.55..1.75).contains(&token_s(false, now)));
        assert_eq!(token_s(true, now), 1.0);
        assert!(token_s(false, now + Duration::from_secs(10)) < 1.02);
    }

    #[test]
    fn one_bad_forecast_hardly_counts_and_many_do() {
        let mut correction = Correction::new(TTFT_KEPT);
        assert_eq!(correction.of(2.0), 2.0);
        correction.learn(1.0, 2.0, Duration::ZERO);
        assert!((1.0..1.2).contains(&correction.of(1.0)));
        times(100).for_each(|now| correction.learn(1.0, 2.0, now));
        assert!((1.9..2.0).contains(&correction.of(1.0)));
    }

    #[test]
    fn many_in_a_moment_count_as_long_as_a_few() {
        let mut correction = Correction::new(TPOT_KEPT);
        let now = Duration::from_secs(1);
        (0..1_000).for_each(|_| correction.learn(1.0, 1.0, now));
        // More than 1,000 / e count by then, though the last twenty all say something else.
        let soon = now + Duration::from_secs(1);
        (0..250).for_each(|_| correction.learn(1.0, 2.0, soon));
        assert!((1.2..1.4).contains(&correction.of(1.0)));
    }

    #[test]
    fn what_differs_more_leaves_less_room() {
        let after = |happened: [f64; 2]| {
            let mut correction = Correction::new(TPOT_KEPT);
            assert!((1.1..1.2).contains(&correction.most_of(1.0)));
            for (turn, now) in times(200).enumerate() {
                correction.learn(1.0, happened[turn % 2], now);
            }
            assert!((1.15..1.25).contains(&correction.of(1.0)));
            correction.most_of(1.0)
        };
        let (alike, others) = (after([1.2, 1.2]), after([0.9, 1.5]));
        assert!((1.19..1.23).contains(&alike), "{alike}");
        assert!((1.6..1.8).contains(&others), "{others}");
    }

    #[test]
    fn prompts_between_tokens_do_not_slow_split_requests() {
        let mut corrections = Corrections::new(TPOT_KEPT);
        times(100).for_each(|now| corrections.learn(false, 1.0, 2.0, now));
        assert!(corrections.of(false, 1.0) > 1.9);
        assert_eq!(corrections.of(true, 1.0), 1.0);
        // Those that one worker serves do not hold up many others.
        times(100).for_each(|now| corrections.learn(true, 1.0, 1.1, now));
        assert!(corrections.of(false, 1.0) < 1.3);
        times(100).for_each(|now| corrections.learn(true, 1.0, 2.0, now));
        assert!(corrections.of(true, 1.0) > 1.8);
    }
}
