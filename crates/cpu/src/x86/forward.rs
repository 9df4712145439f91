//! The forward pass of one step; every thread of the team runs `Forward::run`.
//!
//! ```text
//! enter   norm ▶ qkv ▶ rotation, keys and values to the pool
//! leave   attention ▶ output ▶ norm ▶ gate, up ▶ down
//! ```
//!
//! `leave` needs the keys of all rows of its sequences: a barrier lies between. The
//! residual is float32; what products read is bfloat16. In the last layer only rows
//! whose logits are wanted leave.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::attention::{MOST_ROWS, Queries, Target, attend};
use super::keys::Plane;
use super::panels::{Panels, WIDTH};
use super::product::{Rows, product};
use super::rows::{Turn, gated, narrow_row, norm, put, turn, widen_row};
use super::step::{BLOCK_ROWS, Matrix, Places, Segment, Share, blocks, pieces};
use super::weights::{Ends, Layer};
use crate::batch::{Batch, Pool};
use crate::shape::Shape;
use crate::team::Barrier;

/// Rows that go through layers: a step's, or those of them whose logits are wanted.
pub struct Flow {
    pub rows: usize,
    pub hidden: Matrix<f32>,
    /// `[kv_heads, rows, group, head_dim]`.
    pub queries: Matrix<u16>,
    pub segments: Vec<Segment>,
}

/// A step, the same for all threads.
pub struct Forward<'a> {
    pub shape: &'a Shape,
    pub layers: &'a [Layer],
    pub ends: &'a Ends,
    pub pool: Pool,
    pub batch: Batch<'a>,
    /// By position: cosines, then sines, `head_dim` numbers.
    pub rotations: &'a [f32],
    pub all: Flow,
    /// `None`: all rows' logits are wanted, in order.
    pub wanted: Option<Flow>,
    /// One for each thread.
    pub places: Vec<Places>,
    pub logits: Matrix<f32>,
    pub barrier: Barrier,
    /// Blocks and attention that threads have taken; one for each use.
    pub taken: Vec<AtomicUsize>,
}

/// Rows `first ..` of a flow, and a thread's share of the work on them.
#[derive(Clone, Copy)]
struct Part<'f> {
    flow: &'f Flow,
    first: usize,
    rows: usize,
    share: Share,
    places: Places,
}

impl Forward<'_> {
    /// Counters that a step needs.
    pub fn counters(layers: usize) -> usize {
        2 * layers + 2
    }

    /// One thread's part of the step.
    ///
    /// # Safety
    /// The batch was checked; all places are large enough; as many threads run it, with
    /// indices of their own, as there are places.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
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
            unsafe { widen_row(from, self.all.hidden.row(row)) };
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
    fn each<'f>(&self, flow: &'f Flow, turn: usize, share: Share, work: impl Fn(Part<'f>)) {
        let own = self.places[share.index];
        let part = |first, rows, share, places| Part {
            flow,
            first,
            rows,
            share,
            places,
        };
        if flow.rows <= BLOCK_ROWS {
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
        let blocks = blocks(flow.rows, share.of);
        while let Some(block) = blocks.get(self.taken[turn].fetch_add(1, Ordering::Relaxed)) {
            work(part(block.start, block.len(), Share::ALL, own));
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn enter(&self, index: usize, part: &Part<'_>) {
        let layer = &self.layers[index];
        let qkv = part.places.qkv;
        // SAFETY: the part's rows, this share's columns; so below.
        unsafe {
            self.norm(part, &layer.attention_norm);
            let bias = bias(layer.qkv_bias.as_deref());
            linear(part.places.normed, part, &layer.qkv, qkv, bias, false);
            part.sync(&self.barrier);
            for row in 0..part.rows {
                self.rotate(index, part, row);
            }
        }
    }

    /// This share's heads of one row: queries aside, keys and values to the pool.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn rotate(&self, index: usize, part: &Part<'_>, row: usize) {
        let shape = self.shape;
        let (dim, group, heads) = (shape.head_dim, shape.group(), shape.heads);
        let (norms, eps) = (&self.layers[index].head_norms, shape.norm_eps);
        let flow_row = part.first + row;
        let position = self.batch.positions[flow_row] as usize;
        let slot = usize::try_from(self.batch.slots[flow_row]).ok();
        let rotation = &self.rotations[position * dim..][..dim];
        let scale = std::f32::consts::LOG2_E / (dim as f32).sqrt();
        for head in part.share.range(heads + 2 * shape.kv_heads) {
            let x = part.places.qkv.at(row, head * dim);
            // SAFETY: head by head, inside of queries and pool.
            unsafe {
                if head < heads {
                    let norm = norms.as_ref().map(|(query, _)| (&query[..], eps));
                    let place = head / group * part.flow.rows + flow_row;
                    let to = part.flow.queries.at(place, head % group * dim);
                    turn(
                        x,
                        Turn {
                            norm,
                            rotation,
                            factor: scale,
                        },
                        to,
                    );
                } else if let Some(slot) = slot {
                    let side = (head - heads) / shape.kv_heads;
                    let to = self.plane(index, (head - heads) % shape.kv_heads, side);
                    let block = slot / self.pool.block_size * self.pool.block_len(shape);
                    let to = to.add(block + slot % self.pool.block_size * dim);
                    if side == 0 {
                        let norm = norms.as_ref().map(|(_, key)| (&key[..], eps));
                        turn(
                            x,
                            Turn {
                                norm,
                                rotation,
                                factor: 1.0,
                            },
                            to,
                        );
                    } else {
                        narrow_row(x, dim, 1.0, to);
                    }
                }
            }
        }
    }

    /// Keys (0) or values (1) of a layer's head in block 0.
    fn plane(&self, layer: usize, kv_head: usize, side: usize) -> *mut u16 {
        let head = kv_head * self.pool.head_len(self.shape);
        let plane = (2 * layer + side) * self.pool.plane_len(self.shape);
        self.pool.data.wrapping_add(head + plane)
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn leave(&self, index: usize, part: &Part<'_>) {
        let layer = &self.layers[index];
        let hidden = part.flow.hidden.skip(part.first);
        let inner = part.places.inner;
        // SAFETY: the part's rows, this share's columns.
        unsafe {
            self.attend(index, part);
            part.sync(&self.barrier);
            let bias = bias(layer.output_bias.as_deref());
            linear(
                part.places.attended,
                part,
                &layer.output,
                hidden,
                bias,
                true,
            );
            part.sync(&self.barrier);
            self.norm(part, &layer.mlp_norm);
            let groups = part.share.range(layer.gate_up.count() / 2);
            let input = rows_of(part.places.normed);
            product::<2>(
                input,
                part.rows,
                &layer.gate_up,
                groups,
                |first, rows, group, sums| {
                    for row in 0..rows {
                        let columns = row * WIDTH..(row + 1) * WIDTH;
                        let to = inner.at(first + row, group * WIDTH);
                        gated(&sums[0][columns.clone()], &sums[1][columns], to);
                    }
                },
            );
            part.sync(&self.barrier);
            linear(inner, part, &layer.down, hidden, std::ptr::null(), true);
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn attend(&self, layer: usize, part: &Part<'_>) {
        let shape = self.shape;
        let (dim, group) = (shape.head_dim, shape.group());
        let rows = part.first..part.first + part.rows;
        let pieces = pieces(&part.flow.segments, rows, MOST_ROWS / group);
        // SAFETY: each thread has a scratch of its own.
        let scratch = unsafe { &mut *part.places.scratch };
        let items = pieces.len() * shape.kv_heads;
        for item in (part.share.index..items).step_by(part.share.of) {
            let (piece, kv_head) = (pieces[item / shape.kv_heads], item % shape.kv_heads);
            let plane = |side| Plane {
                data: self.plane(layer, kv_head, side),
                block_len: self.pool.block_len(shape),
                block_size: self.pool.block_size,
                head_dim: dim,
                table: self.batch.table(piece.sequence),
            };
            let queries = Queries {
                data: part.flow.queries.row(kv_head * part.flow.rows + piece.row),
                tokens: piece.rows,
                group,
                first: piece.position,
                window: shape.windows[layer],
            };
            let attended = part.places.attended;
            let data = attended.at(piece.row - part.first, kv_head * group * dim);
            let target = Target {
                data,
                stride: attended.stride,
            };
            // SAFETY: the batch was checked, the scratch made for its longest context.
            unsafe { attend(queries, plane(0), plane(1), target, scratch) };
        }
    }

    /// All rows of a part: cheaper done by every thread than waited for.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn norm(&self, part: &Part<'_>, weight: &[f32]) {
        for row in 0..part.rows {
            let from = part.flow.hidden.row(part.first + row);
            // SAFETY: `normed` is this thread's own.
            unsafe {
                norm(
                    from,
                    weight,
                    self.shape.norm_eps,
                    part.places.normed.row(row),
                )
            };
        }
    }

    /// Copy residuals and queries of the rows whose logits are wanted.
    unsafe fn choose(&self, flow: &Flow, share: Share) {
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
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn finish(&self, flow: &Flow, share: Share) {
        let places = self.places[share.index];
        for first in (0..flow.rows).step_by(BLOCK_ROWS) {
            let rows = BLOCK_ROWS.min(flow.rows - first);
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

impl Part<'_> {
    /// Wait for those who share it.
    fn sync(&self, barrier: &Barrier) {
        if self.share.of > 1 {
            barrier.wait();
        }
    }
}

fn rows_of(matrix: Matrix<u16>) -> Rows {
    Rows {
        data: matrix.row(0),
        stride: matrix.stride,
    }
}

fn bias(bias: Option<&[f32]>) -> *const f32 {
    bias.map_or(std::ptr::null(), <[f32]>::as_ptr)
}

/// A part's share of a product's outputs, written or added to `to`.
///
/// # Safety
/// `input` and `to` hold the part's rows; `bias` is null or holds a number per output.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn linear(
    input: Matrix<u16>,
    part: &Part<'_>,
    weight: &Panels,
    to: Matrix<f32>,
    bias: *const f32,
    add: bool,
) {
    let panels = part.share.range(weight.count());
    let put = |first: usize, rows: usize, panel: usize, sums: &[[f32; 8 * WIDTH]; 1]| {
        let column = panel * WIDTH;
        let width = WIDTH.min(weight.outputs() - column);
        let bias = if bias.is_null() {
            bias
        } else {
            bias.wrapping_add(column)
        };
        for row in 0..rows {
            let sums = &sums[0][row * WIDTH..][..width];
            // SAFETY: the caller's promise.
            unsafe { put(sums, bias, to.at(first + row, column), add) };
        }
    };
    // SAFETY: the caller's promise.
    unsafe { product::<1>(rows_of(input), part.rows, weight, panels, put) };
}
