//! Which workers hold the KV of which prompts' beginnings.
//!
//! From two sources: what a worker reports of its prefix cache, exact but for the age of its
//! last report, and what was placed there. The second is all that is known of a worker that
//! reports nothing: it is taken to hold the chunks that were placed there last, up to the size of
//! its pool, and forgets those that were not used for longest. Of a worker that reports it
//! bridges the time until a prompt is computed, so that a burst of requests that begin alike is
//! seen. What was only placed is corrected by the hits that the worker reports with first tokens.

mod events;
mod held;
mod holders;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use foldhash::fast::RandomState;
use tasuki_core::{ChunkScheme, Chunks, ModelId, Warm, WorkerId};

pub use self::events::CacheEvents;
use self::held::Held;
use self::holders::Holders;
use crate::leg::{LegKind, LegSpec};

/// Chunks that are remembered of one worker at most.
const MOST_CHUNKS: usize = 1 << 16;
/// Chunks of all workers together, some 120 bytes each: with more than 64 workers, each one's
/// part is smaller.
const MOST_CHUNKS_OF_ALL: usize = 1 << 22;
/// Workers that are compared where several hold the same.
const MOST_HOLDERS: usize = 8;
/// Holders that are looked at for one prompt: where more share its beginning, and none of them
/// may serve a half, the rest is not looked for.
const MOST_LOOKS: usize = 128;

/// By names of chunks. A long prompt has a thousand of them, and placing it looks for each.
type ByName<T> = HashMap<u64, T, RandomState>;

/// What all workers hold.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    holders: ByName<Holders>,
    workers: HashMap<WorkerId, Held>,
    /// Of the workers of each model, and how many use it.
    schemes: Vec<(ModelId, ChunkScheme, usize)>,
}

/// Tokens of a prompt's beginning that a worker is expected to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Expected {
    /// That it reported.
    pub stored: u32,
    /// That were placed there and not reported.
    pub placed: u32,
    /// All of the first, and of the second as many as are likely there.
    pub likely: u32,
}

/// A prompt that was sent to a worker, until the worker has output of it.
#[derive(Debug, Default)]
pub struct PlacedPrompt {
    chunks: Chunks,
    /// Of a prompt that is computed there.
    expected: Option<Expected>,
    used: i64,
}

impl PlacedPrompt {
    /// Tokens that need not be computed.
    pub fn cached(&self) -> u32 {
        self.expected.map_or(0, |expected| expected.likely)
    }
}

impl PrefixIndex {
    /// A worker has connected; nothing is known of its cache.
    pub fn join(
        &mut self,
        worker: WorkerId,
        model: ModelId,
        (scheme, reports): (ChunkScheme, bool),
        pool_tokens: u64,
    ) {
        self.forget(worker);
        self.workers
            .insert(worker, Held::new(model, scheme, reports, pool_tokens));
        let known = self.schemes.iter_mut();
        match known
            .into_iter()
            .find(|(m, s, _)| (*m, *s) == (model, scheme))
        {
            Some((_, _, count)) => *count += 1,
            None => self.schemes.push((model, scheme, 1)),
        }
    }

    /// The worker holds nothing any more: its process or the connection ended.
    pub fn forget(&mut self, worker: WorkerId) {
        let Some(held) = self.workers.remove(&worker) else {
            return;
        };
        for name in held.names() {
            remove_holder(&mut self.holders, name, worker);
        }
        self.schemes.retain_mut(|(model, scheme, count)| {
            *count -= usize::from((*model, *scheme) == (held.model, held.scheme));
            *count > 0
        });
    }

    /// How the workers of a model name chunks.
    pub fn schemes(&self, model: ModelId) -> Vec<ChunkScheme> {
        let of_model = self.schemes.iter().filter(|(of, _, _)| *of == model);
        of_model.map(|(_, scheme, _)| *scheme).collect()
    }

    /// A worker reports what its cache stored and dropped. False: events before these were
    /// missed, and the worker is to begin again.
    pub fn on_events(&mut self, worker: WorkerId, events: &CacheEvents) -> bool {
        let most = self.most();
        let Some(held) = self.workers.get_mut(&worker).filter(|held| held.reports) else {
            return true;
        };
        let follows = held.follows(events);
        if events.reset || !follows {
            for name in held.stored() {
                held.remove(name);
                remove_holder(&mut self.holders, name, worker);
            }
        }
        if held.awaits_reset() {
            return follows;
        }
        for &name in &events.dropped {
            if held.remove(name) {
                remove_holder(&mut self.holders, name, worker);
            }
        }
        // The end first: the beginning is to stay longest.
        for &name in events.stored.iter().rev() {
            if held.touch(name, true) {
                add_holder(&mut self.holders, name, worker);
            }
        }
        for &name in &events.held {
            if held.len() < most && held.add_oldest(name) {
                add_holder(&mut self.holders, name, worker);
            }
        }
        self.trim(worker);
        follows
    }

    /// A leg is sent to a worker.
    pub fn on_placed(&mut self, worker: WorkerId, leg: &LegSpec) -> PlacedPrompt {
        let computes = leg.kind != LegKind::Decode;
        let expected = computes.then(|| self.expected(worker, &leg.chunks));
        let mut used = 0;
        if let Some(held) = self.workers.get_mut(&worker) {
            // The end first: so who holds a chunk holds those before it, and the beginning stays
            // longest.
            for &name in leg.chunks.by(&held.scheme).iter().rev() {
                if held.touch(name, false) {
                    add_holder(&mut self.holders, name, worker);
                }
            }
            used = held.last_use();
        }
        self.trim(worker);
        PlacedPrompt {
            chunks: leg.chunks.clone(),
            expected,
            used,
        }
    }

    /// The request has output there, with so many tokens of the prompt found cached, or has
    /// ended without any.
    pub fn on_settled(&mut self, worker: WorkerId, placed: &PlacedPrompt, cached: Option<u32>) {
        let Some(held) = self.workers.get_mut(&worker) else {
            return;
        };
        let mut found = 0;
        if let (Some(expected), Some(cached)) = (placed.expected, cached) {
            held.learn(expected.placed, cached.saturating_sub(expected.stored));
            found = (cached / held.scheme.chunk_tokens()) as usize;
        }
        if held.reports {
            for name in held.settle(placed.chunks.by(&held.scheme), placed.used, found) {
                held.remove(name);
                remove_holder(&mut self.holders, name, worker);
            }
        }
    }

    /// Tokens of a prompt's beginning that a worker is expected to hold.
    pub fn expected(&self, worker: WorkerId, chunks: &Chunks) -> Expected {
        let Some(held) = self.workers.get(&worker) else {
            return Expected::default();
        };
        held.expected(held.count(chunks.by(&held.scheme)))
    }

    /// The workers that hold most of a prompt's beginning: one of those that may serve the
    /// first of two `halves`, and one of the second; it may be one for both. Of equals the one
    /// with the least `load`, among a few that came to hold it last.
    pub fn warmest<L: Ord>(
        &self,
        chunks: &Chunks,
        halves: impl Fn(WorkerId) -> [bool; 2],
        load: impl Fn(WorkerId) -> L,
    ) -> Vec<Warm> {
        let mut warmest: [Option<Warm>; 2] = [None; 2];
        for (_, names) in chunks.all() {
            for (best, found) in warmest
                .iter_mut()
                .zip(self.warmest_by(names, &halves, &load))
            {
                *best = (*best)
                    .into_iter()
                    .chain(found)
                    .max_by_key(|warm| warm.tokens);
            }
        }
        let [first, second] = warmest;
        let second =
            second.filter(|second| first.is_none_or(|first| first.worker != second.worker));
        first.into_iter().chain(second).collect()
    }

    /// Who holds a chunk holds those before it, as a rule, so the holders of the last chunks are
    /// looked at, however many workers share a beginning. An exception is a worker that has
    /// evicted a beginning while another request held a copy of it: it is passed over.
    fn warmest_by<L: Ord>(
        &self,
        names: &[u64],
        halves: impl Fn(WorkerId) -> [bool; 2],
        load: impl Fn(WorkerId) -> L,
    ) -> [Option<Warm>; 2] {
        let mut warmest = [None; 2];
        let (mut looks, mut before) = (MOST_LOOKS, &[][..]);
        for index in (0..self.held_by_any(names)).rev() {
            let holders = self
                .holders
                .get(&names[index])
                .map_or(&[][..], Holders::all);
            if holders == before {
                continue; // what was not found there is not here
            }
            before = holders;
            let missing = warmest.map(|warm| warm.is_none());
            let last = holders.iter().rev().take(looks);
            looks -= last.len();
            let may = last.filter_map(|&id| Some((id, both(halves(id), missing)?)));
            let mut may: Vec<_> = may.take(MOST_HOLDERS).collect();
            may.sort_by_cached_key(|&(id, _)| load(id));
            for (worker, wanted) in may {
                let Some(warm) = self.warm(worker, &names[..=index]) else {
                    continue;
                };
                for (best, wanted) in warmest.iter_mut().zip(wanted) {
                    *best = best.or(wanted.then_some(warm));
                }
            }
            if looks == 0 || warmest.iter().all(Option::is_some) {
                break;
            }
        }
        warmest
    }

    /// A number of first chunks beyond which no worker holds all; found by bisection. Where a
    /// beginning is held by nobody it may be larger than need be, never smaller.
    fn held_by_any(&self, names: &[u64]) -> usize {
        // All before `held` may be held by one worker, the chunk at `gone` is held by none.
        let (mut held, mut gone) = (0, names.len());
        while held < gone {
            let middle = held + (gone - held) / 2;
            if self.holders.contains_key(&names[middle]) {
                held = middle + 1;
            } else {
                gone = middle;
            }
        }
        held
    }

    /// The worker, if it holds all of these chunks.
    fn warm(&self, worker: WorkerId, names: &[u64]) -> Option<Warm> {
        let held = self.workers.get(&worker)?;
        let count = held.count(names);
        let tokens = held.expected(count).likely;
        (count.0 == names.len() && tokens > 0).then_some(Warm { worker, tokens })
    }

    /// Chunks that a worker is taken to hold.
    pub fn chunks(&self, worker: WorkerId) -> usize {
        self.workers.get(&worker).map_or(0, Held::len)
    }

    /// Chunks of one worker at most.
    fn most(&self) -> usize {
        MOST_CHUNKS.min(MOST_CHUNKS_OF_ALL / self.workers.len().max(1))
    }

    fn trim(&mut self, worker: WorkerId) {
        let most = self.most();
        if let Some(held) = self.workers.get_mut(&worker) {
            while let Some(name) = held.surplus(most) {
                held.remove(name);
                remove_holder(&mut self.holders, name, worker);
            }
        }
    }
}

/// What is true in both; `None`: nothing is.
fn both(one: [bool; 2], other: [bool; 2]) -> Option<[bool; 2]> {
    let both = [one[0] && other[0], one[1] && other[1]];
    both.contains(&true).then_some(both)
}

fn add_holder(holders: &mut ByName<Holders>, name: u64, worker: WorkerId) {
    holders
        .entry(name)
        .and_modify(|of_chunk| of_chunk.add(worker))
        .or_insert(Holders::One(worker));
}

fn remove_holder(holders: &mut ByName<Holders>, name: u64, worker: WorkerId) {
    if let Some(of_chunk) = holders.get_mut(&name)
        && !of_chunk.remove(worker)
    {
        holders.remove(&name);
    }
}
