//! Which record holds the longest beginning of a prompt.
//!
//! A chunk's name stands for all tokens up to its end, so whoever begins with the last chunk that
//! two prompts have in common begins with all before it. The first record that had a chunk stands
//! for it. Two maps bound the memory: when the newer one is full, what was in the older one and was
//! not used since is forgotten.

use std::collections::HashMap;

/// Names in one of the two maps: of both together, some 30 MB.
const NAMES: usize = 1 << 19;

/// See the module.
#[derive(Debug)]
pub struct Sharing {
    newer: HashMap<u64, u32>,
    older: HashMap<u64, u32>,
    most: usize,
}

impl Default for Sharing {
    fn default() -> Self {
        Self::of(NAMES)
    }
}

impl Sharing {
    fn of(most: usize) -> Self {
        Self {
            newer: HashMap::new(),
            older: HashMap::new(),
            most,
        }
    }

    /// Forgets all: a new file begins.
    pub fn clear(&mut self) {
        self.newer.clear();
        self.older.clear();
    }

    /// Adds a record's chunks. Returns the earlier record that begins like it for longest, and how
    /// many chunks they share.
    pub fn add(&mut self, record: u32, chunks: &[u64]) -> Option<(u32, usize)> {
        let last = |at: usize| Some((self.holder(chunks[at])?, at + 1));
        let found = (0..chunks.len()).rev().find_map(last);
        let shared = found.map_or(0, |(_, shared)| shared);
        for (at, &name) in chunks.iter().enumerate() {
            match self.holder(name).filter(|_| at < shared) {
                Some(holder) => self.keep(name, holder),
                // Forgotten within a beginning that is known: it is found again by this one.
                None => self.keep(name, record),
            }
        }
        found
    }

    fn holder(&self, name: u64) -> Option<u32> {
        let newer = self.newer.get(&name);
        newer.or_else(|| self.older.get(&name)).copied()
    }

    fn keep(&mut self, name: u64, holder: u32) {
        if self.newer.len() >= self.most && !self.newer.contains_key(&name) {
            self.older = std::mem::take(&mut self.newer);
        }
        self.newer.insert(name, holder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_beginning_is_found() {
        let mut sharing = Sharing::default();
        assert_eq!(sharing.add(0, &[1, 2, 3]), None);
        assert_eq!(sharing.add(1, &[1, 2, 4, 5]), Some((0, 2)));
        assert_eq!(sharing.add(2, &[1, 2, 4, 6]), Some((1, 3)));
        assert_eq!(sharing.add(3, &[1, 9]), Some((0, 1)));
        assert_eq!(sharing.add(4, &[7]), None);
        assert_eq!(sharing.add(5, &[]), None);
        sharing.clear();
        assert_eq!(sharing.add(0, &[1, 2, 3]), None);
    }

    #[test]
    fn memory_is_bounded_and_what_is_used_stays() {
        let mut sharing = Sharing::of(10);
        sharing.add(0, &[1, 2]);
        for record in 1..50 {
            assert_eq!(
                sharing.add(record, &[1, 2, 1_000 + u64::from(record)]),
                Some((0, 2))
            );
            assert!(sharing.newer.len() <= 10 && sharing.older.len() <= 10);
        }
        assert_eq!(
            sharing.add(50, &[1, 2, 1_001]),
            Some((0, 2)),
            "it is long forgotten"
        );
    }
}
