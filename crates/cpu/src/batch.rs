//! One step's input: tokens of several sequences, and where their keys and values live.

use crate::error::CpuError;
use crate::shape::{Shape, check_length};

/// Decodes and chunks of prompts alike; sequences one after the other, `T` tokens in all.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// `[T]`.
    pub tokens: &'a [i64],
    /// `[T]`, position in the sequence.
    pub positions: &'a [i64],
    /// `[T]`, block x block size + offset, where keys and values go; -1: nowhere.
    pub slots: &'a [i64],
    /// `[sequences, width]`, blocks of each sequence.
    pub tables: &'a [i32],
    /// Tokens of each sequence in this step.
    pub query_lens: &'a [usize],
    /// Tokens of each sequence in the cache after this step.
    pub context_lens: &'a [usize],
    /// Rows of `[T]` whose logits are wanted.
    pub logits_rows: &'a [i64],
}

/// The pool, `[blocks, kv_heads, layers, 2, block_size, head_dim]` of bfloat16.
#[derive(Debug, Clone, Copy)]
pub struct Pool {
    pub data: *mut u16,
    /// Numbers in it.
    pub len: usize,
    pub block_size: usize,
}

// SAFETY: whoever makes one has seen to the memory (`Model::forward`).
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// Blocks in it.
    pub fn blocks(&self, shape: &Shape) -> usize {
        self.len / self.block_len(shape)
    }

    /// Numbers of a block.
    pub fn block_len(&self, shape: &Shape) -> usize {
        shape.kv_heads * self.head_len(shape)
    }

    /// Numbers of a head in a block.
    pub fn head_len(&self, shape: &Shape) -> usize {
        shape.windows.len() * 2 * self.plane_len(shape)
    }

    /// Numbers of one layer's keys, or values, of a head in a block.
    pub fn plane_len(&self, shape: &Shape) -> usize {
        self.block_size * shape.head_dim
    }
}

impl Batch<'_> {
    /// Entries in a row of `tables`.
    pub fn width(&self) -> usize {
        self.tables.len() / self.query_lens.len().max(1)
    }

    /// Compare everything that the kernels rely on.
    ///
    /// # Errors
    /// Lengths differ, or an index points outside of vocabulary, pool or rotation.
    pub fn check(&self, shape: &Shape, pool: &Pool, rotations: usize) -> Result<(), CpuError> {
        let (rows, sequences) = (self.tokens.len(), self.query_lens.len());
        let total = self.query_lens.iter().sum();
        for (what, actual, expected) in [
            ("tokens", rows, total),
            ("positions", self.positions.len(), rows),
            ("slots", self.slots.len(), rows),
            ("context_lens", self.context_lens.len(), sequences),
            ("tables", self.tables.len(), self.width() * sequences),
            ("pool", pool.len, pool.blocks(shape) * pool.block_len(shape)),
        ] {
            check_length(what, actual, expected)?;
        }
        let blocks = pool.blocks(shape);
        all_in("token", self.tokens, shape.vocab)?;
        all_in("position", self.positions, rotations)?;
        all_in("logits row", self.logits_rows, rows)?;
        let slots = blocks * pool.block_size;
        for &slot in self.slots.iter().filter(|&&slot| slot != -1) {
            one_in("slot", slot, slots)?;
        }
        for (sequence, &context) in self.context_lens.iter().enumerate() {
            let own = self.query_lens[sequence];
            one_in("tokens of a sequence", own as i64, context + 1)?;
            let needed = context.div_ceil(pool.block_size);
            one_in("blocks of a sequence", needed as i64, self.width() + 1)?;
            for &block in &self.table(sequence)[..needed] {
                one_in("block", i64::from(block), blocks)?;
            }
        }
        Ok(())
    }

    /// Blocks of one sequence.
    pub fn table(&self, sequence: usize) -> &[i32] {
        &self.tables[sequence * self.width()..][..self.width()]
    }
}

fn all_in(what: &'static str, values: &[i64], limit: usize) -> Result<(), CpuError> {
    values
        .iter()
        .try_for_each(|&value| one_in(what, value, limit))
}

fn one_in(what: &'static str, actual: i64, limit: usize) -> Result<(), CpuError> {
    if usize::try_from(actual).is_ok_and(|value| value < limit) {
        return Ok(());
    }
    Err(CpuError::Index {
        what,
        actual,
        limit,
    })
}
