//! GEMM: rows times a packed weight, summed in float32.
//!
//! ```text
//! few rows    a tile widens the packed weight in registers
//! many rows   a chunk of a panel is widened to float32 once for all rows of a block
//!             (chunk.rs); not where instructions multiply bfloat16 numbers as they are
//! AMX         tiles of 16 rows, however few there are (tiled.rs)
//! ```
//!
//! The first two add the same terms in the same order, AMX in an order of its own: with every
//! instance a row's sums do not depend on the number of rows.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::chunk::{Chunk, Widen, chunk_units};
use super::int8::Int8Panel;
use super::panels::{Format, Panel, Panels, WIDTH};
use super::tile::{Rows, Sums, multiply, tiles};
use crate::simd::{Floats, Simd};

/// Most rows of a tile, of any instance.
const MOST_ROWS: usize = 8;

/// Most rows that share a widened chunk.
const BLOCK_ROWS: usize = 128;

/// Few rows wait for memory: the weight is prefetched so far ahead.
pub const AHEAD_BYTES: usize = 12 << 10;

/// Multiply `count` rows with the panels `P * group ..` of each group of a range.
///
/// `out(first_row, rows, group, sums)` takes sums when they are done, group by group: of each
/// panel `WIDTH` for each row.
///
/// # Safety
/// The processor runs the instance. The rows hold as many numbers as the weight has inputs;
/// an odd one is followed by a 0.
pub unsafe fn gemm<S: Simd, const P: usize>(
    rows: Rows<S::Number>,
    count: usize,
    weight: &Panels,
    groups: Range<usize>,
    mut out: impl FnMut(usize, usize, usize, [&[f32]; P]),
) {
    #[cfg(target_arch = "x86_64")]
    if S::TILED && weight.format() == Format::Bfloat16 {
        // SAFETY: the caller's promise; numbers are bfloat16.
        return unsafe { super::tiled::gemm::<P>(rows.cast(), count, weight, groups, out) };
    }
    if widens::<S>(weight.format(), count) {
        for (first, block) in tiles(count, BLOCK_ROWS) {
            for group in groups.clone() {
                let put = |sums: [&[f32]; P]| out(first, block, group, sums);
                // SAFETY: the caller's promise.
                unsafe { many::<S, P>(rows.at(first, 0), block, weight, group, put) };
            }
        }
    } else {
        for group in groups {
            // SAFETY: the caller's promise.
            unsafe { few::<S, P>(rows, count, weight, group, &mut out) };
        }
    }
}

/// Whether to widen a weight once for all rows. An instance that multiplies pairs of bfloat16
/// numbers needs them as they are.
fn widens<S: Simd>(format: Format, rows: usize) -> bool {
    let whole = format == Format::Int8 || S::INPUTS == 1;
    whole && rows >= 2 * S::Floats::ROWS
}

/// One group of panels, tile by tile.
unsafe fn few<S: Simd, const P: usize>(
    rows: Rows<S::Number>,
    count: usize,
    weight: &Panels,
    group: usize,
    out: &mut impl FnMut(usize, usize, usize, [&[f32]; P]),
) {
    const { assert!(S::Floats::ROWS <= MOST_ROWS) };
    let mut sums = [[0.0; MOST_ROWS * WIDTH]; P];
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
                        let panel = Int8Panel::new(data, weight.inputs(), ahead_bytes);
                        multiply::<S, _>(a, tile, &panel, units, sums, false);
                    }
                }
            }
        }
        out(
            first,
            tile,
            group,
            sums.each_ref().map(|sums| &sums[..tile * WIDTH]),
        );
    }
}

/// One group of panels for a block of rows.
unsafe fn many<S: Simd, const P: usize>(
    rows: Rows<S::Number>,
    count: usize,
    weight: &Panels,
    group: usize,
    out: impl FnOnce([&[f32]; P]),
) {
    let mut sums = [const { MaybeUninit::<[f32; BLOCK_ROWS * WIDTH]>::uninit() }; P];
    for (side, sums) in sums.iter_mut().enumerate() {
        let data = weight.panel(P * group + side).as_ptr();
        let sums = Sums {
            data: sums.as_mut_ptr().cast(),
            stride: WIDTH,
        };
        // SAFETY: a panel has the weight's units, a block at most `BLOCK_ROWS` rows of sums.
        unsafe {
            match weight.format() {
                Format::Bfloat16 => {
                    let panel: Panel<WIDTH> = Panel {
                        data,
                        ahead_bytes: 0,
                    };
                    block::<S, _>(rows, count, weight, &panel, sums);
                }
                Format::Int8 => {
                    let panel = Int8Panel::new(data, weight.inputs(), 0);
                    block::<S, _>(rows, count, weight, &panel, sums);
                }
            }
        }
    }
    // SAFETY: all sums of `count` rows were written.
    out(sums
        .each_ref()
        .map(|sums| unsafe { std::slice::from_raw_parts(sums.as_ptr().cast(), count * WIDTH) }));
}

/// One panel for a block of rows, chunk by chunk.
unsafe fn block<S: Simd, W: Widen<S>>(
    rows: Rows<S::Number>,
    count: usize,
    weight: &Panels,
    panel: &W,
    sums: Sums,
) {
    let inputs = weight.format().inputs();
    let mut chunk = Chunk::<S>::new();
    for (first, units) in tiles(weight.units(), chunk_units::<S>(inputs)) {
        for column in (0..WIDTH).step_by(Chunk::<S>::COLUMNS) {
            // SAFETY: the caller's promise; so below.
            let pairs = unsafe { chunk.fill(panel, first, units, column) } / 2;
            for (row, tile) in tiles(count, S::Floats::ROWS) {
                let (a, sums) = (rows.at(row, first * inputs), sums.at(row, column));
                let slice = chunk.source(row == 0);
                // SAFETY: see above.
                unsafe { multiply::<S, _>(a, tile, &slice, pairs, sums, first > 0) };
            }
        }
    }
}
