//! How many retries a shell's requests may make together, so that a failure of the whole fleet
//! does not multiply its load.
//!
//! A token bucket: requests pay in a share of a retry each, time pays in a few a second, and what
//! is not used is forgotten again. In the long run retries are at most that share of the requests
//! plus that rate.
//! Source: the retry budget of Finagle (`RetryBudget`), with exponential in place of strict expiry.

use std::time::Duration;

/// How much a budget allows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BudgetConfig {
    /// Retries for each request.
    pub share: f64,
    /// Retries a second besides.
    pub per_second: f64,
    /// What is not used is forgotten after this time constant.
    pub window: Duration,
}

impl Default for BudgetConfig {
    fn default() -> Self {
        Self {
            share: 0.2,
            per_second: 10.0,
            window: Duration::from_secs(10),
        }
    }
}

/// Retries that may still be made.
#[derive(Debug)]
pub struct RetryBudget {
    config: BudgetConfig,
    left: f64,
    as_of: Duration,
    refused: u64,
}

impl RetryBudget {
    /// Full, at time 0.
    pub fn new(config: BudgetConfig) -> Self {
        Self {
            config,
            left: config.per_second * config.window.as_secs_f64(),
            as_of: Duration::ZERO,
            refused: 0,
        }
    }

    /// A request begins.
    pub fn on_request(&mut self, now: Duration) {
        self.advance(now);
        self.left += self.config.share;
    }

    /// Takes one retry. False: there is none left now.
    pub fn take(&mut self, now: Duration) -> bool {
        self.advance(now);
        if self.left < 1.0 {
            self.refused += 1;
            return false;
        }
        self.left -= 1.0;
        true
    }

    /// Retries that may be made at once.
    pub fn left(&mut self, now: Duration) -> f64 {
        self.advance(now);
        self.left
    }

    /// How often there was no retry left to take.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    fn advance(&mut self, now: Duration) {
        let window_s = self.config.window.as_secs_f64();
        let kept = (-now.saturating_sub(self.as_of).as_secs_f64() / window_s).exp();
        self.left = self.left * kept + self.config.per_second * window_s * (1.0 - kept);
        self.as_of = self.as_of.max(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    /// Retries that are granted of many that are wanted within some seconds.
    fn granted(budget: &mut RetryBudget, from_s: f64, for_s: f64, requests: u32) -> u32 {
        let moments = 1_000;
        let mut granted = 0;
        for moment in 0..moments {
            let now = seconds(from_s + for_s * f64::from(moment) / f64::from(moments));
            for _ in 0..requests / moments {
                budget.on_request(now);
            }
            while budget.take(now) {
                granted += 1;
            }
        }
        granted
    }

    #[test]
    fn without_requests_the_minimum_is_left() {
        let mut budget = RetryBudget::new(BudgetConfig::default());
        assert_eq!(
            granted(&mut budget, 0.0, 0.001, 0),
            100,
            "the whole window at once"
        );
        let later = granted(&mut budget, 0.001, 20.0, 0);
        assert!((190..=200).contains(&later), "{later}: 10 a second");
        assert!(budget.refused() > 0);
    }

    #[test]
    fn requests_pay_in_their_share() {
        let mut budget = RetryBudget::new(BudgetConfig::default());
        granted(&mut budget, 0.0, 0.001, 0);
        let granted = granted(&mut budget, 0.001, 10.0, 10_000);
        assert!(
            (2_050..=2_110).contains(&granted),
            "{granted}: 20 % and 10 a second"
        );
    }

    #[test]
    fn what_is_not_used_is_forgotten() {
        let mut budget = RetryBudget::new(BudgetConfig::default());
        for _ in 0..100_000 {
            budget.on_request(seconds(1.0));
        }
        let granted = granted(&mut budget, 101.0, 0.001, 0);
        assert!((100..=101).contains(&granted), "{granted}");
    }

    #[test]
    fn a_clock_that_goes_back_changes_nothing() {
        let mut budget = RetryBudget::new(BudgetConfig::default());
        budget.on_request(seconds(5.0));
        let left = budget.left(seconds(5.0));
        assert!(budget.take(seconds(4.0)));
        assert!((budget.left(seconds(5.0)) - (left - 1.0)).abs() < 1e-9);
    }
}
