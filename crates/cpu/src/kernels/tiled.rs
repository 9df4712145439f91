//! Products by AMX: an instruction multiplies a tile of rows with a tile of a panel.
//!
//! ```text
//! rows     16 rows x 32 inputs, where they are
//! panel    16 pairs of inputs x 16 outputs, where they are
//! sums     16 rows x 16 outputs, float32, in registers while the inputs of a panel pass:
//!          1 x 3 or 2 x 3 tiles of a weight, 1 x 4 of packed keys or values
//! ```
//!
//! An instruction adds the products of its 32 inputs, then that to a sum. It does so for one
//! row as for 16: a row's sums do not depend on the number of rows.

use std::arch::asm;
use std::ops::Range;

use super::gemm::AHEAD_BYTES;
use super::panels::{Panels, WIDTH};
use super::tile::{Rows, Sums, tiles};

/// Most rows of a tile; its pairs of inputs, and its outputs.
pub const TILE: usize = 16;

/// Inputs of a tile.
const INPUTS: usize = 2 * TILE;

/// Rows that pass a weight together.
const BLOCK_ROWS: usize = 2 * TILE;

/// Most outputs of a panel.
const MOST_COLUMNS: usize = 4 * TILE;

/// As `gemm::gemm`, of a weight in bfloat16.
///
/// # Safety
/// As there; the processor runs the instance that has AMX.
pub unsafe fn gemm<const P: usize>(
    rows: Rows<u16>,
    count: usize,
    weight: &Panels,
    groups: Range<usize>,
    mut out: impl FnMut(usize, usize, usize, [&[f32]; P]),
) {
    if count == 0 {
        return;
    }
    // SAFETY: the caller's promise; so below.
    let _shaped = unsafe { Shaped::for_rows(count) };
    let mut sums = [[0.0; BLOCK_ROWS * WIDTH]; P];
    for group in groups {
        for (first, block) in tiles(count, BLOCK_ROWS) {
            for (side, sums) in sums.iter_mut().enumerate() {
                let panel = weight.panel(P * group + side).as_ptr();
                let sums = Sums {
                    data: sums.as_mut_ptr(),
                    stride: WIDTH,
                };
                // SAFETY: see above.
                unsafe {
                    multiply::<WIDTH>(rows.at(first, 0), block, panel, weight.units(), sums, false);
                }
            }
            let sums = sums.each_ref().map(|sums| &sums[..block * WIDTH]);
            out(first, block, group, sums);
        }
    }
}

/// While it lives, this thread's tiles have a shape.
pub struct Shaped;

impl Shaped {
    /// To multiply blocks of `count` rows, or blocks of at least 16 if there are as many.
    ///
    /// # Safety
    /// The processor runs the instance that has AMX.
    pub unsafe fn for_rows(count: usize) -> Self {
        let shape = TileShape::of(count.min(TILE));
        // SAFETY: the caller's promise.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &shape, options(nostack, preserves_flags)) };
        Self
    }
}

impl Drop for Shaped {
    fn drop(&mut self) {
        // SAFETY: whoever made it had the instruction.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

/// How many rows and bytes tiles have, as the processor reads it.
#[repr(C, align(64))]
struct TileShape {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileShape {
    /// Sums (0 to 5) and rows (6) have `rows` rows, panels (7) all.
    fn of(rows: usize) -> Self {
        let mut shape = Self {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        shape.row_bytes[..8].fill((2 * INPUTS) as u16);
        shape.rows[..7].fill(rows as u8);
        shape.rows[7] = TILE as u8;
        shape
    }
}

/// Multiply rows with a panel of 48 outputs (at most 32 rows) or 64 (at most 16); adds to the
/// sums if `go_on`.
///
/// # Safety
/// A `Shaped` for these rows lives. The rows hold as many numbers as there are pairs, twice;
/// there is space for the sums.
pub unsafe fn multiply<const COLUMNS: usize>(
    rows: Rows<u16>,
    count: usize,
    panel: *const u16,
    pairs: usize,
    sums: Sums,
    go_on: bool,
) {
    let (whole, rest) = (pairs / TILE, pairs % TILE);
    let product = Product {
        rows,
        panel,
        steps: whole,
        sums,
        go_on,
    };
    if whole > 0 {
        // SAFETY: the caller's promise; so below.
        unsafe { product.run::<COLUMNS>(count) };
    }
    if rest == 0 {
        return;
    }
    // A step more, filled up with zeros.
    let mut weights = [0; INPUTS * MOST_COLUMNS];
    let from = panel.wrapping_add(whole * INPUTS * COLUMNS);
    // SAFETY: as many pairs are left.
    unsafe { from.copy_to_nonoverlapping(weights.as_mut_ptr(), 2 * rest * COLUMNS) };
    let mut numbers = [0; BLOCK_ROWS * INPUTS];
    for (row, to) in numbers.chunks_exact_mut(INPUTS).take(count).enumerate() {
        let from = rows.at(row, whole * INPUTS).data;
        // SAFETY: the row has as many pairs more.
        unsafe { from.copy_to_nonoverlapping(to.as_mut_ptr(), 2 * rest) };
    }
    let last = Product {
        rows: Rows {
            data: numbers.as_ptr(),
            stride: INPUTS,
        },
        panel: weights.as_ptr(),
        steps: 1,
        sums,
        go_on: go_on || whole > 0,
    };
    // SAFETY: see above.
    unsafe { last.run::<COLUMNS>(count) };
}

/// Rows times whole tiles of a panel.
struct Product {
    rows: Rows<u16>,
    panel: *const u16,
    steps: usize,
    sums: Sums,
    go_on: bool,
}

/// Ask for a third of the step that is `AHEAD_BYTES` ahead: few rows wait for memory.
macro_rules! ahead {
    ($third:literal) => {
        concat!(
            ".irp line,0,64,128,192,256,320,384,448,512,576,640,704,768,832,896,960\n",
            "prefetcht0 [{panel} + {ahead} + 1024 * ",
            $third,
            " + \\line]\n",
            ".endr\n"
        )
    };
}

/// Three tiles of a panel: `load` or `store` their sums, or multiply a `step` into the first three.
macro_rules! three {
    (load $sums:literal, $a:literal $b:literal $c:literal) => {
        concat!(
            "tileloadd tmm",
            $a,
            ", [{",
            $sums,
            "} + {sum}]\n",
            "tileloadd tmm",
            $b,
            ", [{",
            $sums,
            "} + {sum} + 64]\n",
            "tileloadd tmm",
            $c,
            ", [{",
            $sums,
            "} + {sum} + 128]\n",
        )
    };
    (store $sums:literal, $a:literal $b:literal $c:literal) => {
        concat!(
            "tilestored [{",
            $sums,
            "} + {sum}], tmm",
            $a,
            "\n",
            "tilestored [{",
            $sums,
            "} + {sum} + 64], tmm",
            $b,
            "\n",
            "tilestored [{",
            $sums,
            "} + {sum} + 128], tmm",
            $c,
            "\n",
        )
    };
    (step) => {
        concat!(
            "tileloadd tmm6, [{rows} + {row}]\n",
            "tileloadd tmm7, [{panel} + {pair}]\n",
            "tdpbf16ps tmm0, tmm6, tmm7\n",
            ahead!(0),
            "tileloadd tmm7, [{panel} + {pair} + 64]\n",
            "tdpbf16ps tmm1, tmm6, tmm7\n",
            ahead!(1),
            "tileloadd tmm7, [{panel} + {pair} + 128]\n",
            "tdpbf16ps tmm2, tmm6, tmm7\n",
            ahead!(2),
        )
    };
}

/// The instructions of a product: `load`, `zero` and `store` of the sums, and a `step`.
macro_rules! product {
    (
        $product:expr, $columns:literal, $below:expr,
        zero $($zero:expr),+; load $($load:expr),+; step $($step:expr),+; store $($store:expr),+;
    ) => {
        asm!(
            "test {go_on:e}, {go_on:e}",
            "jnz 2f",
            $($zero,)+
            "jmp 3f",
            "2:",
            $($load,)+
            "3: /* {sums_below} {ahead} */",
            $($step,)+
            "add {rows}, {row_step}",
            "add {below}, {row_step}",
            "add {panel}, {panel_step}",
            "dec {steps}",
            "jnz 3b",
            $($store,)+
            rows = inout(reg) $product.rows.data => _,
            below = inout(reg) $product.rows.at($below, 0).data => _,
            panel = inout(reg) $product.panel => _,
            steps = inout(reg) $product.steps => _,
            sums = in(reg) $product.sums.data,
            sums_below = in(reg) $product.sums.at($below, 0).data,
            row = in(reg) size_of::<u16>() * $product.rows.stride,
            pair = in(reg) 2 * size_of::<u16>() * $columns,
            sum = in(reg) size_of::<f32>() * $product.sums.stride,
            go_on = in(reg) u32::from($product.go_on),
            ahead = const AHEAD_BYTES,
            row_step = const 2 * INPUTS,
            panel_step = const 2 * INPUTS * $columns,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

impl Product {
    /// # Safety
    /// As `multiply`; there is a step.
    unsafe fn run<const COLUMNS: usize>(&self, count: usize) {
        const { assert!(COLUMNS == 48 || COLUMNS == 64) };
        // SAFETY: the caller's promise.
        unsafe {
            match (COLUMNS, count) {
                (64, _) => self.one_by_four(),
                (_, ..=TILE) => self.one_by_three(),
                // The second tile ends with the block; some rows may be in both tiles, with the
                // same sums: all sums are loaded before any is stored.
                _ => self.two_by_three(count - TILE),
            }
        }
    }

    unsafe fn one_by_three(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            product!(self, 48, 0,
                zero "tilezero tmm0", "tilezero tmm1", "tilezero tmm2";
                load three!(load "sums", 0 1 2);
                step three!(step);
                store three!(store "sums", 0 1 2);
            );
        }
    }

    unsafe fn two_by_three(&self, below: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            product!(self, 48, below,
                zero
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2",
                    "tilezero tmm3", "tilezero tmm4", "tilezero tmm5";
                load three!(load "sums", 0 1 2), three!(load "sums_below", 3 4 5);
                step
                    three!(step),
                    "tileloadd tmm6, [{below} + {row}]",
                    "tdpbf16ps tmm5, tmm6, tmm7",
                    "tileloadd tmm7, [{panel} + {pair} + 64]",
                    "tdpbf16ps tmm4, tmm6, tmm7",
                    "tileloadd tmm7, [{panel} + {pair}]",
                    "tdpbf16ps tmm3, tmm6, tmm7";
                store three!(store "sums", 0 1 2), three!(store "sums_below", 3 4 5);
            );
        }
    }

    unsafe fn one_by_four(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            product!(self, 64, 0,
                zero "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3";
                load
                    "tileloadd tmm0, [{sums} + {sum}]",
                    "tileloadd tmm1, [{sums} + {sum} + 64]",
                    "tileloadd tmm2, [{sums} + {sum} + 128]",
                    "tileloadd tmm3, [{sums} + {sum} + 192]";
                step
                    "tileloadd tmm6, [{rows} + {row}]",
                    "tileloadd tmm7, [{panel} + {pair}]",
                    "tdpbf16ps tmm0, tmm6, tmm7",
                    "tileloadd tmm7, [{panel} + {pair} + 64]",
                    "tdpbf16ps tmm1, tmm6, tmm7",
                    "tileloadd tmm7, [{panel} + {pair} + 128]",
                    "tdpbf16ps tmm2, tmm6, tmm7",
                    "tileloadd tmm7, [{panel} + {pair} + 192]",
                    "tdpbf16ps tmm3, tmm6, tmm7";
                store
                    "tilestored [{sums} + {sum}], tmm0",
                    "tilestored [{sums} + {sum} + 64], tmm1",
                    "tilestored [{sums} + {sum} + 128], tmm2",
                    "tilestored [{sums} + {sum} + 192], tmm3";
            );
        }
    }
}
