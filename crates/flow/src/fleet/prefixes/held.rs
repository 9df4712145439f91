//! The chunks of one worker.
//!
//! A chunk is *stored* if the worker said so, else *placed*: a request that was sent there
//! brings it. Of a worker that reports its cache a placed chunk is forgotten when its request
//! has output or has ended, unless it is stored by then.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;

use tasuki_core::{ChunkScheme, ModelId};

use super::events::CacheEvents;
use super::{ByName, Expected};

/// What is left of older hits with each new one.
const KEPT: f64 = 0.9;
/// So many tokens of hits are taken as seen before any are.
const PRIOR_TOKENS: f64 = 1024.0;
/// Overtaken places in the order of use that are tolerated, besides as many as there are chunks.
const OVERTAKEN: usize = 64;

/// What one worker holds.
#[derive(Debug)]
pub struct Held {
    pub model: ModelId,
    pub scheme: ChunkScheme,
    /// It reports its cache.
    pub reports: bool,
    /// Chunks that the pool has room for.
    pool_chunks: usize,
    chunks: ByName<Chunk>,
    /// Chunk, and when it was used, the oldest use first: entries that a later use has
    /// overtaken stay until they come to the front.
    order: VecDeque<(u64, i64)>,
    newest_use: i64,
    oldest_use: i64,
    /// Of the last events.
    number: u64,
    /// Events were missed: what comes before a reset says nothing.
    awaits_reset: bool,
    /// Of late, tokens that were placed and expected to be there, and that were.
    expected: f64,
    seen: f64,
}

#[derive(Debug, Clone, Copy)]
struct Chunk {
    used: i64,
    stored: bool,
}

impl Held {
    pub fn new(model: ModelId, scheme: ChunkScheme, reports: bool, pool_tokens: u64) -> Self {
        let pool_chunks = pool_tokens / u64::from(scheme.chunk_tokens().max(1));
        Self {
            model,
            scheme,
            reports,
            pool_chunks: usize::try_from(pool_chunks).unwrap_or(usize::MAX),
            chunks: ByName::default(),
            order: VecDeque::new(),
            newest_use: 0,
            oldest_use: 0,
            number: 0,
            awaits_reset: false,
            expected: 0.0,
            seen: 0.0,
        }
    }

    pub fn len(&self) -> usize {
        self.chunks.len()
    }

    /// The stored chunks.
    pub fn stored(&self) -> Vec<u64> {
        let stored = self.chunks.iter().filter(|(_, chunk)| chunk.stored);
        stored.map(|(name, _)| *name).collect()
    }

    pub fn names(&self) -> impl Iterator<Item = u64> {
        self.chunks.keys().copied()
    }

    /// How many of a prompt's first chunks are there, and how many of these are stored before
    /// the first one that is not.
    pub fn count(&self, names: &[u64]) -> (usize, usize) {
        let (mut stored, mut all_stored) = (0, true);
        for (index, name) in names.iter().enumerate() {
            match self.chunks.get(name) {
                None => return (index, stored),
                Some(chunk) => {
                    all_stored &= chunk.stored;
                    stored += usize::from(all_stored);
                }
            }
        }
        (names.len(), stored)
    }

    /// The chunk is used now. True: it was not there.
    pub fn touch(&mut self, name: u64, stored: bool) -> bool {
        self.newest_use += 1;
        let used = self.newest_use;
        self.order.push_back((name, used));
        match self.chunks.entry(name) {
            Entry::Occupied(mut known) => {
                let chunk = known.get_mut();
                chunk.used = used;
                chunk.stored |= stored;
                false
            }
            Entry::Vacant(new) => {
                new.insert(Chunk { used, stored });
                true
            }
        }
    }

    /// The chunk is stored, and was used before all others. True: it was not there.
    pub fn add_oldest(&mut self, name: u64) -> bool {
        if let Some(chunk) = self.chunks.get_mut(&name) {
            chunk.stored = true;
            return false;
        }
        self.oldest_use -= 1;
        let used = self.oldest_use;
        self.order.push_front((name, used));
        self.chunks.insert(name, Chunk { used, stored: true });
        true
    }

    /// False: it was not there.
    pub fn remove(&mut self, name: u64) -> bool {
        self.chunks.remove(&name).is_some()
    }

    /// The last use until now.
    pub fn last_use(&self) -> i64 {
        self.newest_use
    }

    /// The request that was to bring these chunks, and was placed by that use, has output or has
    /// ended; the worker found the first `found` cached. Returns those that are not there.
    pub fn settle(&mut self, names: &[u64], placed: i64, found: usize) -> Vec<u64> {
        let mut gone = Vec::new();
        for (index, name) in names.iter().enumerate() {
            if let Some(chunk) = self.chunks.get_mut(name) {
                chunk.stored |= index < found;
                if !chunk.stored && chunk.used <= placed {
                    gone.push(*name);
                }
            }
        }
        gone
    }

    /// Takes the number of events. False: some before them were missed, and a reset is to be
    /// asked for.
    pub fn follows(&mut self, events: &CacheEvents) -> bool {
        let follows = events.reset || events.number == self.number.wrapping_add(1);
        self.number = events.number;
        self.awaits_reset = !events.reset && (self.awaits_reset || !follows);
        follows
    }

    pub fn awaits_reset(&self) -> bool {
        self.awaits_reset
    }

    /// The chunk that was not used for longest, if there are more than the pool has room for,
    /// or than `most`.
    pub fn surplus(&mut self, most: usize) -> Option<u64> {
        let room = if self.reports {
            most
        } else {
            most.min(self.pool_chunks)
        };
        while self.chunks.len() > room {
            let (name, used) = self.order.pop_front()?;
            if self.is_last_use(name, used) {
                return Some(name);
            }
        }
        if self.order.len() > 2 * self.chunks.len() + OVERTAKEN {
            let mut order = std::mem::take(&mut self.order);
            order.retain(|&(name, used)| self.is_last_use(name, used));
            self.order = order;
        }
        None
    }

    fn is_last_use(&self, name: u64, used: i64) -> bool {
        self.chunks
            .get(&name)
            .is_some_and(|chunk| chunk.used == used)
    }

    /// So many tokens were placed and expected, and so many were there.
    pub fn learn(&mut self, expected: u32, seen: u32) {
        self.expected = self.expected * KEPT + f64::from(expected);
        self.seen = self.seen * KEPT + f64::from(seen.min(expected));
    }

    /// Of so many first chunks, of which so many are stored.
    pub fn expected(&self, (chunks, stored): (usize, usize)) -> Expected {
        let tokens = |chunks: usize| self.scheme.chunk_tokens().saturating_mul(chunks as u32);
        let (stored, placed) = (tokens(stored), tokens(chunks - stored));
        let share = (self.seen + PRIOR_TOKENS) / (self.expected + PRIOR_TOKENS);
        Expected {
            stored,
            placed,
            likely: stored + (f64::from(placed) * share) as u32,
        }
    }

    #[cfg(test)]
    pub fn order_len(&self) -> usize {
        self.order.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::info;

    #[test]
    fn what_is_stored_counts_up_to_the_first_chunk_that_is_not() {
        let mut held = Held::new(ModelId(0), info("").chunks, true, 1 << 20);
        for (name, stored) in [(1, true), (2, false), (3, true)] {
            held.touch(name, stored);
        }
        assert_eq!(held.count(&[1, 2, 3, 4]), (3, 1));
        assert_eq!(held.count(&[4, 1]), (0, 0));
    }
}
