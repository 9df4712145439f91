//! Causal attention of a few tokens of one sequence, one KV head, over the pool.
//!
//! The query heads that share the KV head are rows beside one another. Both products
//! are tiles (product.rs) over panels packed stretch by stretch (keys.rs), the second of
//! one token alone over the pool as it is (weigh.rs); between them all scores of a row
//! are there at once, so its softmax needs no second thoughts.
//! Stretches begin at multiples of 64 tokens, and a hidden key adds 0: a row's result
//! does not depend on the rows computed with it.

use std::arch::x86_64::*;
use std::ops::Range;

use super::keys::{COLUMNS, Plane, pack_keys};
use super::product::{Rows, Sums, multiply, tiles};
use super::rows::narrow_row;
use super::vector::{LANES, exp2, narrow};
use super::weigh::{weigh, weigh_packed};
use crate::memory::Buffer;

/// Rows of a tile, for 4 vectors beside one another.
pub const TILE_ROWS: usize = 6;

/// Tokens packed at a time.
pub const STRETCH: usize = 512;

/// Most rows of a call.
pub const MOST_ROWS: usize = crate::shape::MOST_GROUP;

/// What one thread needs.
pub struct Scratch {
    panels: Buffer<u16>,
    scores: Buffer<f32>,
    weights: Buffer<u16>,
    output: Buffer<f32>,
    /// Numbers from a row of scores or weights to the next.
    stride: usize,
    width: usize,
}

impl Scratch {
    /// For at most `rows` rows of heads of `head_dim`, in contexts up to `context` tokens.
    pub fn new(rows: usize, head_dim: usize, context: usize) -> Self {
        let stride = context.next_multiple_of(COLUMNS) + COLUMNS + 32;
        let width = head_dim.next_multiple_of(COLUMNS);
        Self {
            panels: Buffer::zeroed(STRETCH * width),
            scores: Buffer::zeroed(rows * stride),
            weights: Buffer::zeroed(rows * stride),
            output: Buffer::zeroed(rows * width),
            stride,
            width,
        }
    }
}

/// Tokens of one sequence, at positions `first ..`, with `group` query heads each.
#[derive(Clone, Copy)]
pub struct Queries {
    /// `[tokens, group, head_dim]`, scaled by log2(e) too.
    pub data: *const u16,
    pub tokens: usize,
    pub group: usize,
    /// Position of the first.
    pub first: usize,
    /// Tokens that each sees, itself included.
    pub window: Option<usize>,
}

impl Queries {
    /// Positions that all tokens of the call see, from a multiple of 64 on.
    fn reach(&self) -> (usize, usize) {
        let begin = self.seen(0).start / COLUMNS * COLUMNS;
        (begin, self.seen(self.tokens - 1).end)
    }

    /// Positions that a token of the call sees.
    fn seen(&self, token: usize) -> Range<usize> {
        let end = self.first + token + 1;
        self.window.map_or(0, |window| end.saturating_sub(window))..end
    }
}

/// Where the result goes: token by token, `stride` numbers apart, `group` heads each.
#[derive(Clone, Copy)]
pub struct Target {
    pub data: *mut u16,
    pub stride: usize,
}

/// What one call attends for.
#[derive(Clone, Copy)]
pub struct Item<'a> {
    pub queries: Queries,
    pub keys: Plane<'a>,
    pub values: Plane<'a>,
    pub target: Target,
}

/// Attend; of `next`, whose turn comes then, keys are prefetched.
///
/// # Safety
/// The planes hold all positions up to the last query's; `scratch` was made for as
/// many rows and so long a context; queries and target hold what they say.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub unsafe fn attend(item: &Item<'_>, next: &Item<'_>, scratch: &mut Scratch) {
    let Item {
        queries,
        keys,
        values,
        target,
    } = *item;
    let head_dim = keys.head_dim;
    let (group, rows) = (queries.group, queries.tokens * queries.group);
    let (begin, end) = queries.reach();
    let (stride, width) = (scratch.stride, scratch.width);
    let panels = scratch.panels.as_mut_ptr();
    let weights = scratch.weights.as_mut_ptr();
    let scores = Sums {
        data: scratch.scores.as_mut_ptr(),
        stride,
    };
    let sums = Sums {
        data: scratch.output.as_mut_ptr(),
        stride: width,
    };

    // One token computes so little that what it reads is all that counts.
    let alone = queries.tokens == 1;
    let stretch = if alone { COLUMNS } else { STRETCH };
    for from in (begin..end).step_by(stretch) {
        let to = end.min(from + stretch);
        // SAFETY: a stretch fits the panels; scores have room for whole panels of keys.
        unsafe {
            if alone && (from - begin).is_multiple_of(STRETCH) {
                keys.fetch(from, end.min(from + STRETCH));
            }
            pack_keys(keys, from, to, panels, |at| values.token(at));
            for panel in 0..(to - from).div_ceil(COLUMNS) {
                for (row, count) in tiles(rows, TILE_ROWS) {
                    let a = Rows {
                        data: queries.data.add(row * head_dim),
                        stride: head_dim,
                    };
                    let sums = scores.at(row, from - begin + panel * COLUMNS);
                    let panel = panels.add(panel * head_dim * COLUMNS);
                    multiply::<4, false>(a, count, panel, head_dim / 2, sums, false);
                }
            }
        }
    }
    let mut totals = [0.0; MOST_ROWS];
    for (row, total) in totals.iter_mut().enumerate().take(rows) {
        let seen = queries.seen(row / group);
        let seen = seen.start - begin..seen.end - begin;
        // SAFETY: both rows hold `end - begin` numbers, and a vector more.
        *total = unsafe {
            soften(
                scores.at(row, 0).data,
                seen,
                end - begin,
                weights.add(row * stride),
            )
        };
    }
    let weights = Rows {
        data: weights,
        stride,
    };
    // SAFETY: as above; `soften` wrote whole vectors of weights.
    unsafe {
        if alone {
            let (first, last) = next.queries.reach();
            let ahead = |at: usize| next.keys.token((at - begin + first).min(last - 1));
            weigh(weights, rows, values, begin..end, sums, ahead);
        } else {
            weigh_packed(weights, rows, values, begin..end, sums, panels);
        }
    }
    for (row, &total) in totals.iter().enumerate().take(rows) {
        // SAFETY: the caller's promise.
        unsafe {
            let to = target
                .data
                .add(row / group * target.stride + row % group * head_dim);
            narrow_row(sums.at(row, 0).data, head_dim, 1.0 / total, to);
        }
    }
}

/// Powers of 2 of one row's scores less their maximum, 0 outside of `seen`; their sum.
///
/// # Safety
/// `scores` and `weights` hold `len` numbers, rounded up to whole vectors.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn soften(scores: *const f32, seen: Range<usize>, len: usize, weights: *mut u16) -> f32 {
    let (from, to) = (
        _mm512_set1_epi32(seen.start as i32),
        _mm512_set1_epi32(seen.end as i32),
    );
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let visible = |at: usize| {
        let places = _mm512_add_epi32(_mm512_set1_epi32(at as i32), lanes);
        _mm512_mask_cmplt_epi32_mask(_mm512_cmpge_epi32_mask(places, from), places, to)
    };
    let hidden = _mm512_set1_ps(f32::NEG_INFINITY);
    let mut most = hidden;
    for at in (0..len).step_by(LANES) {
        // SAFETY: the caller's promise.
        let x = unsafe { _mm512_mask_loadu_ps(hidden, visible(at), scores.add(at)) };
        most = _mm512_max_ps(most, x);
    }
    let most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    let mut sum = _mm512_setzero_ps();
    for at in (0..len).step_by(LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            let mask = visible(at);
            let x = _mm512_maskz_loadu_ps(mask, scores.add(at));
            let power = _mm512_maskz_mov_ps(mask, exp2(_mm512_sub_ps(x, most)));
            sum = _mm512_add_ps(sum, power);
            narrow(weights.add(at), !0, power);
        }
    }
    _mm512_reduce_add_ps(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Numbers, wide};
    use crate::x86::supported;

    /// A pool of one head: keys and values of a block side by side.
    struct Pool {
        data: Vec<u16>,
        table: Vec<i32>,
        block_size: usize,
        head_dim: usize,
    }

    impl Pool {
        fn plane(&self, side: usize) -> Plane<'_> {
            let plane = self.block_size * self.head_dim;
            Plane {
                data: self.data[side * plane..].as_ptr(),
                block_len: 2 * plane,
                block_size: self.block_size,
                head_dim: self.head_dim,
                table: &self.table,
            }
        }

        fn number(&self, side: usize, token: usize, i: usize) -> f64 {
            let block = self.table[token / self.block_size] as usize;
            let slot = (2 * block + side) * self.block_size + token % self.block_size;
            f64::from(wide(self.data[slot * self.head_dim + i]))
        }
    }

    /// What `attend` should give for one row.
    fn expected(pool: &Pool, query: &[u16], seen: Range<usize>) -> Vec<f64> {
        let score = |token| {
            let terms = query.iter().enumerate();
            terms
                .map(|(i, &q)| f64::from(wide(q)) * pool.number(0, token, i))
                .sum::<f64>()
        };
        let weights: Vec<f64> = seen.clone().map(|token| score(token).exp2()).collect();
        let total: f64 = weights.iter().sum();
        let output = |i| {
            let terms = seen.clone().zip(&weights);
            terms
                .map(|(token, weight)| weight / total * pool.number(1, token, i))
                .sum()
        };
        (0..query.len()).map(output).collect()
    }

    fn run(pool: &Pool, queries: Queries, scratch: &mut Scratch) -> Vec<u16> {
        let stride = queries.group * pool.head_dim + 3;
        let mut output = vec![0; queries.tokens * stride];
        let item = Item {
            queries,
            keys: pool.plane(0),
            values: pool.plane(1),
            target: Target {
                data: output.as_mut_ptr(),
                stride,
            },
        };
        // SAFETY: the caller looked whether the machine can; all sizes are as they should be.
        unsafe { attend(&item, &item, scratch) };
        output
    }

    #[test]
    fn rows_agree_with_float64_alone_and_together() {
        if supported().is_some() {
            return;
        }
        let mut numbers = Numbers::new(3);
        for (head_dim, group, block_size) in [(64, 3, 16), (80, 1, 8), (6, 5, 4), (128, 8, 32)] {
            let blocks = 1200usize.div_ceil(block_size);
            let mut table: Vec<i32> = (0..blocks as i32).collect();
            (0..blocks).for_each(|i| table.swap(i, numbers.below(blocks)));
            let mut data = numbers.bits(blocks * 2 * block_size * head_dim);
            // What lies behind the last query must not matter, whatever it is.
            for token in 600 + MOST_ROWS..1200 {
                let block = table[token / block_size] as usize;
                for side in [0, 1] {
                    let slot = (2 * block + side) * block_size + token % block_size;
                    data[slot * head_dim..][..head_dim].fill(0x7fc0); // NaN
                }
            }
            let pool = Pool {
                data,
                table,
                block_size,
                head_dim,
            };
            let mut scratch = Scratch::new(MOST_ROWS, head_dim, 1200);
            for (first, window) in [
                (0, None),
                (37, None),
                (600, None),
                (600, Some(70)),
                (63, Some(1)),
            ] {
                let tokens = MOST_ROWS / group;
                let query = numbers.bits(tokens * group * head_dim);
                let data = query.as_ptr();
                let all = Queries {
                    data,
                    tokens,
                    group,
                    first,
                    window,
                };
                let together = run(&pool, all, &mut scratch);
                for token in [0, tokens / 2, tokens - 1] {
                    let data = query[token * group * head_dim..].as_ptr();
                    let one = Queries {
                        data,
                        tokens: 1,
                        first: first + token,
                        ..all
                    };
                    let alone = run(&pool, one, &mut scratch);
                    let stride = group * head_dim + 3;
                    assert_eq!(alone, together[token * stride..][..stride]);
                    for head in 0..group {
                        let query = &query[(token * group + head) * head_dim..][..head_dim];
                        let want = expected(&pool, query, all.seen(token));
                        for (got, want) in alone[head * head_dim..].iter().zip(want) {
                            let error = (f64::from(wide(*got)) - want).abs();
                            assert!(error < 0.01, "{head_dim}, at {first}: {error}");
                        }
                    }
                }
            }
        }
    }
}
