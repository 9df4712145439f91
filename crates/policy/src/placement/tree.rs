//! The least loads of many workers: a tree in flat arrays, with eight entries in a block.
//!
//! ```text
//! level 1   [ least of block 0 | least of block 1 | … ]        one entry for each block below
//! level 0   [ slot 0 … slot 7 ] [ slot 8 … slot 15 ] …         one entry for each worker
//! ```
//!
//! A cost that grows with each part of a load is nowhere below an entry less than at the entry.

use tasuki_core::Load;

const WIDTH: usize = 8;

/// A worker, or the best of each part that is found among the workers below.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Entry {
    pub load: Load,
    /// The longest request that it takes. 0: it takes none.
    pub limit_tokens: u32,
}

impl Entry {
    /// No worker.
    pub const NONE: Entry = Entry {
        load: Load {
            backlog_tokens: f64::INFINITY,
            sequences: f64::INFINITY,
            stalled_sequences: f64::INFINITY,
            kv_tokens: f64::INFINITY,
            spare_tokens: 0.0,
        },
        limit_tokens: 0,
    };
}

/// Entries by parts, so that the costs of all are computed together.
#[derive(Debug, Clone)]
struct Block {
    backlog_tokens: [f64; WIDTH],
    sequences: [f64; WIDTH],
    stalled_sequences: [f64; WIDTH],
    kv_tokens: [f64; WIDTH],
    spare_tokens: [f64; WIDTH],
    limit_tokens: [u32; WIDTH],
}

impl Block {
    fn new() -> Self {
        let Entry { load, limit_tokens } = Entry::NONE;
        Self {
            backlog_tokens: [load.backlog_tokens; WIDTH],
            sequences: [load.sequences; WIDTH],
            stalled_sequences: [load.stalled_sequences; WIDTH],
            kv_tokens: [load.kv_tokens; WIDTH],
            spare_tokens: [load.spare_tokens; WIDTH],
            limit_tokens: [limit_tokens; WIDTH],
        }
    }

    fn load(&self, at: usize) -> Load {
        Load {
            backlog_tokens: self.backlog_tokens[at],
            sequences: self.sequences[at],
            stalled_sequences: self.stalled_sequences[at],
            kv_tokens: self.kv_tokens[at],
            spare_tokens: self.spare_tokens[at],
        }
    }

    fn set(&mut self, at: usize, entry: Entry) {
        self.backlog_tokens[at] = entry.load.backlog_tokens;
        self.sequences[at] = entry.load.sequences;
        self.stalled_sequences[at] = entry.load.stalled_sequences;
        self.kv_tokens[at] = entry.load.kv_tokens;
        self.spare_tokens[at] = entry.load.spare_tokens;
        self.limit_tokens[at] = entry.limit_tokens;
    }

    fn least(&self) -> Entry {
        let least = |parts: &[f64; WIDTH]| parts.iter().copied().fold(f64::INFINITY, f64::min);
        Entry {
            load: Load {
                backlog_tokens: least(&self.backlog_tokens),
                sequences: least(&self.sequences),
                stalled_sequences: least(&self.stalled_sequences),
                kv_tokens: least(&self.kv_tokens),
                spare_tokens: self.spare_tokens.iter().copied().fold(0.0, f64::max),
            },
            limit_tokens: self.limit_tokens.iter().copied().max().unwrap_or(0),
        }
    }
}

/// Workers' loads by slot.
#[derive(Debug, Clone)]
pub struct Tree {
    /// From the workers up to a single block.
    levels: Vec<Vec<Block>>,
}

impl Default for Tree {
    fn default() -> Self {
        Self {
            levels: vec![vec![Block::new()]],
        }
    }
}

impl Tree {
    /// The best of each part among all workers.
    pub fn least(&self) -> Entry {
        let top = self.levels.last().and_then(|level| level.first());
        top.map_or(Entry::NONE, Block::least)
    }

    /// Replaces the worker of a slot; the tree grows to have that slot.
    pub fn set(&mut self, slot: usize, entry: Entry) {
        self.grow(slot);
        let (mut at, mut entry) = (slot, entry);
        for level in &mut self.levels {
            let block = &mut level[at / WIDTH];
            block.set(at % WIDTH, entry);
            (at, entry) = (at / WIDTH, block.least());
        }
    }

    fn grow(&mut self, slot: usize) {
        let mut blocks = slot / WIDTH + 1;
        for level in &mut self.levels {
            if level.len() < blocks {
                level.resize_with(blocks, Block::new);
            }
            blocks = level.len().div_ceil(WIDTH);
        }
        while let Some(top) = self.levels.last()
            && top.len() > 1
        {
            let mut level = vec![Block::new(); top.len().div_ceil(WIDTH)];
            for (at, block) in top.iter().enumerate() {
                level[at / WIDTH].set(at % WIDTH, block.least());
            }
            self.levels.push(level);
        }
    }

    /// Shows the workers that take `tokens` tokens and cost no more than the limit, cheap
    /// ones early, and others only where they share a block with those. `see` gets a slot
    /// and its cost and returns the limit from then on, which never grows.
    pub fn search(
        &self,
        tokens: u64,
        limit_s: f64,
        cost_s: impl Fn(&Load) -> f64,
        mut see: impl FnMut(usize, f64) -> f64,
    ) {
        let search = Search {
            tree: self,
            tokens,
            cost_s,
        };
        search.block(self.levels.len() - 1, 0, limit_s, &mut see);
    }
}

struct Search<'a, Cost> {
    tree: &'a Tree,
    tokens: u64,
    cost_s: Cost,
}

impl<Cost: Fn(&Load) -> f64> Search<'_, Cost> {
    fn block(
        &self,
        level: usize,
        number: usize,
        limit_s: f64,
        see: &mut impl FnMut(usize, f64) -> f64,
    ) -> f64 {
        let block = &self.tree.levels[level][number];
        let mut costs = [0.0; WIDTH];
        for (at, cost_s) in costs.iter_mut().enumerate() {
            *cost_s = (self.cost_s)(&block.load(at));
        }
        let takes = |at: usize| u64::from(block.limit_tokens[at]) >= self.tokens.max(1);
        let mut limit_s = limit_s;
        if level == 0 {
            for (at, &cost_s) in costs.iter().enumerate() {
                if cost_s <= limit_s && takes(at) {
                    limit_s = see(number * WIDTH + at, cost_s);
                }
            }
            return limit_s;
        }
        // The most promising one first: its workers lower the limit for the others.
        let able = (0..WIDTH).filter(|&at| takes(at));
        let first = able.clone().min_by(|&a, &b| costs[a].total_cmp(&costs[b]));
        let others = able.filter(|&at| Some(at) != first);
        for at in first.into_iter().chain(others) {
            if costs[at] <= limit_s {
                limit_s = self.block(level - 1, number * WIDTH + at, limit_s, see);
            }
        }
        limit_s
    }
}
