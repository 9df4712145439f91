//! One step's rows: which there are, where their numbers lie, who computes which.
//!
//! ```text
//! few rows    all threads on all rows, each with its share of the outputs; a barrier
//!             between phases
//! many rows   blocks of rows, each through a layer by one thread alone; a barrier a layer
//! ```

use std::ops::Range;

use super::attention::{MOST_ROWS, Scratch};
use super::panels::WIDTH;
use crate::batch::Batch;
use crate::memory::{Buffer, Element};
use crate::shape::Shape;
use crate::simd::Simd;

/// Most rows of a block, and of a step that all threads share. Every block reads all weights:
/// that counts the more, the quicker rows are multiplied.
pub const fn block_rows<S: Simd>() -> usize {
    if S::TILED { 256 } else { 128 }
}

/// Rows of float32 or bfloat16 numbers that several threads write.
pub struct Matrix<T> {
    data: *mut T,
    pub stride: usize,
}

impl<T> Clone for Matrix<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Matrix<T> {}

// SAFETY: a place to write; who writes where is the business of the unsafe code that does.
unsafe impl<T: Send> Send for Matrix<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Matrix<T> {}

impl<T> Matrix<T> {
    /// Rows that begin at `data`.
    pub fn over(data: *mut T, stride: usize) -> Self {
        Self { data, stride }
    }

    /// The first number of a row.
    pub fn row(&self, index: usize) -> *mut T {
        self.data.wrapping_add(index * self.stride)
    }

    /// A number of a row.
    pub fn at(&self, row: usize, column: usize) -> *mut T {
        self.row(row).wrapping_add(column)
    }

    /// The same without the first `rows` rows.
    pub fn skip(&self, rows: usize) -> Self {
        Self {
            data: self.row(rows),
            ..*self
        }
    }
}

/// Neighbouring rows of one sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Segment {
    pub sequence: usize,
    pub row: usize,
    pub rows: usize,
    /// Of the first row.
    pub position: usize,
}

/// A step's sequences as segments.
pub fn whole(batch: &Batch<'_>) -> Vec<Segment> {
    let mut row = 0;
    let lens = batch.query_lens.iter().zip(batch.context_lens);
    lens.enumerate()
        .map(|(sequence, (&rows, &context))| {
            let segment = Segment {
                sequence,
                row,
                rows,
                position: context - rows,
            };
            row += rows;
            segment
        })
        .collect()
}

/// Chosen rows of a step as segments; their rows are counted anew.
pub fn chosen(segments: &[Segment], rows: &[i64]) -> Vec<Segment> {
    let mut found: Vec<Segment> = Vec::new();
    for (row, &old) in rows.iter().enumerate() {
        let index = segments.partition_point(|segment| segment.row + segment.rows <= old as usize);
        let Segment {
            sequence,
            row: begin,
            position,
            ..
        } = segments[index];
        let position = position + old as usize - begin;
        match found.last_mut() {
            Some(last) if last.sequence == sequence && last.position + last.rows == position => {
                last.rows += 1;
            }
            _ => found.push(Segment {
                sequence,
                row,
                rows: 1,
                position,
            }),
        }
    }
    found
}

/// The part of segments in some rows, in pieces of at most `most` rows.
pub fn pieces(segments: &[Segment], rows: Range<usize>, most: usize) -> Vec<Segment> {
    let mut found = Vec::new();
    for segment in segments {
        let end = rows.end.min(segment.row + segment.rows);
        let mut row = rows.start.max(segment.row);
        while row < end {
            let count = most.min(end - row);
            let position = segment.position + row - segment.row;
            found.push(Segment {
                row,
                rows: count,
                position,
                ..*segment
            });
            row += count;
        }
    }
    found
}

/// Rows in blocks of nearly the same size, at most `most`, as many for each thread.
pub fn blocks(rows: usize, threads: usize, most: usize) -> Vec<Range<usize>> {
    let count = rows.div_ceil(most).next_multiple_of(threads);
    let each = rows.div_ceil(count).next_multiple_of(8).min(most);
    (0..rows)
        .step_by(each)
        .map(|begin| begin..rows.min(begin + each))
        .collect()
}

/// What one thread needs for a block of rows.
pub struct Work<S: Simd> {
    pub normed: Buffer<S::Number>,
    pub qkv: Buffer<f32>,
    pub attended: Buffer<S::Number>,
    pub inner: Buffer<S::Number>,
    pub scratch: Scratch<S>,
    context: usize,
}

/// Numbers from one input row of a GEMM to the next: rows begin at different cache sets.
fn spaced(len: usize) -> usize {
    len.next_multiple_of(WIDTH).next_multiple_of(32) + 32
}

impl<S: Simd> Work<S> {
    /// For a model, and contexts of so many tokens.
    pub fn new(shape: &Shape, context: usize) -> Self {
        let context = context.next_power_of_two();
        let rows = block_rows::<S>();
        Self {
            normed: Buffer::zeroed(rows * spaced(shape.hidden)),
            qkv: Buffer::zeroed(rows * shape.qkv_dim().next_multiple_of(WIDTH)),
            attended: Buffer::zeroed(rows * spaced(shape.query_dim())),
            inner: Buffer::zeroed(rows * spaced(shape.intermediate)),
            scratch: Scratch::new(MOST_ROWS, shape.head_dim, context),
            context,
        }
    }

    /// Whether it does for contexts of so many tokens.
    pub fn holds(&self, context: usize) -> bool {
        context <= self.context
    }

    /// Where its rows are.
    pub fn places(&mut self, shape: &Shape) -> Places<S> {
        Places {
            normed: over(&mut self.normed, spaced(shape.hidden)),
            qkv: over(&mut self.qkv, shape.qkv_dim().next_multiple_of(WIDTH)),
            attended: over(&mut self.attended, spaced(shape.query_dim())),
            inner: over(&mut self.inner, spaced(shape.intermediate)),
            scratch: &raw mut self.scratch,
        }
    }
}

/// `Work` as pointers.
pub struct Places<S: Simd> {
    pub normed: Matrix<S::Number>,
    pub qkv: Matrix<f32>,
    pub attended: Matrix<S::Number>,
    pub inner: Matrix<S::Number>,
    pub scratch: *mut Scratch<S>,
}

impl<S: Simd> Clone for Places<S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Simd> Copy for Places<S> {}

// SAFETY: each thread uses the scratch of its own; for the rest see `Matrix`.
unsafe impl<S: Simd> Sync for Places<S> {}

fn over<T: Element>(buffer: &mut Buffer<T>, stride: usize) -> Matrix<T> {
    Matrix::over(buffer.as_mut_ptr(), stride)
}

/// Residuals and queries of rows; grows with the largest step.
pub struct Space<S: Simd> {
    hidden: Buffer<f32>,
    queries: Buffer<S::Number>,
    rows: usize,
}

impl<S: Simd> Space<S> {
    /// For no rows yet.
    pub fn new() -> Self {
        Self {
            hidden: Buffer::zeroed(0),
            queries: Buffer::zeroed(0),
            rows: 0,
        }
    }

    /// Places of `rows` rows; queries are `[kv_heads, rows, group, head_dim]`.
    pub fn places(&mut self, shape: &Shape, rows: usize) -> (Matrix<f32>, Matrix<S::Number>) {
        let stride = shape.hidden.next_multiple_of(WIDTH);
        if rows > self.rows {
            self.rows = rows.next_multiple_of(block_rows::<S>());
            self.hidden = Buffer::zeroed(self.rows * stride);
            self.queries = Buffer::zeroed(self.rows * shape.query_dim());
        }
        let queries = over(&mut self.queries, shape.group() * shape.head_dim);
        (over(&mut self.hidden, stride), queries)
    }
}

/// A thread's part of what a block's threads do together.
#[derive(Debug, Clone, Copy)]
pub struct Share {
    pub index: usize,
    pub of: usize,
}

impl Share {
    /// Nobody else takes part.
    pub const ALL: Self = Self { index: 0, of: 1 };

    /// Its part of `count` things.
    pub fn range(self, count: usize) -> Range<usize> {
        self.index * count / self.of..(self.index + 1) * count / self.of
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(sequence: usize, row: usize, rows: usize, position: usize) -> Segment {
        Segment {
            sequence,
            row,
            rows,
            position,
        }
    }

    #[test]
    fn segments_pieces_and_chosen_rows() {
        let all = [
            segment(0, 0, 1, 40),
            segment(1, 1, 10, 5),
            segment(2, 11, 3, 0),
        ];
        assert_eq!(
            pieces(&all, 0..12, 4),
            [
                segment(0, 0, 1, 40),
                segment(1, 1, 4, 5),
                segment(1, 5, 4, 9),
                segment(1, 9, 2, 13),
                segment(2, 11, 1, 0),
            ]
        );
        assert_eq!(
            chosen(&all, &[0, 4, 5, 10, 13]),
            [
                segment(0, 0, 1, 40),
                segment(1, 1, 2, 8),
                segment(1, 3, 1, 14),
                segment(2, 4, 1, 2),
            ]
        );
    }

    #[test]
    fn blocks_cover_all_rows_once_and_are_even_among_threads() {
        for rows in [65, 100, 128, 1000, 1024] {
            for threads in [1, 2, 3] {
                let found = blocks(rows, threads, 128);
                assert!(found.iter().all(|block| block.len() <= 128));
                let flat: Vec<usize> = found.into_iter().flatten().collect();
                assert_eq!(flat, (0..rows).collect::<Vec<_>>());
            }
        }
        assert_eq!(blocks(128, 2, 128).len(), 2);
    }

    #[test]
    fn shares_cover_everything_once() {
        for (count, of) in [(12, 2), (7, 3), (1, 4)] {
            let parts = (0..of).flat_map(|index| Share { index, of }.range(count));
            assert_eq!(parts.collect::<Vec<_>>(), (0..count).collect::<Vec<_>>());
        }
    }
}
