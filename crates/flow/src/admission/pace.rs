//! How fast a queue moves.

use std::time::Duration;

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
