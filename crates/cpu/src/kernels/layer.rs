//! One layer of a step, for the rows of a part.
//!
//! ```text
//! enter   norm ▶ qkv ▶ rotation, keys and values to the pool
//! leave   attention ▶ output ▶ norm ▶ gate, up ▶ down
//! ```
//!
//! The residual is float32. GEMMs read numbers of the instance (`Simd::Number`).

use super::attention::{Item, MOST_ROWS, Queries, Target, attend};
use super::forward::{Flow, Forward};
use super::gemm::gemm;
use super::keys::Plane;
use super::panels::{Panels, WIDTH};
use super::rows::{Rotation, add_row, gated, narrow_row, norm, rotate};
use super::step::{Matrix, Places, Share, pieces};
use super::tile::Rows;
use crate::simd::Simd;
use crate::team::Barrier;

/// Rows `first ..` of a flow, and a thread's share of the work on them.
pub struct Part<'f, S: Simd> {
    pub flow: &'f Flow<S>,
    pub first: usize,
    pub rows: usize,
    pub share: Share,
    pub places: Places<S>,
}

impl<S: Simd> Forward<'_, S> {
    /// What comes before attention.
    ///
    /// # Safety
    /// As `run`; the part's residuals are there.
    pub unsafe fn enter(&self, index: usize, part: &Part<'_, S>) {
        let layer = &self.layers[index];
        let qkv = part.places.qkv;
        // SAFETY: the part's rows, this share's columns; so below.
        unsafe {
            self.norm(part, &layer.attention_norm);
            let bias = bias(layer.qkv_bias.as_deref());
            linear::<S>(part.places.normed, part, &layer.qkv, qkv, bias, false);
            part.sync(&self.barrier);
            for row in 0..part.rows {
                self.rotate_row(index, part, row);
            }
        }
    }

    /// This share's heads of one row: queries aside, keys and values to the pool.
    unsafe fn rotate_row(&self, index: usize, part: &Part<'_, S>, row: usize) {
        let shape = self.shape;
        let (dim, group, heads) = (shape.head_dim, shape.group(), shape.heads);
        let (norms, eps) = (&self.layers[index].head_norms, shape.norm_eps);
        let flow_row = part.first + row;
        let position = self.batch.positions[flow_row] as usize;
        let slot = usize::try_from(self.batch.slots[flow_row]).ok();
        let table = &self.rotations[position * dim..][..dim];
        let scale = std::f32::consts::LOG2_E / (dim as f32).sqrt();
        for head in part.share.range(heads + 2 * shape.kv_heads) {
            let x = part.places.qkv.at(row, head * dim);
            // SAFETY: head by head, inside of queries and pool.
            unsafe {
                if head < heads {
                    let norm = norms.as_ref().map(|(query, _)| (&query[..], eps));
                    let place = head / group * part.flow.rows + flow_row;
                    let to = part.flow.queries.at(place, head % group * dim);
                    let rotation = Rotation {
                        norm,
                        table,
                        factor: scale,
                    };
                    rotate::<S>(x, rotation, |at, count, x| S::put(to.add(at), count, x));
                } else if let Some(slot) = slot {
                    let side = (head - heads) / shape.kv_heads;
                    let to = self.plane(index, (head - heads) % shape.kv_heads, side);
                    let block = slot / self.pool.block_size * self.pool.block_len(shape);
                    let to = to.add(block + slot % self.pool.block_size * dim);
                    if side == 0 {
                        let norm = norms.as_ref().map(|(_, key)| (&key[..], eps));
                        let rotation = Rotation {
                            norm,
                            table,
                            factor: 1.0,
                        };
                        rotate::<S>(x, rotation, |at, count, x| S::narrow(to.add(at), count, x));
                    } else {
                        narrow_row::<S>(x, dim, to);
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

    /// Attention, and what comes after it.
    ///
    /// # Safety
    /// As `run`; all rows of the step have entered.
    pub unsafe fn leave(&self, index: usize, part: &Part<'_, S>) {
        let layer = &self.layers[index];
        let hidden = part.flow.hidden.skip(part.first);
        let inner = part.places.inner;
        // SAFETY: the part's rows, this share's columns.
        unsafe {
            self.attend(index, part);
            part.sync(&self.barrier);
            let bias = bias(layer.output_bias.as_deref());
            linear::<S>(
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
            let input = rows_of::<S>(part.places.normed);
            gemm::<S, 2>(
                input,
                part.rows,
                &layer.gate_up,
                groups,
                |first, rows, group, sums| {
                    for row in 0..rows {
                        let columns = row * WIDTH..(row + 1) * WIDTH;
                        let to = inner.at(first + row, group * WIDTH);
                        gated::<S>(&sums[0][columns.clone()], &sums[1][columns], to);
                    }
                },
            );
            part.sync(&self.barrier);
            linear::<S>(inner, part, &layer.down, hidden, std::ptr::null(), true);
        }
    }

    unsafe fn attend(&self, layer: usize, part: &Part<'_, S>) {
        let shape = self.shape;
        let (dim, group) = (shape.head_dim, shape.group());
        let rows = part.first..part.first + part.rows;
        let pieces = pieces(&part.flow.segments, rows, MOST_ROWS / group);
        // SAFETY: each thread has a scratch of its own.
        let scratch = unsafe { &mut *part.places.scratch };
        let items = pieces.len() * shape.kv_heads;
        let item = |index: usize| {
            let (piece, kv_head) = (pieces[index / shape.kv_heads], index % shape.kv_heads);
            let plane = |side| Plane {
                data: self.plane(layer, kv_head, side),
                block_len: self.pool.block_len(shape),
                block_size: self.pool.block_size,
                head_dim: dim,
                table: self.batch.table(piece.sequence),
            };
            let queries = Queries::<S> {
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
            Item {
                queries,
                keys: plane(0),
                values: plane(1),
                target,
            }
        };
        for index in (part.share.index..items).step_by(part.share.of) {
            let next = (index + part.share.of).min(items - 1);
            // SAFETY: the batch was checked, the scratch made for its longest context.
            unsafe { attend::<S>(&item(index), &item(next), scratch) };
        }
    }

    /// Norm all rows of a part: cheaper done by every thread than waited for.
    ///
    /// # Safety
    /// As `enter`.
    pub unsafe fn norm(&self, part: &Part<'_, S>, weight: &[f32]) {
        for row in 0..part.rows {
            let from = part.flow.hidden.row(part.first + row);
            // SAFETY: `normed` is this thread's own.
            unsafe {
                norm::<S>(
                    from,
                    weight,
                    self.shape.norm_eps,
                    part.places.normed.row(row),
                )
            };
        }
    }
}

impl<S: Simd> Part<'_, S> {
    /// Wait for those who share it.
    pub fn sync(&self, barrier: &Barrier) {
        if self.share.of > 1 {
            barrier.wait();
        }
    }
}

fn rows_of<S: Simd>(matrix: Matrix<S::Number>) -> Rows<S::Number> {
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
pub unsafe fn linear<S: Simd>(
    input: Matrix<S::Number>,
    part: &Part<'_, S>,
    weight: &Panels,
    to: Matrix<f32>,
    bias: *const f32,
    add: bool,
) {
    let panels = part.share.range(weight.count());
    let put = |first: usize, rows: usize, panel: usize, sums: [&[f32]; 1]| {
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
            unsafe { add_row::<S>(sums, bias, to.at(first + row, column), add) };
        }
    };
    // SAFETY: the caller's promise.
    unsafe { gemm::<S, 1>(rows_of::<S>(input), part.rows, weight, panels, put) };
}
