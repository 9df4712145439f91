//! A worker's blocks: how many are held, and which chunks of prompts are in the prefix cache.
//!
//! Blocks have no numbers. A chunk that some sequence holds counts once; one that none holds stays
//! until its room is needed, the least recently used first.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// See the module.
#[derive(Debug)]
pub struct Pool {
    total: u32,
    chunk_blocks: u32,
    /// Held by sequences.
    held: u32,
    /// Of chunks that no sequence holds.
    evictable: u32,
    chunks: Chunks,
    /// Chunks without holders in the order of their release; entries may be out of date.
    released: VecDeque<(u64, u64)>,
    clock: u64,
    /// What was stored and dropped since it was asked for last.
    pub stored: Vec<u64>,
    pub dropped: Vec<u64>,
    /// Whether anybody asks for it, and how often they were told.
    pub tells: bool,
    pub events: u64,
}

type Chunks = HashMap<u64, Chunk, BuildHasherDefault<NameHasher>>;

#[derive(Debug, Clone, Copy)]
struct Chunk {
    holders: u32,
    /// Of the last release.
    stamp: u64,
}

/// Names are hashes already.
#[derive(Debug, Default)]
struct NameHasher(u64);

impl Hasher for NameHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// Whether the chunk was not held since this release.
fn is_current(chunks: &Chunks, (stamp, name): (u64, u64)) -> bool {
    let known = chunks.get(&name);
    known.is_some_and(|chunk| chunk.holders == 0 && chunk.stamp == stamp)
}

impl Pool {
    pub fn new(total: u32, chunk_blocks: u32, tells: bool) -> Self {
        Self {
            total,
            chunk_blocks,
            held: 0,
            evictable: 0,
            chunks: HashMap::default(),
            released: VecDeque::new(),
            clock: 0,
            stored: Vec::new(),
            dropped: Vec::new(),
            tells,
            events: 0,
        }
    }

    /// Chunks that there is room for.
    pub fn most_chunks(&self) -> usize {
        (self.total / self.chunk_blocks) as usize
    }

    /// A sequence that has ended has left these chunks.
    pub fn remember(&mut self, names: &[u64]) {
        let names = &names[..names.len().min(self.most_chunks())];
        self.take(names.len() as u32 * self.chunk_blocks);
        self.store(names);
        self.release(names);
    }

    /// Free or evictable.
    pub fn available(&self) -> u32 {
        self.total.saturating_sub(self.held)
    }

    /// Of these chunks, how many from the first on are there.
    pub fn cached(&self, names: &[u64]) -> usize {
        let there = names
            .iter()
            .position(|name| !self.chunks.contains_key(name));
        there.unwrap_or(names.len())
    }

    /// Blocks of these chunks, all cached, that no sequence holds.
    pub fn unheld_blocks(&self, names: &[u64]) -> u32 {
        let unheld = |name: &&u64| self.chunks.get(*name).is_some_and(|c| c.holders == 0);
        names.iter().filter(unheld).count() as u32 * self.chunk_blocks
    }

    /// A sequence holds these cached chunks.
    pub fn hold(&mut self, names: &[u64]) {
        for name in names {
            if let Some(chunk) = self.chunks.get_mut(name) {
                if chunk.holders == 0 {
                    self.evictable -= self.chunk_blocks;
                    self.held += self.chunk_blocks;
                }
                chunk.holders += 1;
            }
        }
    }

    /// Takes blocks that are available.
    pub fn take(&mut self, blocks: u32) {
        self.held += blocks;
        while self.held + self.evictable > self.total && self.evictable > 0 {
            self.evict();
        }
    }

    /// Gives blocks back that no chunk names.
    pub fn give(&mut self, blocks: u32) {
        self.held -= blocks;
    }

    /// Blocks that a sequence holds have these chunks in them now: others find them.
    pub fn store(&mut self, names: &[u64]) {
        for &name in names {
            match self.chunks.get_mut(&name) {
                // Computed twice: one copy is enough.
                Some(chunk) => {
                    if chunk.holders == 0 {
                        self.evictable -= self.chunk_blocks;
                    } else {
                        self.held -= self.chunk_blocks;
                    }
                    chunk.holders += 1;
                }
                None => {
                    let chunk = Chunk {
                        holders: 1,
                        stamp: 0,
                    };
                    self.chunks.insert(name, chunk);
                    if self.tells {
                        self.stored.push(name);
                    }
                }
            }
        }
    }

    /// A sequence holds these chunks no more.
    pub fn release(&mut self, names: &[u64]) {
        // The end first: the beginning is to stay longest.
        for name in names.iter().rev() {
            if let Some(chunk) = self.chunks.get_mut(name) {
                chunk.holders -= 1;
                if chunk.holders == 0 {
                    self.clock += 1;
                    chunk.stamp = self.clock;
                    self.held -= self.chunk_blocks;
                    self.evictable += self.chunk_blocks;
                    self.released.push_back((self.clock, *name));
                }
            }
        }
        if self.released.len() > 2 * self.chunks.len() + names.len() {
            let chunks = &self.chunks;
            self.released.retain(|entry| is_current(chunks, *entry));
        }
    }

    fn evict(&mut self) {
        while let Some((stamp, name)) = self.released.pop_front() {
            if is_current(&self.chunks, (stamp, name)) {
                self.chunks.remove(&name);
                self.evictable -= self.chunk_blocks;
                if self.tells {
                    self.dropped.push(name);
                }
                return;
            }
        }
    }

    /// The process ended.
    pub fn clear(&mut self) {
        *self = Self::new(self.total, self.chunk_blocks, self.tells);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_released_stays_until_its_room_is_needed() {
        let mut pool = Pool::new(10, 2, true);
        pool.take(5);
        pool.store(&[1, 2]);
        assert_eq!((pool.available(), pool.cached(&[1, 2, 3])), (5, 2));
        pool.release(&[1, 2]);
        pool.give(1);
        assert_eq!((pool.available(), pool.cached(&[1, 2])), (10, 2));
        pool.take(7);
        // The end went first.
        assert_eq!(
            (pool.cached(&[1, 2]), pool.dropped.as_slice()),
            (1, &[2][..])
        );
        pool.hold(&[1]);
        assert_eq!((pool.available(), pool.unheld_blocks(&[1])), (1, 0));
    }

    #[test]
    fn what_is_remembered_gives_way_to_what_comes_later() {
        let mut pool = Pool::new(10, 2, true);
        pool.remember(&[1, 2, 3]);
        pool.remember(&[1, 2, 4]);
        assert_eq!((pool.available(), pool.cached(&[1, 2, 4])), (10, 3));
        pool.remember(&[5, 6]);
        assert_eq!((pool.cached(&[1, 2, 3]), pool.cached(&[5, 6])), (2, 2));
        pool.remember(&[7, 8, 9, 10, 11, 12]);
        assert_eq!((pool.available(), pool.cached(&[7, 8, 9, 10, 11])), (10, 5));
    }

    #[test]
    fn a_prompt_that_is_used_again_and_again_takes_no_more_memory() {
        let mut pool = Pool::new(10, 2, true);
        pool.remember(&[1, 2, 3]);
        for _ in 0..100 {
            pool.hold(&[1, 2]);
            pool.release(&[1, 2]);
        }
        assert!(pool.released.len() <= 8, "{} entries", pool.released.len());
        // The one that was released first goes first.
        pool.take(6);
        assert_eq!((pool.cached(&[3]), pool.cached(&[1, 2])), (0, 2));
    }

    #[test]
    fn what_is_computed_twice_is_kept_once() {
        let mut pool = Pool::new(10, 2, true);
        pool.take(2);
        pool.store(&[1]);
        pool.take(2);
        pool.store(&[1]);
        assert_eq!((pool.available(), pool.stored.len()), (8, 1));
        pool.release(&[1]);
        assert_eq!(pool.available(), 8);
        pool.release(&[1]);
        assert_eq!(pool.available(), 10);
    }
}
