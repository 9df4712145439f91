//! Simulated time.

use std::time::Duration;

/// Nanoseconds since the simulation began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(u64);

impl Time {
    pub const ZERO: Self = Self(0);
    /// Later than everything.
    pub const NEVER: Self = Self(u64::MAX);

    /// So many seconds after the beginning; what is negative is the beginning.
    pub fn from_s(seconds: f64) -> Self {
        Self((seconds * 1e9) as u64)
    }

    pub fn as_s(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// As the core counts: since its shell started.
    pub fn since_start(self) -> Duration {
        Duration::from_nanos(self.0)
    }

    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Seconds since an earlier time; 0 if that is later.
    pub fn s_since(self, earlier: Self) -> f64 {
        self.0.saturating_sub(earlier.0) as f64 / 1e9
    }

    /// So many seconds later.
    pub fn plus_s(self, seconds: f64) -> Self {
        Self(self.0.saturating_add((seconds * 1e9) as u64))
    }

    pub fn plus(self, duration: Duration) -> Self {
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(ns))
    }

    /// So much earlier, not before the beginning.
    pub fn minus(self, duration: Duration) -> Self {
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_sub(ns))
    }

    /// So many seconds earlier, not before the beginning.
    pub fn minus_s(self, seconds: f64) -> Self {
        Self(self.0.saturating_sub((seconds * 1e9) as u64))
    }
}
