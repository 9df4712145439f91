//! Weighted sums of values: over packed ones, or straight from the pool.
//!
//! For the few rows of one token packing costs more than it saves: the tile reads the tokens
//! where they are. Each sum is the same chain either way, so its bits are the same. AMX adds in
//! another order, so with it values are always packed.

use std::ops::Range;

use super::attention::STRETCH;
use super::keys::{COLUMNS, Plane, pack_values};
use super::packed::{Packed, TILE_ROWS, multiply_packed};
use super::tile::{Rows, Source, Sums, multiply, tiles};
use crate::simd::{Floats, HALF, SQUARE, Simd, Vector, prefetch};

/// Sums of `rows` rows over the values of some tokens, packed stretch by stretch.
///
/// # Safety
/// The processor runs the instance. The plane holds the tokens; the rows a weight for each,
/// 0 for one too many; there is space for whole panels of sums, and at `panels` for a stretch.
pub unsafe fn weigh_packed<S: Simd>(
    weights: Rows<S::Number>,
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
        unsafe { pack_values::<S>(values, from, to, panels) };
        let packed = Packed {
            data: panels,
            panels: values.head_dim.div_ceil(COLUMNS),
            pairs,
        };
        let (a, go_on) = (weights.at(0, from - tokens.start), from > tokens.start);
        // SAFETY: the caller's promise.
        unsafe { multiply_packed::<S>(a, rows, packed, sums, go_on) };
    }
}

/// Sums of `rows` rows over the values of some tokens, as they are in the pool.
///
/// With each 16 tokens as many are prefetched, side by side from where `ahead` says on.
///
/// # Safety
/// As `weigh_packed`; a token is a number of whole vectors.
pub unsafe fn weigh<S: Simd>(
    weights: Rows<S::Number>,
    rows: usize,
    values: Plane<'_>,
    tokens: Range<usize>,
    sums: Sums,
    ahead: &impl Fn(usize) -> *const u16,
) {
    for from in tokens.clone().step_by(STRETCH) {
        let to = tokens.end.min(from + STRETCH);
        // SAFETY: the caller's promise.
        unsafe { values.fetch(from, to) };
        for column in (0..values.head_dim).step_by(COLUMNS) {
            let source = InPool {
                plane: values,
                begin: from,
                end: to,
                column,
                ahead,
                tokens: [std::ptr::null(); SQUARE],
                next: std::ptr::null(),
            };
            for (row, count) in tiles(rows, TILE_ROWS) {
                let (a, sums) = (weights.at(row, from - tokens.start), sums.at(row, column));
                let (pairs, go_on) = ((to - from).div_ceil(2), from > tokens.start);
                // SAFETY: the caller's promise.
                unsafe { multiply::<S, _>(a, count, &source, pairs, sums, go_on) };
            }
        }
    }
}

/// Values of tokens `begin..end` in the pool, two tokens a unit.
struct InPool<'a, A> {
    plane: Plane<'a>,
    begin: usize,
    end: usize,
    column: usize,
    ahead: &'a A,
    /// The 16 tokens around the unit, and what is prefetched with them.
    tokens: [*const u16; SQUARE],
    next: *const u16,
}

/// Numbers of two tokens, from a column on, of which `count` exist.
struct Pair {
    tokens: [*const u16; 2],
    count: usize,
}

impl<S: Simd, A: Fn(usize) -> *const u16> Source<S> for InPool<'_, A> {
    const COLUMNS: usize = COLUMNS;
    const INPUTS: usize = S::INPUTS;
    type Term = S::Term;
    type Unit<const V: usize> = Pair;

    #[inline(always)]
    fn skip_columns(&self, column: usize) -> Self {
        Self {
            column: self.column + column,
            ..*self
        }
    }

    #[inline(always)]
    fn terms(&self, _: usize) -> usize {
        2 / S::INPUTS
    }

    #[inline(always)]
    unsafe fn unit<const V: usize>(&mut self, unit: usize) -> Pair {
        let (at, place) = (self.begin + 2 * unit, 2 * unit % SQUARE);
        let dim = self.plane.head_dim;
        // Columns behind the last number are padding: any numbers will do.
        let column = if self.column < dim { self.column } else { 0 };
        if place == 0 {
            self.tokens = self.plane.tokens(at, self.end);
            self.next = (self.ahead)(at);
        }
        for number in (0..V * S::Floats::LANES).step_by(HALF) {
            let line = self.next.wrapping_add(place * dim + column + number);
            prefetch(line);
            prefetch(line.wrapping_add(dim));
        }
        let tokens = [self.tokens[place], self.tokens[place + 1]];
        Pair {
            tokens: tokens.map(|token| token.wrapping_add(column)),
            count: dim - column,
        }
    }

    #[inline(always)]
    unsafe fn term<const V: usize>(unit: &Pair, index: usize) -> [S::Term; V] {
        // SAFETY: the caller's promise; so below.
        unsafe { S::token_terms(unit.tokens, index, unit.count) }
    }

    #[inline(always)]
    unsafe fn factor(row: *const S::Number) -> S::Term {
        // SAFETY: see above.
        unsafe { S::factor(row) }
    }

    #[inline(always)]
    unsafe fn multiply_add(factor: S::Term, term: S::Term, sum: Vector<S>) -> Vector<S> {
        // SAFETY: see above.
        unsafe { S::multiply_add(factor, term, sum) }
    }
}
