//! What arrived lately, and when another load began.
//!
//! ```text
//!      older: counts less and less          recent: the last 2 s, in four parts
//!  ───────────────────────────────────────┼────────┼────────┼────────┼────────▶ now
//!                                                  └ another load begins where what follows
//!                                                    differs most from what is before
//! ```

use std::ops::Deref;
use std::time::Duration;

use super::loads::Loads;

/// How long arrivals count, in seconds, unless another load begins.
const LONG_S: f64 = 8.0;
const PART: Duration = Duration::from_millis(500);
const PARTS: usize = 4;
/// What came lately differs from what came before if it is off by so many standard errors.
const DIFFERS: f64 = 4.0;
/// Lengths of prompts vary by this share of their mean at least.
const LEAST_SPREAD: f64 = 0.05;
/// After a pause this long nothing is left of what came before it.
const FORGOTTEN: Duration = Duration::from_secs(60);
/// Classes of prompts, by powers of two of their length.
pub(super) const CLASSES: usize = 24;
/// Parts of each class, by the logarithm of the length too.
pub(super) const FINE: usize = 4;

pub(super) fn class(prompt_tokens: u64) -> usize {
    (prompt_tokens.max(1).ilog2() as usize).min(CLASSES - 1)
}

fn fine_class(prompt_tokens: f64) -> usize {
    let class = FINE as f64 * prompt_tokens.max(1.0).log2();
    (class as usize).min(CLASSES * FINE - 1)
}

/// Arrivals of some time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sums {
    totals: Totals,
    /// Of the prompts' tokens, those that were found cached.
    pub cached: f64,
    pub classes: [Class; CLASSES * FINE],
}

impl Default for Sums {
    fn default() -> Self {
        Self {
            totals: Totals::default(),
            cached: 0.0,
            classes: [Class::default(); CLASSES * FINE],
        }
    }
}

/// Arrivals whose prompts are about as long.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Class {
    pub requests: f64,
    pub prompt_tokens: f64,
    squares: f64,
}

/// Of them, what tells one load from another.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Totals {
    pub seconds: f64,
    pub requests: f64,
    pub prompt_tokens: f64,
    /// Of the prompts.
    pub squares: f64,
}

impl Deref for Sums {
    type Target = Totals;

    fn deref(&self) -> &Totals {
        &self.totals
    }
}

impl Sums {
    fn on_arrival(&mut self, prompt_tokens: u32) {
        let tokens = f64::from(prompt_tokens);
        let one = Class {
            requests: 1.0,
            prompt_tokens: tokens,
            squares: tokens * tokens,
        };
        self.totals.count(&one);
        self.classes[fine_class(tokens)].add(1.0, &one);
    }

    /// The arrivals whose class `keeps` selects, by the mean length of its prompts in tokens.
    pub fn of_prompts(&self, keeps: impl Fn(f64) -> bool) -> Self {
        let mut kept = Self::default();
        let mut keeps_all = true;
        kept.totals.seconds = self.seconds;
        for (to, from) in kept.classes.iter_mut().zip(&self.classes) {
            if from.requests == 0.0 {
                continue;
            }
            if keeps(from.prompt_tokens / from.requests) {
                *to = *from;
                kept.totals.count(from);
            } else {
                keeps_all = false;
            }
        }
        if keeps_all {
            return *self;
        }
        kept.cached = self.cached * kept.prompt_tokens / self.prompt_tokens.max(1.0);
        kept
    }

    /// These count less and those are added.
    fn add(&mut self, kept: f64, other: &Self) {
        self.totals.add(kept, &other.totals);
        self.cached = self.cached * kept + other.cached;
        for (class, other) in self.classes.iter_mut().zip(&other.classes) {
            class.add(kept, other);
        }
    }
}

impl Class {
    fn add(&mut self, kept: f64, other: &Self) {
        self.requests = self.requests * kept + other.requests;
        self.prompt_tokens = self.prompt_tokens * kept + other.prompt_tokens;
        self.squares = self.squares * kept + other.squares;
    }
}

impl Totals {
    fn count(&mut self, class: &Class) {
        self.requests += class.requests;
        self.prompt_tokens += class.prompt_tokens;
        self.squares += class.squares;
    }

    fn add(&mut self, kept: f64, other: &Self) {
        self.seconds = self.seconds * kept + other.seconds;
        self.requests = self.requests * kept + other.requests;
        self.prompt_tokens = self.prompt_tokens * kept + other.prompt_tokens;
        self.squares = self.squares * kept + other.squares;
    }

    pub fn rate(&self) -> f64 {
        self.requests / self.seconds.max(1.0)
    }

    pub fn mean_prompt(&self) -> f64 {
        self.prompt_tokens / self.requests.max(f64::MIN_POSITIVE)
    }

    /// How far these are off from what `before` lets expect, in standard errors.
    fn differs(&self, before: &Self) -> f64 {
        if self.requests < 1.0 || before.requests < 1.0 {
            return 0.0;
        }
        let mean = before.mean_prompt();
        let variance = before.squares / before.requests - mean * mean;
        let variance = variance.max((LEAST_SPREAD * mean).powi(2));
        let error = (variance * (1.0 / self.requests + 1.0 / before.requests)).sqrt();
        let prompts = (self.mean_prompt() - mean).abs() / error;
        // Square roots of counts vary alike, however large the counts are (Anscombe).
        let seconds = before.seconds.max(0.1);
        let root = |count: f64| 2.0 * (count + 0.375).sqrt();
        let off = root(self.requests) - root(before.requests / seconds * self.seconds);
        prompts.max(off.abs() / (1.0 + self.seconds / seconds).sqrt())
    }
}

/// Arrivals of the load now, and the loads before it.
#[derive(Debug, Clone, Default)]
pub(super) struct Arrivals {
    /// When time was counted last.
    at: Option<Duration>,
    older: Sums,
    /// The latest is the last one.
    recent: [Sums; PARTS],
    pub loads: Loads,
}

impl Arrivals {
    /// Time passes.
    pub fn advance(&mut self, now: Duration) {
        let mut at = *self.at.get_or_insert(now);
        if now.saturating_sub(at) > FORGOTTEN {
            (self.older, self.recent, at) = (Sums::default(), [Sums::default(); PARTS], now);
        }
        while at < now {
            let part_ends = PART * (at.as_micros() / PART.as_micros() + 1) as u32;
            let until = part_ends.min(now);
            self.recent[PARTS - 1].totals.seconds += (until - at).as_secs_f64();
            at = until;
            if at == part_ends {
                let kept = (-self.recent[0].seconds / LONG_S).exp();
                self.older.add(kept, &self.recent[0]);
                self.recent.rotate_left(1);
                self.recent[PARTS - 1] = Sums::default();
            }
        }
        self.at = self.at.max(Some(at));
    }

    /// A request arrives.
    pub fn on_arrival(&mut self, prompt_tokens: u32, now: Duration) {
        self.advance(now);
        self.loads.begin_first(now);
        self.recent[PARTS - 1].on_arrival(prompt_tokens);
        if let Some(part) = self.differing() {
            let before = self.before(part);
            self.loads.end_load(&before, now);
            self.older = Sums::default();
            self.recent[..part].fill(Sums::default());
        }
    }

    /// So many tokens of a prompt were found cached.
    pub fn on_cached(&mut self, tokens: u32) {
        self.recent[PARTS - 1].cached += f64::from(tokens);
    }

    /// The recent part with which another load begins.
    fn differing(&self) -> Option<usize> {
        let mut since = [Totals::default(); PARTS];
        let mut sum = Totals::default();
        for part in (0..PARTS).rev() {
            sum.add(1.0, &self.recent[part]);
            since[part] = sum;
        }
        let mut before = self.older.totals;
        let (mut begins, mut most) = (None, DIFFERS);
        for (part, since) in since.iter().enumerate() {
            let off = since.differs(&before);
            if off > most {
                (begins, most) = (Some(part), off);
            }
            before.add(1.0, &self.recent[part]);
        }
        begins
    }

    /// What came before a recent part.
    fn before(&self, part: usize) -> Sums {
        let mut sums = self.older;
        let parts = self.recent[..part].iter();
        parts.for_each(|one| sums.add(1.0, one));
        sums
    }

    /// All of the load now.
    pub fn all(&self) -> Sums {
        self.before(PARTS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    /// Arrivals at even distances, with prompts that vary by a third.
    fn arrive(arrivals: &mut Arrivals, (from_s, to_s): (f64, f64), rate: f64, prompt: f64) {
        for index in 0..((to_s - from_s) * rate) as u32 {
            let varied = prompt * (2.0 + f64::from(index * 7 % 5)) / 4.0;
            let due_s = from_s + f64::from(index) / rate;
            arrivals.on_arrival(varied as u32, at(due_s));
        }
    }

    #[test]
    fn little_of_another_load_is_left_soon_after_a_change() {
        for (rate, prompt) in [(50.0, 5_000.0), (150.0, 500.0), (15.0, 500.0)] {
            let mut arrivals = Arrivals::default();
            arrive(&mut arrivals, (0.0, 20.25), 50.0, 500.0);
            assert!(arrivals.loads.rest_s(at(20.0)).is_none(), "one load so far");
            arrive(&mut arrivals, (20.25, 22.25), rate, prompt);
            let all = arrivals.all();
            let mean = all.requests / all.seconds;
            assert!((0.7..1.3).contains(&(mean / rate)), "{mean} of {rate}");
            assert!(
                (0.8..1.25).contains(&(all.mean_prompt() / prompt)),
                "{rate} {prompt}"
            );
            let before: Vec<_> = arrivals.loads.before().collect();
            assert_eq!(before.len(), 1);
            let (share, sums) = before[0];
            assert_eq!(share, 1.0);
            assert!((0.9..1.1).contains(&(sums.mean_prompt() / 500.0)));
        }
    }

    #[test]
    fn a_pause_ends_no_load_but_is_long_forgotten() {
        let mut arrivals = Arrivals::default();
        arrive(&mut arrivals, (0.0, 5.0), 20.0, 500.0);
        arrivals.advance(at(100.0));
        assert_eq!(arrivals.all().requests, 0.0);
        assert!(arrivals.loads.before().next().is_none());
    }
}
