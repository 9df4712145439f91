//! Keys and values of a stretch of one sequence, from the pool into panels of 64.
//!
//! ```text
//! scores   panel of 64 keys        pair = two neighbouring numbers of a head
//! output   panel of 64 numbers     pair = two neighbouring tokens
//! ```
//!
//! A plane of the pool holds a token's numbers side by side: keys are transposed,
//! values interleaved.

use crate::simd::{Floats, HALF, SQUARE, Simd, prefetch};

/// Columns of a panel.
pub const COLUMNS: usize = 64;

/// bfloat16 numbers of a cache line.
const LINE: usize = 32;

/// One head's keys, or values, of a sequence in one layer of the pool.
#[derive(Clone, Copy)]
pub struct Plane<'a> {
    /// At block 0.
    pub data: *const u16,
    /// Numbers from a block to the next.
    pub block_len: usize,
    pub block_size: usize,
    pub head_dim: usize,
    /// Blocks of the sequence.
    pub table: &'a [i32],
}

impl Plane<'_> {
    /// Where a token is.
    pub fn token(&self, at: usize) -> *const u16 {
        let block = self.table[at / self.block_size] as usize * self.block_len;
        self.data
            .wrapping_add(block + at % self.block_size * self.head_dim)
    }

    /// Where 16 tokens from `at` on are; behind `end` the last one again.
    #[inline]
    pub fn tokens(&self, at: usize, end: usize) -> [*const u16; SQUARE] {
        let (first, left) = (self.token(at), self.block_size - at % self.block_size);
        let last = end - 1 - at;
        std::array::from_fn(|i| match i.min(last) {
            i if i < left => first.wrapping_add(i * self.head_dim),
            i => self.token(at + i),
        })
    }

    /// Read a number of every line of tokens `begin..end`, to have them in the cache.
    ///
    /// Blocks lie anywhere, so that nobody foresees them, and what packs them has too much
    /// else to do to wait for many lines at once. (Prefetches in such number are dropped.)
    ///
    /// # Safety
    /// The plane holds the tokens.
    pub unsafe fn fetch(&self, begin: usize, end: usize) {
        let mut at = begin;
        while at < end {
            let count = (self.block_size - at % self.block_size).min(end - at);
            let first = self.token(at);
            for line in (0..count * self.head_dim).step_by(LINE) {
                // SAFETY: the caller's promise.
                unsafe { first.add(line).read_volatile() };
            }
            at += count;
        }
    }
}

/// Pack the keys of tokens `begin..end` into panels of `head_dim / 2` pairs each.
///
/// A last panel is filled up with the last key. With each 16 keys as many tokens are
/// prefetched, side by side from where `ahead` says on.
///
/// # Safety
/// The processor runs the instance; the plane holds the tokens; `to` has room for the panels.
pub unsafe fn pack_keys<S: Simd>(
    plane: Plane<'_>,
    begin: usize,
    end: usize,
    to: *mut u16,
    ahead: impl Fn(usize) -> *const u16,
) {
    let (dim, pairs) = (plane.head_dim, plane.head_dim / 2);
    // SAFETY: the caller's promise; a panel has room for 16 keys at every `side`.
    let run = || unsafe {
        for at in (begin..end).step_by(SQUARE) {
            let (keys, ahead) = (plane.tokens(at, end), ahead(at));
            let panel = (at - begin) / COLUMNS;
            let side = (at - begin) % COLUMNS;
            let to = to.cast::<u32>().add(panel * pairs * COLUMNS + side);
            for pair in (0..pairs).step_by(SQUARE) {
                for i in 0..SQUARE {
                    prefetch(ahead.wrapping_add(i * dim + 2 * pair));
                }
                let from = keys.map(|key| key.wrapping_add(2 * pair));
                let count = SQUARE.min(pairs - pair);
                S::Floats::transpose(&from, count, to.add(pair * COLUMNS), COLUMNS);
            }
        }
    };
    // SAFETY: the caller's promise.
    unsafe { S::vectorize(run) };
}

/// Pack the values of tokens `begin..end` into panels of `(end - begin + 1) / 2` pairs.
///
/// A token too many is 0, and so are numbers beyond `head_dim`.
///
/// # Safety
/// As `pack_keys`.
pub unsafe fn pack_values<S: Simd>(plane: Plane<'_>, begin: usize, end: usize, to: *mut u16) {
    let (dim, pairs) = (plane.head_dim, (end - begin).div_ceil(2));
    let mut tokens = [std::ptr::null(); SQUARE];
    let none = [0u16; HALF];
    // SAFETY: the caller's promise; a token has `head_dim` numbers.
    let run = || unsafe {
        for pair in 0..pairs {
            let place = 2 * pair % SQUARE;
            if place == 0 {
                tokens = plane.tokens(begin + 2 * pair, end);
            }
            let (even, odd) = (tokens[place], tokens[place + 1]);
            for column in (0..dim.next_multiple_of(COLUMNS)).step_by(HALF) {
                let place = (column / COLUMNS * pairs + pair) * 2 * COLUMNS + column % COLUMNS * 2;
                let even = even.wrapping_add(column);
                let odd = match begin + 2 * pair + 1 < end {
                    true => odd.wrapping_add(column),
                    false => none.as_ptr(),
                };
                let count = dim.saturating_sub(column);
                S::Floats::interleave(even, odd, count, to.add(place));
            }
        }
    };
    // SAFETY: the caller's promise.
    unsafe { S::vectorize(run) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::each_instance;

    each_instance!(panels_hold_what_the_pool_holds);

    fn panels_hold_what_the_pool_holds<S: Simd>() {
        for (head_dim, block_size) in [(64, 16), (80, 16), (16, 8), (6, 32), (128, 5)] {
            let table = [3, 0, 2, 4, 1, 7, 6, 5, 8, 11, 10, 9];
            let block_len = 3 * block_size * head_dim;
            let pool: Vec<u16> = (0..12 * block_len).map(|i| (i % 65_521) as u16).collect();
            let data = pool[block_size * head_dim..].as_ptr();
            let plane = Plane {
                data,
                block_len,
                block_size,
                head_dim,
                table: &table,
            };
            let number = |token: usize, i: usize| {
                let block = table[token / block_size] as usize;
                let at = block * block_len + (block_size + token % block_size) * head_dim;
                pool[at + i]
            };
            let (begin, end) = (2, 2 + 37);
            let mut to = vec![7; COLUMNS * head_dim.next_multiple_of(COLUMNS)];
            // SAFETY: the machine can; 37 tokens are a panel of keys.
            unsafe { pack_keys::<S>(plane, begin, end, to.as_mut_ptr(), |at| plane.token(at)) };
            for token in begin..end {
                let (panel, column) = ((token - begin) / COLUMNS, (token - begin) % COLUMNS);
                for i in 0..head_dim {
                    let at = (panel * (head_dim / 2) + i / 2) * 2 * COLUMNS + 2 * column + i % 2;
                    assert_eq!(to[at], number(token, i), "key {token}, number {i}");
                }
            }
            // SAFETY: as above.
            unsafe { pack_values::<S>(plane, begin, end, to.as_mut_ptr()) };
            for place in 0..38 {
                for i in 0..head_dim {
                    let at = ((i / COLUMNS) * 19 + place / 2) * 2 * COLUMNS;
                    let at = at + 2 * (i % COLUMNS) + place % 2;
                    let expected = if place < 37 {
                        number(begin + place, i)
                    } else {
                        0
                    };
                    assert_eq!(to[at], expected, "value {place}, number {i}");
                }
            }
        }
    }
}
