//! The share of the workers' time that prompts take between the tokens of other requests.

use std::time::Duration;

use tasuki_core::Forecast;

/// Prompts count for so many seconds.
const MEMORY_S: f64 = 2.5;
/// A larger share is not believed.
const MOST: f64 = 0.8;
/// The workers are counted again after this time.
const COUNT_AGAIN: Duration = Duration::from_millis(100);

/// The prompts of the last seconds that workers compute between tokens.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PromptLoad {
    /// At the time `at`; it decays.
    work_s: f64,
    at: Duration,
    workers: usize,
    /// When the workers were counted.
    counted: Duration,
}

impl PromptLoad {
    /// A request is let in to one of the workers, which are counted if need be.
    pub fn let_in(&mut self, forecast: &Forecast, workers: impl FnOnce() -> usize, now: Duration) {
        if self.workers == 0 || now >= self.counted + COUNT_AGAIN {
            (self.workers, self.counted) = (workers().max(1), now);
        }
        let own_s = if forecast.split {
            0.0
        } else {
            forecast.prefill_s
        };
        (self.work_s, self.at) = (self.left_s(now) + own_s, now);
    }

    /// The forecast with a step time that includes the prompts between two tokens.
    pub fn with_prompts(&self, forecast: Forecast, now: Duration) -> Forecast {
        if forecast.split {
            return forecast;
        }
        let used = self.left_s(now) / (MEMORY_S * self.workers.max(1) as f64);
        Forecast {
            step_s: forecast.step_s / (1.0 - used.min(MOST)),
            ..forecast
        }
    }

    fn left_s(&self, now: Duration) -> f64 {
        self.work_s * (-now.saturating_sub(self.at).as_secs_f64() / MEMORY_S).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::tests::tenths;

    #[test]
    fn prompts_make_tokens_slower_while_they_come() {
        let mut load = PromptLoad::default();
        let forecast = |split| Forecast {
            prefill_s: 0.08,
            step_s: 1.0,
            split,
            ..Forecast::default()
        };
        // Each takes 80 ms of two workers' 200.
        for now in tenths(200) {
            load.let_in(&forecast(false), || 2, now);
            load.let_in(&forecast(true), || 2, now);
        }
        let now = Duration::from_secs(20);
        let token_s = |split, now| load.with_prompts(forecast(split), now).step_s;
        assert!((1.55..1.75).contains(&token_s(false, now)));
        assert_eq!(token_s(true, now), 1.0);
        assert!(token_s(false, now + Duration::from_secs(10)) < 1.02);
        // However many prompts come, tokens are not forecast to be slower than that.
        (0..1_000).for_each(|_| load.let_in(&forecast(false), || 2, now));
        let most = load.with_prompts(forecast(false), now).step_s;
        assert!((4.99..5.01).contains(&most), "{most}");
    }
}
