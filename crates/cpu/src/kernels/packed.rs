//! Rows times packed keys or values: panels of 64 columns, one behind the other (keys.rs).

use super::keys::COLUMNS;
use super::panels::Panel;
use super::tile::{Rows, Sums, multiply, tiles};
use crate::simd::Simd;

/// Most rows of a tile of 64 columns.
pub const TILE_ROWS: usize = 6;

/// Panels side by side, of `pairs` pairs of inputs each.
#[derive(Clone, Copy)]
pub struct Packed {
    pub data: *const u16,
    pub panels: usize,
    pub pairs: usize,
}

/// Multiply rows with all panels; adds to the sums if `go_on`.
///
/// # Safety
/// The processor runs the instance. The rows hold as many numbers as there are pairs, twice;
/// there is space for `COLUMNS` sums of each row and panel.
pub unsafe fn multiply_packed<S: Simd>(
    a: Rows<S::Number>,
    rows: usize,
    packed: Packed,
    sums: Sums,
    go_on: bool,
) {
    let (pairs, panels) = (packed.pairs, 0..packed.panels);
    let data = |panel: usize| packed.data.wrapping_add(panel * pairs * 2 * COLUMNS);
    #[cfg(target_arch = "x86_64")]
    if S::TILED {
        use super::tiled::{Shaped, TILE, multiply};
        let a: Rows<u16> = a.cast();
        for (row, count) in tiles(rows, TILE) {
            // SAFETY: the caller's promise; numbers are bfloat16.
            unsafe {
                let _shaped = Shaped::for_rows(count);
                for panel in panels.clone() {
                    let sums = sums.at(row, panel * COLUMNS);
                    multiply::<COLUMNS>(a.at(row, 0), count, data(panel), pairs, sums, go_on);
                }
            }
        }
        return;
    }
    for panel in panels {
        let source: Panel<COLUMNS> = Panel {
            data: data(panel),
            ahead_bytes: 0,
        };
        for (row, count) in tiles(rows, TILE_ROWS) {
            let sums = sums.at(row, panel * COLUMNS);
            // SAFETY: the caller's promise.
            unsafe { multiply::<S, _>(a.at(row, 0), count, &source, pairs, sums, go_on) };
        }
    }
}
