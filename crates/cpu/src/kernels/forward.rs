//! The forward pass of one step; every thread of the team runs `Forward::run`.
//!
//! A row leaves a layer (layer.rs) when all rows of its sequence have entered: a barrier
//! lies between. In the last layer only rows whose logits are wanted leave.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::layer::{Part, linear};
use super::rows::widen_row;
use super::step::{Matrix, Places, Segment, Share, block_rows, blocks};
use super::weights::{Ends, Layer};
use crate::batch::{Batch, Pool};
use crate::shape::Shape;
use crate::simd::Simd;
use crate::team::Barrier;

/// Rows that go through layers: a step's, or those of them whose logits are wanted.
pub struct Flow<S: Simd> {
    pub rows: usize,
    pub hidden: Matrix<f32>,
    /// `[kv_heads, rows, group, head_dim]`.
    pub queries: Matrix<S::Number>,
    pub segments: Vec<Segment>,
}

/// A step, the same for all threads.
pub struct Forward<'a, S: Simd> {
    pub shape: &'a Shape,
    pub layers: &'a [Layer],
    pub ends: &'a Ends,
    pub pool: Pool,
    pub batch: Batch<'a>,
    /// By position: cosines, then sines, `head_dim` numbers.
    pub rotations: &'a [f32],
    pub all: Flow<S>,
    /// `None`: all rows' logits are wanted, in order.
    pub wanted: Option<Flow<S>>,
    /// One for each thread.
    pub places: Vec<Places<S>>,
    pub logits: Matrix<f32>,
    pub barrier: Barrier,
    /// Blocks that threads have taken, by layer; and in the last one's second half.
    pub taken: Vec<AtomicUsize>,
}

impl<S: Simd> Forward<'_, S> {
    /// One thread's part of the step.
    ///
    /// # Safety
    /// The processor runs the instance. The batch was checked; all places are large enough; as many threads run it, with
    /// indices of their own, as there are places.
    pub unsafe fn run(&self, thread: usize) {
        let share = Share {
            index: thread,
            of: self.places.len(),
        };
        for row in share.range(self.all.rows) {
            let token = self.batch.tokens[row] as usize;
            let hidden = self.shape.hidden;
            let from = &self.ends.embedding[token * hidden..][..hidden];
            // SAFETY: the row is this thread's; so below, for every part.
            unsafe { widen_row::<S>(from, self.all.hidden.row(row)) };
        }
        self.barrier.wait();
        let last = self.layers.len() - 1;
        for index in 0..=last {
            // SAFETY: each block is taken once; the barrier separates the two halves.
            self.each(&self.all, index, share, |part| unsafe {
                if index > 0 {
                    self.leave(index - 1, &part);
                    part.sync(&self.barrier);
                }
                self.enter(index, &part);
            });
            self.barrier.wait();
        }
        let flow = match &self.wanted {
            None => &self.all,
            Some(flow) => {
                // SAFETY: as above.
                unsafe { self.choose(flow, share) };
                self.barrier.wait();
                flow
            }
        };
        // SAFETY: as above.
        self.each(flow, last + 1, share, |part| unsafe {
            self.leave(last, &part)
        });
        self.barrier.wait();
        // SAFETY: as above.
        unsafe { self.finish(flow, share) };
    }

    /// Do something with all rows of a flow: together, or block by block.
    fn each<'f>(&self, flow: &'f Flow<S>, turn: usize, share: Share, work: impl Fn(Part<'f, S>)) {
        let own = self.places[share.index];
        let part = |first, rows, share, places| Part {
            flow,
            first,
            rows,
            share,
            places,
        };
        if flow.rows <= block_rows::<S>() {
            let places = Places {
                normed: own.normed,
                scratch: own.scratch,
                ..self.places[0]
            };
            if flow.rows > 0 {
                work(part(0, flow.rows, share, places));
            }
            return;
        }
        let mut blocks = blocks(flow.rows, share.of, block_rows::<S>());
        // A prompt's last rows attend to most: they come first, so that threads end together.
        blocks.reverse();
        while let Some(block) = blocks.get(self.taken[turn].fetch_add(1, Ordering::Relaxed)) {
            work(part(block.start, block.len(), Share::ALL, own));
        }
    }

    /// Copy residuals and queries of the rows whose logits are wanted.
    unsafe fn choose(&self, flow: &Flow<S>, share: Share) {
        let queries = flow.queries.stride;
        for to in share.range(flow.rows) {
            let from = self.batch.logits_rows[to] as usize;
            // SAFETY: rows of two matrices of the same widths, apart.
            unsafe {
                let hidden = self.all.hidden.row(from);
                flow.hidden
                    .row(to)
                    .copy_from_nonoverlapping(hidden, self.shape.hidden);
                for head in 0..self.shape.kv_heads {
                    let from = self.all.queries.row(head * self.all.rows + from);
                    let to = flow.queries.row(head * flow.rows + to);
                    to.copy_from_nonoverlapping(from, queries);
                }
            }
        }
    }

    /// The last norm, and this share of the vocabulary's logits.
    unsafe fn finish(&self, flow: &Flow<S>, share: Share) {
        let places = self.places[share.index];
        let most = block_rows::<S>();
        for first in (0..flow.rows).step_by(most) {
            let rows = most.min(flow.rows - first);
            let part = Part {
                flow,
                first,
                rows,
                share,
                places,
            };
            // SAFETY: `logits` has a row for each row of the flow.
            unsafe {
                self.norm(&part, &self.ends.norm);
                let logits = self.logits.skip(first);
                linear(
                    places.normed,
                    &part,
                    &self.ends.head,
                    logits,
                    std::ptr::null(),
                    false,
                );
            }
        }
    }
}
