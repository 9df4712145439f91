//! How long loads last, and which ones came before: where they change faster than roles can
//! follow, roles should suit all of them.

use std::time::Duration;

use super::arrivals::Sums;

/// Loads that are remembered.
const LOADS: usize = 8;
/// What differs again so soon is the same change still, in seconds.
const ONE_CHANGE_S: f64 = 2.0;

/// The load now, since when, and the ones before it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Loads {
    began: Option<Duration>,
    /// Those that ended, and how many seconds each lasted; the oldest one is overwritten.
    ended: [Option<(f64, Sums)>; LOADS],
    next: usize,
}

impl Loads {
    /// Something arrives.
    pub fn begin_first(&mut self, now: Duration) {
        self.began.get_or_insert(now);
    }

    /// Another load comes: this is what came before it.
    pub fn end_load(&mut self, sums: &Sums, now: Duration) {
        let lasted_s = self.lasts_s(now);
        if lasted_s >= ONE_CHANGE_S {
            self.ended[self.next] = Some((lasted_s, *sums));
            self.next = (self.next + 1) % LOADS;
            self.began = Some(now);
        }
    }

    fn lasts_s(&self, now: Duration) -> f64 {
        self.began
            .map_or(0.0, |began| now.saturating_sub(began).as_secs_f64())
    }

    /// How long the load lasts from now on, in seconds: as those before it did that lasted as long;
    /// if there was none, once more as long as it has lasted. `None`: no load has ended yet.
    pub fn rest_s(&self, now: Duration) -> Option<f64> {
        self.ended[0]?;
        let lasts_s = self.lasts_s(now);
        let longer = self.ended.iter().flatten();
        let longer = longer.filter(|(lasted_s, _)| *lasted_s > lasts_s);
        let (mut count, mut sum_s) = (0.0, 0.0);
        for (lasted_s, _) in longer {
            count += 1.0;
            sum_s += lasted_s - lasts_s;
        }
        Some(if count > 0.0 { sum_s / count } else { lasts_s })
    }

    /// Those that ended, each with its share of their time.
    pub fn before(&self) -> impl Iterator<Item = (f64, &Sums)> {
        let all_s: f64 = self
            .ended
            .iter()
            .flatten()
            .map(|(lasted_s, _)| lasted_s)
            .sum();
        let ended = self.ended.iter().flatten();
        ended.map(move |(lasted_s, sums)| (lasted_s / all_s, sums))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_is_expected_to_last_as_long_as_those_before_it() {
        let at = |seconds| Duration::from_secs(seconds);
        let mut loads = Loads::default();
        loads.begin_first(at(0));
        assert_eq!(loads.rest_s(at(3)), None);
        for ends in [8, 16, 28] {
            loads.end_load(&Sums::default(), at(ends));
            // The same change, seen again.
            loads.end_load(&Sums::default(), at(ends + 1));
        }
        assert_eq!(loads.rest_s(at(28)), Some((8.0 + 8.0 + 12.0) / 3.0));
        assert_eq!(loads.rest_s(at(38)), Some(2.0));
        // Longer than all of them.
        assert_eq!(loads.rest_s(at(88)), Some(60.0));
        let shares: Vec<f64> = loads.before().map(|(share, _)| share).collect();
        assert_eq!(shares, [8.0 / 28.0, 8.0 / 28.0, 12.0 / 28.0]);
    }
}
