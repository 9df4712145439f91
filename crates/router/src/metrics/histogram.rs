//! A histogram for what is counted with every token: that of `prometheus_client` has a lock.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::DURATIONS_S;

/// Durations in the buckets of all other histograms of durations. A clone counts the same.
#[derive(Debug, Clone, Default)]
pub struct LockFreeHistogram(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    /// Of each bucket alone; the last is of what is above all bounds.
    buckets: [AtomicU64; DURATIONS_S.len() + 1],
    nanoseconds: AtomicU64,
}

impl LockFreeHistogram {
    /// Counts a duration of so many seconds `count` times.
    pub fn observe(&self, seconds: f64, count: u64) {
        let bucket = DURATIONS_S.partition_point(|bound| *bound < seconds);
        self.0.buckets[bucket].fetch_add(count, Ordering::Relaxed);
        // A cast of a negative number saturates. The sum overflows after 584 years.
        let nanoseconds = (seconds * 1e9 * count as f64) as u64;
        self.0.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }
}

impl EncodeMetric for LockFreeHistogram {
    fn encode(&self, mut encoder: MetricEncoder) -> Result<(), fmt::Error> {
        let bounds = DURATIONS_S.into_iter().chain([f64::INFINITY]);
        let counts = self.0.buckets.iter().map(|n| n.load(Ordering::Relaxed));
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        let sum = self.0.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9;
        // The number is that of the buckets, whatever is counted meanwhile.
        let count = buckets.iter().map(|(_, count)| count).sum();
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::metrics::histogram::Histogram;
    use prometheus_client::registry::Registry as MetricsRegistry;

    use super::*;

    #[test]
    fn it_is_written_as_the_one_with_a_lock() {
        let (own, other) = (LockFreeHistogram::default(), Histogram::new(DURATIONS_S));
        for (seconds, count) in [
            (0.0, 1),
            (0.001953125, 2),
            (0.25, 3),
            (0.375, 1),
            (512.0, 2),
        ] {
            own.observe(seconds, count);
            for _ in 0..count {
                other.observe(seconds);
            }
        }
        let text = |register: &dyn Fn(&mut MetricsRegistry)| {
            let mut registry = MetricsRegistry::default();
            register(&mut registry);
            let mut text = String::new();
            encode(&mut text, &registry).unwrap();
            text
        };
        let own = text(&|to| to.register("d", "Durations", own.clone()));
        assert!(
            own.contains("d_count 9\n") && own.contains("le=\"0.25\"} 6\n"),
            "{own}"
        );
        assert_eq!(
            own,
            text(&|to| to.register("d", "Durations", other.clone()))
        );
    }
}
