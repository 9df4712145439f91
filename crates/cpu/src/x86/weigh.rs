//! Weighted sums of values: over packed ones, or straight from the pool.
//!
//! For the few rows of one token packing costs more than it saves: neighbouring tokens are
//! interleaved in registers, and multiplied at once. Each sum is the same chain either way,
//! so its bits are the same.

use std::arch::x86_64::*;
use std::ops::Range;

use super::attention::{STRETCH, TILE_ROWS};
use super::keys::{COLUMNS, HALF, Plane, interleaving, pack_values, prefetch};
use super::product::{Rows, Sums, bits, multiply, tiles};
use super::vector::LANES;

/// Vectors of a row of sums.
const VECTORS: usize = COLUMNS / LANES;

/// Sums of `rows` rows over the values of some tokens, packed stretch by stretch.
///
/// # Safety
/// The plane holds the tokens; the rows a weight for each, 0 for one too many; there is
/// place for whole panels of sums, and at `panels` for a stretch.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub unsafe fn weigh_packed(
    weights: Rows,
    rows: usize,
    values: Plane<'_>,
    tokens: Range<usize>,
    sums: Sums,
    panels: *mut u16,
) {
    for from in tokens.clone().step_by(STRETCH) {
        let to = tokens.end.min(from + STRETCH);
        let pairs = (to - from).div_ceil(2);
        // SAFETY: the caller's promise.
        unsafe { pack_values(values, from, to, panels) };
        for column in (0..values.head_dim).step_by(COLUMNS) {
            let panel = panels.wrapping_add(column * pairs * 2);
            for (row, count) in tiles(rows, TILE_ROWS) {
                let (a, sums) = (weights.at(row, from - tokens.start), sums.at(row, column));
                let go_on = from > tokens.start;
                // SAFETY: the caller's promise.
                unsafe { multiply::<4, false>(a, count, panel, pairs, sums, go_on) };
            }
        }
    }
}

/// Sums of `rows` rows over the values of some tokens, as they lie in the pool.
///
/// With each 16 tokens as many are prefetched, side by side from where `ahead` says on.
///
/// # Safety
/// As `weigh_packed`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub unsafe fn weigh(
    weights: Rows,
    rows: usize,
    values: Plane<'_>,
    tokens: Range<usize>,
    sums: Sums,
    ahead: impl Fn(usize) -> *const u16,
) {
    for column in (0..values.head_dim).step_by(COLUMNS) {
        for (row, count) in tiles(rows, TILE_ROWS) {
            let (a, sums) = (weights.at(row, 0), sums.at(row, column));
            let tokens = tokens.clone();
            // SAFETY: the caller's promise, passed on.
            unsafe {
                match count {
                    1 => tile::<1>(a, values, tokens, column, sums, &ahead),
                    2 => tile::<2>(a, values, tokens, column, sums, &ahead),
                    3 => tile::<3>(a, values, tokens, column, sums, &ahead),
                    4 => tile::<4>(a, values, tokens, column, sums, &ahead),
                    5 => tile::<5>(a, values, tokens, column, sums, &ahead),
                    _ => tile::<6>(a, values, tokens, column, sums, &ahead),
                }
            }
        }
    }
}

/// # Safety
/// As `weigh`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn tile<const M: usize>(
    weights: Rows,
    values: Plane<'_>,
    tokens: Range<usize>,
    column: usize,
    sums: Sums,
    ahead: impl Fn(usize) -> *const u16,
) {
    let (dim, end) = (values.head_dim, tokens.end);
    let mask = |from: usize| match dim.saturating_sub(from) {
        count @ 0..HALF => (1 << count) - 1,
        _ => !0,
    };
    let halves = [column, column + HALF].map(|from| (from, mask(from)));
    let (low, high) = interleaving();
    let mut acc = [[_mm512_setzero_ps(); VECTORS]; M];
    for at in tokens.clone().step_by(LANES) {
        if (at - tokens.start).is_multiple_of(STRETCH) {
            // SAFETY: the caller's promise.
            unsafe { values.fetch(at, end.min(at + STRETCH)) };
        }
        let (found, ahead) = (values.tokens(at, end), ahead(at));
        let first = weights.data.wrapping_add(at - tokens.start);
        let pairs = found.as_chunks::<2>().0.iter().enumerate();
        for (pair, &[even, odd]) in pairs.take((end - at).div_ceil(2)) {
            let mut v = [_mm512_setzero_si512(); VECTORS];
            for (half, (from, mask)) in halves.into_iter().enumerate() {
                let (even, odd) = (even.wrapping_add(from), odd.wrapping_add(from));
                // SAFETY: a token has `head_dim` numbers.
                let (even, odd) = unsafe {
                    (
                        _mm512_maskz_loadu_epi16(mask, even.cast()),
                        _mm512_maskz_loadu_epi16(mask, odd.cast()),
                    )
                };
                let line = ahead.wrapping_add(2 * pair * dim + from);
                prefetch(line);
                prefetch(line.wrapping_add(dim));
                v[2 * half] = _mm512_permutex2var_epi16(even, low, odd);
                v[2 * half + 1] = _mm512_permutex2var_epi16(even, high, odd);
            }
            for (m, row) in acc.iter_mut().enumerate() {
                let place = first.wrapping_add(m * weights.stride + 2 * pair);
                // SAFETY: a weight for each token, and one more.
                let weight = unsafe { place.cast::<i32>().read_unaligned() };
                let weight = bits(_mm512_set1_epi32(weight));
                for (x, &v) in row.iter_mut().zip(&v) {
                    *x = _mm512_dpbf16_ps(*x, weight, bits(v));
                }
            }
        }
    }
    for (m, row) in acc.iter().enumerate() {
        for (v, &x) in row.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { _mm512_storeu_ps(sums.data.add(m * sums.stride + v * LANES), x) };
        }
    }
}
