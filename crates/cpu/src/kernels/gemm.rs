//! GEMM: rows times a packed weight, summed in float32.

use std::ops::Range;

use super::int8::Int8Panel;
use super::panels::{Format, Panel, Panels, WIDTH};
use super::tile::{Rows, Sums, multiply, tiles};
use crate::simd::{Floats, Simd};

/// Most rows of a tile, of any instance.
pub const MOST_ROWS: usize = 8;

/// Few rows wait for memory: the weight is prefetched so far ahead.
const AHEAD_BYTES: usize = 12 << 10;

/// The sums of one tile for each of `P` neighbouring panels.
pub type Tile<const P: usize> = [[f32; MOST_ROWS * WIDTH]; P];

/// Multiply `count` rows with the panels `P * group ..` of each group of a range.
///
/// `out(first_row, rows, group, sums)` takes every tile when it is done, group by group.
///
/// # Safety
/// The processor runs the instance. The rows hold as many numbers as the weight has inputs;
/// an odd one is followed by a 0.
pub unsafe fn gemm<S: Simd, const P: usize>(
    rows: Rows<S::Number>,
    count: usize,
    weight: &Panels,
    groups: Range<usize>,
    mut out: impl FnMut(usize, usize, usize, &Tile<P>),
) {
    const { assert!(S::Floats::ROWS <= MOST_ROWS) };
    let mut sums: Tile<P> = [[0.0; MOST_ROWS * WIDTH]; P];
    for group in groups {
        for (index, (first, tile)) in tiles(count, S::Floats::ROWS).enumerate() {
            let a = rows.at(first, 0);
            for (side, sums) in sums.iter_mut().enumerate() {
                let data = weight.panel(P * group + side);
                // The first tile reads memory; the second has time to prefetch what the
                // first one reads next.
                let ahead_bytes = match index {
                    0 => AHEAD_BYTES,
                    1 => P * size_of_val(data),
                    _ => 0,
                };
                let sums = Sums {
                    data: sums.as_mut_ptr(),
                    stride: WIDTH,
                };
                let (data, units) = (data.as_ptr(), weight.units());
                // SAFETY: a panel has `units` units, a tile `MOST_ROWS` rows of sums.
                unsafe {
                    match weight.format() {
                        Format::Bfloat16 => {
                            let panel: Panel<WIDTH> = Panel { data, ahead_bytes };
                            multiply::<S, _>(a, tile, &panel, units, sums, false);
                        }
                        Format::Int8 => {
                            let panel = Int8Panel {
                                data,
                                inputs: weight.inputs(),
                                column: 0,
                                ahead_bytes,
                            };
                            multiply::<S, _>(a, tile, &panel, units, sums, false);
                        }
                    }
                }
            }
            out(first, tile, group, &sums);
        }
    }
}
