//! Prompts that were computed again though another worker had computed them: the handoff is
//! configured wrongly, and nothing fails.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// How it was noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recomputed {
    /// Prefill's answer had no `kv_transfer_params`.
    NoTicket,
    /// They lacked a field, and were not forwarded.
    IncompleteTicket,
    /// Decode had them, and by its own metrics loaded no KV.
    NotLoaded,
}

impl Recomputed {
    pub const ALL: [Self; 3] = [Self::NoTicket, Self::IncompleteTicket, Self::NotLoaded];

    /// The word in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoTicket => "no_ticket",
            Self::IncompleteTicket => "incomplete_ticket",
            Self::NotLoaded => "not_loaded",
        }
    }
}

/// How often.
#[derive(Debug, Default)]
pub struct RecomputedCounts([AtomicU64; Recomputed::ALL.len()]);

impl RecomputedCounts {
    pub fn count(&self, how: Recomputed) {
        self.0[how as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub fn read(&self, how: Recomputed) -> u64 {
        self.0[how as usize].load(Ordering::Relaxed)
    }
}

/// Prompt tokens of a worker by where their KV came from, as its metrics have them.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct KvSources {
    pub transferred: f64,
    pub computed: f64,
}

/// Compares what a decode worker was to load with what it loaded.
#[derive(Debug, Default)]
pub struct KvLoads(Mutex<Loads>);

#[derive(Debug, Default)]
struct Loads {
    now: Option<KvSources>,
    /// Legs that ended since the last scrape, each with the sources at its beginning.
    ended: Vec<KvSources>,
}

impl KvLoads {
    /// As of the last scrape; `None`: the worker does not tell.
    pub fn now(&self) -> Option<KvSources> {
        self.lock().now
    }

    /// A leg with another worker's KV has ended well.
    pub fn redeemed(&self, at_its_beginning: Option<KvSources>) {
        self.lock().ended.extend(at_its_beginning);
    }

    /// Takes a scrape that began after all legs noted so far had ended. Returns how many of
    /// them loaded nothing while prompts were computed.
    pub fn scraped(&self, now: Option<KvSources>, ended: Vec<KvSources>) -> usize {
        self.lock().now = now;
        let Some(now) = now else {
            return 0;
        };
        let computes = |from: &&KvSources| {
            let (loaded, computed) = (
                now.transferred - from.transferred,
                now.computed - from.computed,
            );
            // One token is always computed: its logits are wanted.
            loaded == 0.0 && computed > 1.0
        };
        ended.iter().filter(computes).count()
    }

    /// Before a scrape: the legs that it will show.
    pub fn take_ended(&self) -> Vec<KvSources> {
        std::mem::take(&mut self.lock().ended)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Loads> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leg_that_loaded_nothing_is_noticed_at_the_next_scrape() {
        let loads = KvLoads::default();
        let sources = |transferred, computed| KvSources {
            transferred,
            computed,
        };
        assert_eq!(loads.scraped(Some(sources(0.0, 5.0)), Vec::new()), 0);
        loads.redeemed(loads.now());
        let ended = loads.take_ended();
        assert_eq!(loads.scraped(Some(sources(50.0, 6.0)), ended), 0);
        loads.redeemed(loads.now());
        let ended = loads.take_ended();
        assert_eq!(loads.scraped(Some(sources(50.0, 56.0)), ended), 1);
        // All of the prompt was in its own cache.
        loads.redeemed(loads.now());
        let ended = loads.take_ended();
        assert_eq!(loads.scraped(Some(sources(50.0, 57.0)), ended), 0);
        loads.redeemed(None);
        assert!(loads.take_ended().is_empty());
    }
}
