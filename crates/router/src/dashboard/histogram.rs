//! Durations of one interval, counted without a lock.

use std::sync::atomic::{AtomicU32, Ordering};

/// Eight buckets for each doubling from 0.1 ms on, up to 28 minutes: a quantile is exact to 5 %.
const BUCKETS: usize = 192;
const PER_DOUBLING: f64 = 8.0;
const SMALLEST_S: f64 = 1e-4;

/// A histogram that is emptied at the end of each interval.
pub struct Histogram([AtomicU32; BUCKETS]);

impl Default for Histogram {
    fn default() -> Self {
        Self([const { AtomicU32::new(0) }; BUCKETS])
    }
}

impl Histogram {
    /// Counts a duration `count` times.
    pub fn observe(&self, seconds: f64, count: u32) {
        // A cast of a negative or infinite number saturates.
        let bucket = ((seconds / SMALLEST_S).log2() * PER_DOUBLING) as usize;
        self.0[bucket.min(BUCKETS - 1)].fetch_add(count, Ordering::Relaxed);
    }

    /// Empties the histogram and gives its median and its 99th percentile, in seconds; `None`:
    /// nothing was counted.
    pub fn take(&self) -> Option<(f64, f64)> {
        let counts = self
            .0
            .each_ref()
            .map(|count| count.swap(0, Ordering::Relaxed));
        Some((quantile(&counts, 0.5)?, quantile(&counts, 0.99)?))
    }
}

fn quantile(counts: &[u32], share: f64) -> Option<f64> {
    let total: u64 = counts.iter().map(|&count| u64::from(count)).sum();
    let rank = (total as f64 * share).ceil();
    let mut below = 0;
    let bucket = counts.iter().position(|&count| {
        below += u64::from(count);
        count > 0 && below as f64 >= rank
    })?;
    Some(SMALLEST_S * ((bucket as f64 + 0.5) / PER_DOUBLING).exp2())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_exact_to_five_percent_and_begin_anew() {
        let histogram = Histogram::default();
        assert_eq!(histogram.take(), None);
        for i in 1..=1000 {
            histogram.observe(f64::from(i) / 1000.0, 2);
        }
        let (median, high) = histogram.take().expect("durations");
        assert!((median / 0.5 - 1.0).abs() < 0.05, "{median}");
        assert!((high / 0.99 - 1.0).abs() < 0.05, "{high}");
        assert_eq!(histogram.take(), None);
        histogram.observe(0.0, 1);
        assert!(histogram.take().expect("one").1 < 2e-4);
        histogram.observe(1e9, 1);
        assert!(histogram.take().expect("one").0 > 1_000.0);
    }
}
