//! Causal attention of a few tokens of one sequence, one KV head, over the pool.
//!
//! The query heads that share the KV head are rows beside one another. Both GEMMs are
//! tiles (packed.rs) over panels packed stretch by stretch (keys.rs). The second GEMM of one
//! token alone reads the pool as it is (values.rs), except with AMX. Between them all scores of
//! a row are in memory, so the softmax sees them all.
//! Stretches begin at multiples of 64 tokens, and a hidden key adds 0: a row's result
//! does not depend on the rows computed with it.

use std::ops::Range;

use super::keys::{COLUMNS, Plane, pack_keys};
use super::packed::{Packed, multiply_packed};
use super::rows::scale_row;
use super::tile::{Rows, Sums};
use super::values::{weigh, weigh_packed};
use crate::memory::Buffer;
use crate::simd::functions::exp2;
use crate::simd::{Floats, Simd, vectors};

/// Tokens packed at a time.
pub const STRETCH: usize = 512;

/// Most rows of a call.
pub const MOST_ROWS: usize = crate::shape::MOST_GROUP;

/// What one thread needs.
pub struct Scratch<S: Simd> {
    panels: Buffer<u16>,
    scores: Buffer<f32>,
    weights: Buffer<S::Number>,
    output: Buffer<f32>,
    /// Numbers from a row of scores or weights to the next.
    stride: usize,
    width: usize,
}

impl<S: Simd> Scratch<S> {
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
pub struct Queries<S: Simd> {
    /// `[tokens, group, head_dim]`, scaled by log2(e) too.
    pub data: *const S::Number,
    pub tokens: usize,
    pub group: usize,
    /// Position of the first.
    pub first: usize,
    /// Tokens that each sees, itself included.
    pub window: Option<usize>,
}

impl<S: Simd> Clone for Queries<S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Simd> Copy for Queries<S> {}

impl<S: Simd> Queries<S> {
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
pub struct Target<N> {
    pub data: *mut N,
    pub stride: usize,
}

/// What one call attends for.
pub struct Item<'a, S: Simd> {
    pub queries: Queries<S>,
    pub keys: Plane<'a>,
    pub values: Plane<'a>,
    pub target: Target<S::Number>,
}

/// Attend; of `next`, whose turn comes then, keys are prefetched.
///
/// # Safety
/// The processor runs the instance. The planes hold all positions up to the last query's;
/// `scratch` was made for as many rows and so long a context; queries and target hold what
/// they say.
pub unsafe fn attend<S: Simd>(item: &Item<'_, S>, next: &Item<'_, S>, scratch: &mut Scratch<S>) {
    let &Item {
        queries,
        keys,
        values,
        target,
    } = item;
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
            pack_keys::<S>(keys, from, to, panels, |at| values.token(at));
            let a = Rows {
                data: queries.data,
                stride: head_dim,
            };
            let packed = Packed {
                data: panels,
                panels: (to - from).div_ceil(COLUMNS),
                pairs: head_dim / 2,
            };
            multiply_packed::<S>(a, rows, packed, scores.at(0, from - begin), false);
        }
    }
    let mut totals = [0.0; MOST_ROWS];
    for (row, total) in totals.iter_mut().enumerate().take(rows) {
        let seen = queries.seen(row / group);
        let seen = seen.start - begin..seen.end - begin;
        let scores = scores.at(row, 0).data;
        // SAFETY: both rows hold `end - begin` numbers, and a panel more.
        *total = unsafe { soften::<S>(scores, seen, end - begin, weights.add(row * stride)) };
    }
    let weights = Rows {
        data: weights.cast_const(),
        stride,
    };
    // SAFETY: as above; `soften` wrote whole vectors of weights.
    unsafe {
        if alone && !S::TILED && head_dim.is_multiple_of(S::Floats::LANES) {
            let (first, last) = next.queries.reach();
            let ahead = |at: usize| next.keys.token((at - begin + first).min(last - 1));
            weigh::<S>(weights, rows, values, begin..end, sums, &ahead);
        } else {
            weigh_packed::<S>(weights, rows, values, begin..end, sums, panels);
        }
    }
    for (row, &total) in totals.iter().enumerate().take(rows) {
        // SAFETY: the caller's promise.
        unsafe {
            let to = target
                .data
                .add(row / group * target.stride + row % group * head_dim);
            scale_row::<S>(sums.at(row, 0).data, head_dim, 1.0 / total, to);
        }
    }
}

/// Powers of 2 of one row's scores less their maximum, 0 outside of `seen`; their sum.
///
/// # Safety
/// As `attend`; `scores` and `weights` hold `len` numbers, rounded up to whole vectors.
unsafe fn soften<S: Simd>(
    scores: *mut f32,
    seen: Range<usize>,
    len: usize,
    weights: *mut S::Number,
) -> f32 {
    let whole = len.next_multiple_of(S::Floats::LANES);
    // SAFETY: the caller's promise.
    let run = || unsafe {
        for hidden in (0..seen.start).chain(seen.end..whole) {
            *scores.add(hidden) = f32::NEG_INFINITY;
        }
        let mut most = S::Floats::splat(f32::NEG_INFINITY);
        for (at, left) in vectors::<S::Floats>(whole) {
            most = S::Floats::max(most, S::Floats::load(scores.add(at), left));
        }
        let most = S::Floats::splat(S::Floats::largest(most));
        let mut sum = S::Floats::splat(0.0);
        for (at, left) in vectors::<S::Floats>(whole) {
            let score = S::Floats::load(scores.add(at), left);
            let power = exp2::<S::Floats>(S::Floats::sub(score, most));
            sum = S::Floats::add(sum, power);
            S::put(weights.add(at), left, power);
        }
        S::Floats::sum(sum)
    };
    // SAFETY: the caller's promise.
    unsafe { S::vectorize(run) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Numbers, each_instance, numbers_of, wide, widened};

    each_instance!(rows_agree_with_float64_alone_and_together);

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

    fn run<S: Simd>(pool: &Pool, queries: Queries<S>, scratch: &mut Scratch<S>) -> Vec<f32> {
        let stride = queries.group * pool.head_dim + 3;
        let mut output = vec![S::Number::default(); queries.tokens * stride];
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
        unsafe { attend::<S>(&item, &item, scratch) };
        widened::<S>(&output)
    }

    fn rows_agree_with_float64_alone_and_together<S: Simd>() {
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
            let mut scratch = Scratch::<S>::new(MOST_ROWS, head_dim, 1200);
            for (first, window) in [
                (0, None),
                (37, None),
                (600, None),
                (600, Some(70)),
                (63, Some(1)),
            ] {
                let tokens = MOST_ROWS / group;
                let query = numbers.bits(tokens * group * head_dim);
                let rows = numbers_of::<S>(&query);
                let data = rows.as_ptr();
                let all = Queries::<S> {
                    data,
                    tokens,
                    group,
                    first,
                    window,
                };
                let together = run(&pool, all, &mut scratch);
                for token in [0, tokens / 2, tokens - 1] {
                    let data = rows[token * group * head_dim..].as_ptr();
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
                            let error = (f64::from(*got) - want).abs();
                            assert!(error < 0.01, "{head_dim}, at {first}: {error}");
                        }
                    }
                }
            }
        }
    }
}
