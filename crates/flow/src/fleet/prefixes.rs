//! Which workers likely hold the KV of which prompts' beginnings, from what was placed there.
//!
//! A prompt is cut into chunks, and each chunk is known by a hash of all tokens up to its
//! end. A worker is taken to hold the chunks that were placed there last, up to the size of its
//! pool: as its own cache, it forgets those that were not used for longest. What it does not
//! tell (evictions for decodes, another router's requests) makes this an estimate, which is
//! corrected by the hits that it reports with first tokens.

use std::collections::{HashMap, VecDeque};

use tasuki_core::{CHUNK_TOKENS, Chunks, Warm, WorkerId};

/// Chunks that are remembered of one worker at most: some megabytes.
const MOST_CHUNKS: usize = 1 << 16;
/// Workers that are compared.
const MOST_HOLDERS: usize = 8;
/// What is left of older hits with each new one.
const KEPT: f64 = 0.9;
/// So many tokens of hits are taken as seen before any are.
const PRIOR_TOKENS: f64 = 1024.0;

/// What all workers hold.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    holders: HashMap<u64, Vec<WorkerId>>,
    workers: HashMap<WorkerId, Held>,
}

/// The chunks of one worker.
#[derive(Debug, Default)]
struct Held {
    /// Chunk, and when it was used: entries that a later use has overtaken stay until they
    /// come to the front.
    order: VecDeque<(u64, u64)>,
    last_use: HashMap<u64, u64>,
    uses: u64,
    /// Of late, tokens that were expected to be there, and that were.
    expected: f64,
    seen: f64,
}

impl PrefixIndex {
    /// A request with that prompt was placed on a worker whose pool holds so many tokens.
    pub fn placed(&mut self, worker: WorkerId, chunks: &Chunks, pool_tokens: u64) {
        let held = self.workers.entry(worker).or_default();
        // The end first: so who holds a chunk holds those before it, and the beginning stays
        // longest.
        for &chunk in chunks.0.iter().rev() {
            held.uses += 1;
            held.order.push_back((chunk, held.uses));
            if held.last_use.insert(chunk, held.uses).is_none() {
                self.holders.entry(chunk).or_default().push(worker);
            }
        }
        let most = usize::try_from(pool_tokens / u64::from(CHUNK_TOKENS));
        let most = most.unwrap_or(MOST_CHUNKS).min(MOST_CHUNKS);
        while held.last_use.len() > most || held.order.len() > 2 * most.max(chunks.0.len()) {
            let Some((chunk, used)) = held.order.pop_front() else {
                break;
            };
            if held.last_use.get(&chunk) == Some(&used) {
                held.last_use.remove(&chunk);
                remove_holder(&mut self.holders, chunk, worker);
            }
        }
    }

    /// The worker holds nothing any more: its process ended.
    pub fn forget(&mut self, worker: WorkerId) {
        for (chunk, _) in self.workers.remove(&worker).unwrap_or_default().last_use {
            remove_holder(&mut self.holders, chunk, worker);
        }
    }

    /// Tokens of a prompt's beginning that a worker likely holds.
    pub fn cached(&self, worker: WorkerId, chunks: &Chunks) -> u32 {
        let Some(held) = self.workers.get(&worker) else {
            return 0;
        };
        let known = |chunk: &&u64| held.last_use.contains_key(chunk);
        let count = chunks.0.iter().take_while(known).count();
        held.likely(CHUNK_TOKENS * count as u32)
    }

    /// The worker that holds most of a prompt's beginning, of those that `may` be chosen. Of
    /// equals the one with the least `load`, among a few that came to hold it last.
    ///
    /// Who holds a chunk holds those before it, so only the last chunk's holders are looked at,
    /// however many workers share a beginning.
    pub fn warmest<L: Ord>(
        &self,
        chunks: &Chunks,
        may: impl Fn(WorkerId) -> bool,
        load: impl Fn(WorkerId) -> L,
    ) -> Option<Warm> {
        let held = chunks.0.iter().map_while(|chunk| self.holders.get(chunk));
        let held: Vec<&Vec<WorkerId>> = held.collect();
        let count = |index: usize| CHUNK_TOKENS * (index as u32 + 1);
        let (index, worker) = held.iter().enumerate().rev().find_map(|(index, holders)| {
            let last = holders.iter().rev().copied().filter(|&id| may(id));
            Some((index, last.take(MOST_HOLDERS).min_by_key(|&id| load(id))?))
        })?;
        let tokens = self.workers.get(&worker)?.likely(count(index));
        (tokens > 0).then_some(Warm { worker, tokens })
    }

    /// A worker said how much of a prompt it found cached, of which so much was expected.
    pub fn learn(&mut self, worker: WorkerId, expected: u32, seen: u32) {
        if let Some(held) = self.workers.get_mut(&worker) {
            held.expected = held.expected * KEPT + f64::from(expected);
            held.seen = held.seen * KEPT + f64::from(seen.min(expected));
        }
    }
}

impl Held {
    /// Of tokens that should be there, by what was there of late.
    fn likely(&self, tokens: u32) -> u32 {
        let share = (self.seen + PRIOR_TOKENS) / (self.expected + PRIOR_TOKENS);
        (f64::from(tokens) * share) as u32
    }
}

fn remove_holder(holders: &mut HashMap<u64, Vec<WorkerId>>, chunk: u64, worker: WorkerId) {
    if let Some(of_chunk) = holders.get_mut(&chunk) {
        of_chunk.retain(|holder| *holder != worker);
        if of_chunk.is_empty() {
            holders.remove(&chunk);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: WorkerId = WorkerId(0);
    const B: WorkerId = WorkerId(1);
    const POOL: u64 = 4_096;

    /// A prompt of so many chunks; those of different kinds share the first `common` ones.
    fn prompt(kind: u32, common: u32, chunks: u32) -> Chunks {
        let token = |at: u32| {
            if at < common * CHUNK_TOKENS {
                at
            } else {
                at + 1_000 * kind
            }
        };
        let tokens: Vec<u32> = (0..chunks * CHUNK_TOKENS).map(token).collect();
        Chunks::new("", &tokens)
    }

    fn warmest(index: &PrefixIndex, chunks: &Chunks) -> Option<(WorkerId, u32)> {
        let warm = index.warmest(chunks, |_| true, |_| ())?;
        Some((warm.worker, warm.tokens / CHUNK_TOKENS))
    }

    #[test]
    fn the_one_that_holds_most_of_the_beginning_is_found() {
        let mut index = PrefixIndex::default();
        assert_eq!(warmest(&index, &prompt(1, 0, 4)), None);
        index.placed(A, &prompt(1, 2, 6), POOL);
        index.placed(B, &prompt(2, 2, 4), POOL);
        assert_eq!(warmest(&index, &prompt(1, 2, 9)), Some((A, 6)));
        assert_eq!(warmest(&index, &prompt(2, 2, 9)), Some((B, 4)));
        assert_eq!(warmest(&index, &prompt(3, 2, 9)), Some((B, 2)));
        assert_eq!(warmest(&index, &prompt(4, 0, 9)), None);
        let not_b = index.warmest(&prompt(2, 2, 9), |id| id != B, |_| ());
        assert_eq!(not_b.map(|warm| warm.worker), Some(A));
        assert_eq!(index.cached(A, &prompt(2, 2, 9)), 2 * CHUNK_TOKENS);
        index.forget(A);
        assert_eq!(warmest(&index, &prompt(1, 2, 9)), Some((B, 2)));
    }

    #[test]
    fn of_those_that_hold_as_much_the_least_loaded_is_found() {
        let mut index = PrefixIndex::default();
        for id in 0..100 {
            index.placed(WorkerId(id), &prompt(1, 0, 4), POOL);
        }
        let load = |id: WorkerId| if id == WorkerId(97) { 0 } else { 1 };
        let warm = index.warmest(&prompt(1, 0, 4), |_| true, load);
        assert_eq!(warm.map(|warm| warm.worker), Some(WorkerId(97)));
    }

    #[test]
    fn who_holds_a_chunk_holds_those_before_it() {
        let mut index = PrefixIndex::default();
        for turn in 0..2_000u32 {
            let (kind, common, chunks) = (turn * 7 % 13, turn % 5, 1 + turn * 11 % 20);
            index.placed(A, &prompt(kind, common, chunks), POOL);
            for kind in 0..13 {
                let all = prompt(kind, turn % 5, 20);
                let held = &index.workers[&A].last_use;
                let known: Vec<bool> = all.0.iter().map(|c| held.contains_key(c)).collect();
                assert!(
                    known.is_sorted_by(|before, after| before >= after),
                    "{known:?}"
                );
            }
        }
    }

    #[test]
    fn salts_share_nothing() {
        let tokens: Vec<u32> = (0..CHUNK_TOKENS).collect();
        assert_ne!(Chunks::new("a", &tokens), Chunks::new("b", &tokens));
        assert!(Chunks::new("a", &tokens[1..]).0.is_empty());
    }

    #[test]
    fn a_worker_forgets_what_was_not_used_for_longest() {
        let mut index = PrefixIndex::default();
        index.placed(A, &prompt(1, 0, 16), POOL);
        index.placed(A, &prompt(2, 0, 16), POOL);
        index.placed(A, &prompt(1, 0, 16), POOL); // 32 chunks are all
        index.placed(A, &prompt(3, 0, 8), POOL);
        assert_eq!(warmest(&index, &prompt(1, 0, 16)), Some((A, 16)));
        // The ends go first: what is left of the beginning is still of use.
        assert_eq!(warmest(&index, &prompt(2, 0, 16)), Some((A, 8)));
    }

    #[test]
    fn memory_is_bounded_by_the_pool() {
        let mut index = PrefixIndex::default();
        for kind in 0..1_000 {
            index.placed(A, &prompt(kind, 2, 10), POOL);
            index.placed(B, &prompt(0, 2, 10), POOL);
        }
        assert!(index.holders.len() <= 32 + 10, "{}", index.holders.len());
        for held in index.workers.values() {
            assert!(held.last_use.len() <= 32 && held.order.len() <= 64);
        }
    }

    #[test]
    fn hits_that_do_not_come_are_expected_less() {
        let mut index = PrefixIndex::default();
        index.placed(A, &prompt(1, 0, 16), POOL);
        for _ in 0..40 {
            index.learn(A, 2_048, 0);
        }
        assert!(index.cached(A, &prompt(1, 0, 16)) < 2_048 / 10);
        for _ in 0..40 {
            index.learn(A, 2_048, 2_048);
        }
        assert!(index.cached(A, &prompt(1, 0, 16)) > 2_048 * 8 / 10);
    }
}
