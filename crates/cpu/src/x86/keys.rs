//! Keys and values of a stretch of one sequence, from the pool into panels of 64.
//!
//! ```text
//! scores   panel of 64 keys        pair = two neighbouring numbers of a head
//! output   panel of 64 numbers     pair = two neighbouring tokens
//! ```
//!
//! A plane of the pool holds a token's numbers side by side: keys are transposed,
//! values interleaved.

use std::arch::x86_64::*;

use super::vector::{LANES, first};

/// Columns of a panel.
pub const COLUMNS: usize = 64;

/// bfloat16 numbers of a vector.
pub const HALF: usize = 32;

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
    pub fn tokens(&self, at: usize, end: usize) -> [*const u16; LANES] {
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

/// Prefetch the line of a number that will be needed.
#[inline]
pub fn prefetch(at: *const u16) {
    // SAFETY: a prefetch may point anywhere.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
}

/// Pack the keys of tokens `begin..end` into panels of `head_dim / 2` pairs each.
///
/// A last panel is filled up with the last key. With each 16 keys as many tokens are
/// prefetched, side by side from where `ahead` says on.
///
/// # Safety
/// The plane holds the tokens; `to` has room for the panels.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub unsafe fn pack_keys(
    plane: Plane<'_>,
    begin: usize,
    end: usize,
    to: *mut u16,
    ahead: impl Fn(usize) -> *const u16,
) {
    let (dim, pairs) = (plane.head_dim, plane.head_dim / 2);
    for at in (begin..end).step_by(LANES) {
        let (keys, ahead) = (plane.tokens(at, end), ahead(at));
        let panel = (at - begin) / COLUMNS;
        let side = (at - begin) % COLUMNS;
        // SAFETY: the caller's promise; `side` is 0 or 16 keys.
        let to = unsafe { to.cast::<i32>().add(panel * pairs * COLUMNS + side) };
        for pair in (0..pairs).step_by(LANES) {
            let mask = first(pairs - pair);
            let mut rows = [_mm512_setzero_si512(); LANES];
            for (row, key) in rows.iter_mut().zip(keys) {
                // SAFETY: a token has `pairs` pairs.
                *row = unsafe { _mm512_maskz_loadu_epi32(mask, key.cast::<i32>().add(pair)) };
            }
            for i in 0..LANES {
                prefetch(ahead.wrapping_add(i * dim + 2 * pair));
            }
            let columns = transpose(rows);
            for (i, &column) in columns.iter().enumerate() {
                if pair + i < pairs {
                    // SAFETY: within the panel.
                    unsafe { _mm512_storeu_si512(to.add((pair + i) * COLUMNS).cast(), column) };
                }
            }
        }
    }
}

/// Pack the values of tokens `begin..end` into panels of `(end - begin + 1) / 2` pairs.
///
/// A token too many is 0, and so are numbers beyond `head_dim`.
///
/// # Safety
/// As `pack_keys`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub unsafe fn pack_values(plane: Plane<'_>, begin: usize, end: usize, to: *mut u16) {
    let pairs = (end - begin).div_ceil(2);
    let (low, high) = interleaving();
    let mut tokens = [std::ptr::null(); LANES];
    for pair in 0..pairs {
        let place = 2 * pair % LANES;
        if place == 0 {
            tokens = plane.tokens(begin + 2 * pair, end);
        }
        let (even, odd) = (tokens[place], tokens[place + 1]);
        let odd_mask = if begin + 2 * pair + 1 < end { !0 } else { 0 };
        for column in (0..plane.head_dim.next_multiple_of(COLUMNS)).step_by(HALF) {
            let left = plane.head_dim.saturating_sub(column);
            let mask = if left >= HALF { !0 } else { (1 << left) - 1 };
            let place = (column / COLUMNS * pairs + pair) * 2 * COLUMNS + column % COLUMNS * 2;
            // SAFETY: a token has `head_dim` numbers; the place is within the panel.
            unsafe {
                let even = even.wrapping_add(column).cast();
                let even = _mm512_maskz_loadu_epi16(mask, even);
                let odd = odd.wrapping_add(column).cast();
                let odd = _mm512_maskz_loadu_epi16(mask & odd_mask, odd);
                let both = _mm512_permutex2var_epi16(even, low, odd);
                _mm512_storeu_si512(to.add(place).cast(), both);
                let both = _mm512_permutex2var_epi16(even, high, odd);
                _mm512_storeu_si512(to.add(place + HALF).cast(), both);
            }
        }
    }
}

/// Indices that take numbers of two vectors in turn: their first halves, and their second.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub fn interleaving() -> (__m512i, __m512i) {
    let from = |begin: u16| -> [u16; HALF] {
        std::array::from_fn(|i| begin + i as u16 / 2 + (i as u16 % 2) * HALF as u16)
    };
    let (low, high) = (from(0), from(16));
    // SAFETY: arrays of 512 bits.
    unsafe {
        (
            _mm512_loadu_si512(low.as_ptr().cast()),
            _mm512_loadu_si512(high.as_ptr().cast()),
        )
    }
}

/// Rows and columns of 16 x 16 numbers of 32 bits change places.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn transpose(mut r: [__m512i; LANES]) -> [__m512i; LANES] {
    let mut t = r;
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for i in 0..4 {
        for j in 0..2 {
            r[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
            r[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
        }
    }
    // r[4 i + j], quarter q: column 4 q + j of rows 4 i .. 4 i + 3.
    for j in 0..4 {
        let (a, b, c, d) = (r[j], r[4 + j], r[8 + j], r[12 + j]);
        let ab_even = _mm512_shuffle_i32x4::<0x88>(a, b);
        let ab_odd = _mm512_shuffle_i32x4::<0xdd>(a, b);
        let cd_even = _mm512_shuffle_i32x4::<0x88>(c, d);
        let cd_odd = _mm512_shuffle_i32x4::<0xdd>(c, d);
        t[j] = _mm512_shuffle_i32x4::<0x88>(ab_even, cd_even);
        t[4 + j] = _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd);
        t[8 + j] = _mm512_shuffle_i32x4::<0xdd>(ab_even, cd_even);
        t[12 + j] = _mm512_shuffle_i32x4::<0xdd>(ab_odd, cd_odd);
    }
    t
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::x86::supported;

    #[test]
    fn panels_hold_what_the_pool_holds() {
        if supported().is_some() {
            return;
        }
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
            unsafe { pack_keys(plane, begin, end, to.as_mut_ptr(), |at| plane.token(at)) };
            for token in begin..end {
                let (panel, column) = ((token - begin) / COLUMNS, (token - begin) % COLUMNS);
                for i in 0..head_dim {
                    let at = (panel * (head_dim / 2) + i / 2) * 2 * COLUMNS + 2 * column + i % 2;
                    assert_eq!(to[at], number(token, i), "key {token}, number {i}");
                }
            }
            // SAFETY: as above.
            unsafe { pack_values(plane, begin, end, to.as_mut_ptr()) };
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
