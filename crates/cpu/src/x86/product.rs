//! Products of bfloat16 rows with packed weights, summed in float32.
//!
//! Every number of the result is one chain of sums in the order of the inputs,
//! whatever the number of rows and whoever computes it: a token's logits do not
//! depend on the batch around it.
//!
//! A *tile* is up to 8 rows by 3 vectors of outputs, 24 sums in registers: two
//! multiplications a cycle then wait neither for one another nor for loads. One row
//! alone waits for memory, so the panel is prefetched well ahead.

use std::arch::x86_64::*;
use std::ops::Range;

use super::panels::{Panels, WIDTH};

/// Most rows of a tile.
pub const ROWS: usize = 8;
const LANES: usize = 16;
const AHEAD_BYTES: usize = 12 << 10;

/// bfloat16 rows in memory, `stride` numbers from one to the next.
#[derive(Clone, Copy)]
pub struct Rows {
    pub data: *const u16,
    pub stride: usize,
}

impl Rows {
    /// The rows from `row` on, from their number `column` on.
    pub fn at(self, row: usize, column: usize) -> Self {
        Self {
            data: self.data.wrapping_add(row * self.stride + column),
            ..self
        }
    }
}

/// Where a tile's sums go, `stride` numbers from a row to the next.
#[derive(Clone, Copy)]
pub struct Sums {
    pub data: *mut f32,
    pub stride: usize,
}

impl Sums {
    /// As `Rows::at`.
    pub fn at(self, row: usize, column: usize) -> Self {
        Self {
            data: self.data.wrapping_add(row * self.stride + column),
            ..self
        }
    }
}

/// The sums of one tile for each of `P` neighbouring panels.
pub type Tile<const P: usize> = [[f32; ROWS * WIDTH]; P];

/// Multiply `rows` rows with the panels `P * group ..` of each group of a range.
///
/// `out(first_row, rows, group, sums)` takes every tile when it is done, group by group.
///
/// # Safety
/// The rows hold as many numbers as the weight has inputs, an odd one a 0 more.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub unsafe fn product<const P: usize>(
    rows: Rows,
    count: usize,
    weight: &Panels,
    groups: Range<usize>,
    mut out: impl FnMut(usize, usize, usize, &Tile<P>),
) {
    let mut sums: Tile<P> = [[0.0; ROWS * WIDTH]; P];
    for group in groups {
        for (first, tile) in tiles(count, ROWS) {
            let a = rows.at(first, 0);
            for (side, sums) in sums.iter_mut().enumerate() {
                let panel = weight.panel(P * group + side).as_ptr();
                let sums = Sums {
                    data: sums.as_mut_ptr(),
                    stride: WIDTH,
                };
                // SAFETY: a panel holds `pairs` pairs, a tile `ROWS` rows of `WIDTH` sums.
                unsafe { multiply::<3, true>(a, tile, panel, weight.pairs(), sums, false) };
            }
            out(first, tile, group, &sums);
        }
    }
}

/// Rows in as many tiles of at most `most` as needed, of nearly the same height: first
/// row and height.
pub fn tiles(rows: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let count = rows.div_ceil(most);
    (0..count).map(move |i| {
        let (begin, end) = (i * rows / count, (i + 1) * rows / count);
        (begin, end - begin)
    })
}

/// One tile: up to `ROWS` rows (of 4 vectors, 6) by one panel of `V` vectors. What is
/// read but once (`STREAM`) is prefetched.
///
/// # Safety
/// `rows` rows of `2 * pairs` numbers at `a`; `2 * pairs * V * 16` at `panel`; place
/// for `rows` times `V * 16` sums, which are gone on with if `go_on`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub unsafe fn multiply<const V: usize, const STREAM: bool>(
    a: Rows,
    rows: usize,
    panel: *const u16,
    pairs: usize,
    sums: Sums,
    go_on: bool,
) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match rows {
            1 => tile::<1, V, STREAM>(a, panel, pairs, sums, go_on),
            2 => tile::<2, V, STREAM>(a, panel, pairs, sums, go_on),
            3 => tile::<3, V, STREAM>(a, panel, pairs, sums, go_on),
            4 => tile::<4, V, STREAM>(a, panel, pairs, sums, go_on),
            5 => tile::<5, V, STREAM>(a, panel, pairs, sums, go_on),
            6 => tile::<6, V, STREAM>(a, panel, pairs, sums, go_on),
            7 => tile::<7, V, STREAM>(a, panel, pairs, sums, go_on),
            _ => tile::<8, V, STREAM>(a, panel, pairs, sums, go_on),
        }
    }
}

/// # Safety
/// As `multiply`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn tile<const M: usize, const V: usize, const STREAM: bool>(
    a: Rows,
    panel: *const u16,
    pairs: usize,
    sums: Sums,
    go_on: bool,
) {
    let mut acc = [[_mm512_setzero_ps(); V]; M];
    // SAFETY: the caller's promise; a prefetch may point anywhere.
    unsafe {
        if go_on {
            for (m, row) in acc.iter_mut().enumerate() {
                for (v, x) in row.iter_mut().enumerate() {
                    *x = _mm512_loadu_ps(sums.data.add(m * sums.stride + v * LANES));
                }
            }
        }
        for k in 0..pairs {
            let place = panel.add(k * V * 2 * LANES);
            let mut w = [_mm512_setzero_si512(); V];
            for (v, x) in w.iter_mut().enumerate() {
                let at = place.add(v * 2 * LANES);
                *x = _mm512_loadu_si512(at.cast());
                if STREAM {
                    _mm_prefetch::<_MM_HINT_T0>(at.wrapping_byte_add(AHEAD_BYTES).cast());
                }
            }
            for (m, row) in acc.iter_mut().enumerate() {
                let pair = a
                    .data
                    .add(m * a.stride + 2 * k)
                    .cast::<i32>()
                    .read_unaligned();
                let pair = bits(_mm512_set1_epi32(pair));
                for (x, &w) in row.iter_mut().zip(&w) {
                    *x = _mm512_dpbf16_ps(*x, pair, bits(w));
                }
            }
        }
        for (m, row) in acc.iter().enumerate() {
            for (v, &x) in row.iter().enumerate() {
                _mm512_storeu_ps(sums.data.add(m * sums.stride + v * LANES), x);
            }
        }
    }
}

#[inline]
pub fn bits(x: __m512i) -> __m512bh {
    // SAFETY: both are 512 bits without meaning of their own.
    unsafe { std::mem::transmute(x) }
}
