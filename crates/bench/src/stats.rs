//! Mean, median and percentiles, as numpy has them, so that figures compare
//! with those of other tools.

use serde::{Deserialize, Serialize};

/// How values spread.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    pub mean: f64,
    pub median: f64,
    /// Of the population.
    pub std: f64,
    pub min: f64,
    pub max: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
}

/// Values, each as often as its count says.
#[derive(Debug, Clone, Default)]
pub struct Values(Vec<(f64, u64)>);

impl Values {
    pub fn add(&mut self, value: f64) {
        self.add_times(value, 1);
    }

    pub fn add_times(&mut self, value: f64, count: u64) {
        if count > 0 {
            self.0.push((value, count));
        }
    }

    /// Their spread; None without values.
    pub fn spread(mut self) -> Option<Spread> {
        self.0.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let (min, max) = (self.0.first()?.0, self.0.last()?.0);
        let count: u64 = self.0.iter().map(|value| value.1).sum();
        let mean = self.sum_of(|value| value) / count as f64;
        let variance = self.sum_of(|value| (value - mean).powi(2)) / count as f64;
        Some(Spread {
            mean,
            median: self.percentile(50.0, count),
            std: variance.sqrt(),
            min,
            max,
            p90: self.percentile(90.0, count),
            p95: self.percentile(95.0, count),
            p99: self.percentile(99.0, count),
        })
    }

    fn sum_of(&self, of: impl Fn(f64) -> f64) -> f64 {
        self.0.iter().map(|&(v, n)| of(v) * n as f64).sum()
    }

    /// Between the two nearest ranks, linearly. Sorted values only.
    fn percentile(&self, percent: f64, count: u64) -> f64 {
        let rank = percent / 100.0 * (count - 1) as f64;
        let below = self.at(rank as u64);
        let above = self.at((rank as u64 + 1).min(count - 1));
        below + (above - below) * rank.fract()
    }

    fn at(&self, rank: u64) -> f64 {
        let mut end = 0;
        let place = self.0.iter().find(|(_, count)| {
            end += count;
            rank < end
        });
        place.map_or(f64::NAN, |value| value.0)
    }
}

impl FromIterator<f64> for Values {
    fn from_iter<T: IntoIterator<Item = f64>>(values: T) -> Self {
        Self(values.into_iter().map(|value| (value, 1)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(seen: f64, wanted: f64) {
        assert!((seen - wanted).abs() < 1e-9, "{seen} is not {wanted}");
    }

    /// `numpy.percentile(arange(1, 11) ** 2, [50, 90, 95, 99])` and `std`.
    #[test]
    fn percentiles_are_numpys() {
        let spread = (1..=10)
            .map(|n| f64::from(n * n))
            .collect::<Values>()
            .spread();
        let spread = spread.unwrap();
        close(spread.mean, 38.5);
        close(spread.median, 30.5);
        close(spread.p90, 82.9);
        close(spread.p95, 91.45);
        close(spread.p99, 98.29);
        close(spread.std, 32.419_901_295_348_06);
        assert_eq!((spread.min, spread.max), (1.0, 100.0));
    }

    #[test]
    fn a_count_is_as_good_as_repetition() {
        let mut counted = Values::default();
        counted.add_times(0.0, 4);
        counted.add_times(8.0, 3);
        counted.add(4.0);
        counted.add_times(9.0, 0);
        // Eight values with a mean of 3.5: every sum is exact.
        let plain = [0.0, 0.0, 0.0, 0.0, 8.0, 8.0, 8.0, 4.0];
        let plain = plain.into_iter().collect::<Values>().spread().unwrap();
        assert_eq!(counted.spread(), Some(plain));
    }

    #[test]
    fn one_value_and_none() {
        let one = std::iter::once(4.0).collect::<Values>().spread().unwrap();
        assert_eq!(
            (one.mean, one.median, one.p99, one.std),
            (4.0, 4.0, 4.0, 0.0)
        );
        assert_eq!(Values::default().spread(), None);
    }
}
