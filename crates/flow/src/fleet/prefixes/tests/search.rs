//! Random streams of events against the cache that they tell of, and searches against a
//! comparison of all workers.

use std::cell::Cell;
use std::collections::BTreeSet;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;

/// A worker: its cache, and what the router lacks of it.
struct Source {
    cache: BTreeSet<u64>,
    changed: BTreeSet<u64>,
    number: u64,
    resets: bool,
}

impl Source {
    fn message(&mut self) -> CacheEvents {
        self.number += 1;
        let reset = std::mem::take(&mut self.resets);
        let changed = std::mem::take(&mut self.changed).into_iter();
        let (stored, dropped): (Vec<u64>, Vec<u64>) =
            changed.partition(|name| self.cache.contains(name));
        let before = |name: &&u64| reset && !stored.contains(name);
        CacheEvents {
            number: self.number,
            reset,
            held: self.cache.iter().filter(before).copied().collect(),
            stored,
            dropped,
        }
    }

    fn reset(&mut self) {
        self.resets = true;
        self.changed.clear();
    }
}

#[test]
fn after_the_stream_is_drained_the_index_is_the_cache() {
    let gaps = Cell::new(0);
    tasuki_searches::run(2_000, &[], |seed| {
        gaps.set(gaps.get() + random_stream(seed))
    });
    assert!(gaps.get() > 0, "no message was missed in any stream");
}

/// Returns how many gaps were noticed.
fn random_stream(seed: u64) -> usize {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut index = index(1, true);
    let mut source = Source {
        cache: BTreeSet::new(),
        changed: BTreeSet::new(),
        number: 0,
        resets: true,
    };
    let (mut gaps, mut placed) = (0, Vec::new());
    for left in (0..rng.random_range(2..120)).rev() {
        let name = rng.random_range(0..40);
        match rng.random_range(0..24) {
            _ if left < 2 => gaps += send(&mut index, &mut source),
            0..8 => {
                source.cache.insert(name);
                source.changed.insert(name);
            }
            8..14 => {
                source.cache.remove(&name);
                source.changed.insert(name);
            }
            14..20 => gaps += send(&mut index, &mut source),
            20 => drop(source.message()), // lost
            21 => {
                index.join(A, MODEL, (SCHEME, true), POOL_TOKENS);
                source.reset();
                source.number = 0;
                placed.clear();
            }
            _ => placed.push(place(&mut index, A, &prompt(name as u32 % 5, 1, 4))),
        }
    }
    for placed in placed {
        index.on_settled(A, &placed, None);
    }
    let known: BTreeSet<u64> = index.workers[&A].names().collect();
    assert_eq!(known, source.cache);
    assert_eq!(index.holders.len(), known.len());
    gaps
}

fn send(index: &mut PrefixIndex, source: &mut Source) -> usize {
    if index.on_events(A, &source.message()) {
        return 0;
    }
    source.reset();
    1
}

#[test]
fn the_warmest_are_those_of_a_comparison_of_all_whatever_is_missing() {
    tasuki_searches::run(2_000, &[], random_holes);
}

fn random_holes(seed: u64) {
    const WORKERS: u32 = 6;
    let mut rng = StdRng::seed_from_u64(seed);
    let mut index = index(WORKERS, true);
    let prompts: Vec<Chunks> = (0..4).map(|kind| prompt(kind, kind % 3 * 2, 12)).collect();
    for id in 0..WORKERS {
        let mut held = Vec::new();
        for chunks in &prompts {
            let names = names(chunks);
            let mut names = names[..rng.random_range(0..=names.len())].to_vec();
            if rng.random_bool(0.4) && !names.is_empty() {
                names.remove(rng.random_range(0..names.len()));
            }
            held.extend(names);
        }
        assert!(index.on_events(WorkerId(id), &stored(1, held)));
    }
    let serves: Vec<[bool; 2]> = (0..WORKERS).map(|_| [rng.random(), rng.random()]).collect();
    let halves = |id: WorkerId| serves[id.0 as usize];
    for chunks in &prompts {
        let found = index.warmest(chunks, halves, |_| ());
        for half in 0..2 {
            let may = |id: &WorkerId| halves(*id)[half];
            let all = (0..WORKERS).map(WorkerId).filter(may);
            let most = all.map(|id| index.expected(id, chunks).likely).max();
            let found = found.iter().filter(|warm| may(&warm.worker));
            let found = found.map(|warm| warm.tokens).max();
            assert_eq!(found.unwrap_or(0), most.unwrap_or(0), "half {half}");
        }
    }
}
