//! A chunk of a panel, widened to float32 once for all rows of a block.
//!
//! Tiles then load weights without widening them: of 8 bits that takes three instructions. And
//! they read a chunk from end to end, not a panel in strides. A chunk holds all inputs, or a
//! part of them, of as many outputs as a tile has: it stays in the second-level cache while
//! the block's rows pass.

use std::mem::MaybeUninit;

use super::panels::WIDTH;
use super::tile::{Source, width};
use crate::simd::{Floats, Simd, Vector, prefetch};

/// Most numbers of a chunk: 48 KiB.
const LEN: usize = 12288;

/// A panel that is widened input by input.
///
/// # Safety
/// As for `Source`.
pub trait Widen<S: Simd>: Source<S> {
    /// Bytes from two inputs to the next two.
    const PAIR_BYTES: usize;

    /// Inputs of a unit.
    fn inputs(&self, unit: usize) -> usize;
    /// Where a unit's first number of the columns is.
    fn place(&self, unit: usize) -> *const u16;
    /// One input of a unit, for each of `V` vectors.
    unsafe fn wide<const V: usize>(unit: &Self::Unit<V>, input: usize) -> [Vector<S>; V];
}

const LINE_BYTES: usize = 64;

/// Most units of a chunk, given their inputs.
pub const fn chunk_units<S: Simd>(inputs: usize) -> usize {
    LEN / (Chunk::<S>::COLUMNS * inputs)
}

#[repr(align(64))]
struct Numbers([MaybeUninit<f32>; LEN]);

/// Space for a chunk.
pub struct Chunk<S: Simd> {
    numbers: Numbers,
    /// Where the weight goes on after the chunk.
    next: *const u16,
    pair_bytes: usize,
    instance: std::marker::PhantomData<S>,
}

impl<S: Simd> Chunk<S> {
    const VECTORS: usize = width(
        S::Floats::ROWS,
        WIDTH / S::Floats::LANES,
        S::Floats::REGISTERS,
    );

    /// Outputs of a chunk.
    pub const COLUMNS: usize = Self::VECTORS * S::Floats::LANES;

    /// Space without numbers.
    pub fn new() -> Self {
        Self {
            numbers: Numbers([const { MaybeUninit::uninit() }; LEN]),
            next: std::ptr::null(),
            pair_bytes: 0,
            instance: std::marker::PhantomData,
        }
    }

    /// Widen units from `first` on, of the outputs from `column` on; returns how many inputs
    /// these are, made even by zeros.
    ///
    /// # Safety
    /// As for `Source`; there are no more units than `chunk_units` allows.
    pub unsafe fn fill<W: Widen<S>>(
        &mut self,
        panel: &W,
        first: usize,
        units: usize,
        column: usize,
    ) -> usize {
        let panel = panel.skip_columns(column);
        self.next = panel.place(first + units);
        self.pair_bytes = W::PAIR_BYTES;
        // SAFETY: the caller's promise.
        unsafe {
            match const { Self::VECTORS } {
                1 => self.widen::<W, 1>(panel, first, units),
                2 => self.widen::<W, 2>(panel, first, units),
                3 => self.widen::<W, 3>(panel, first, units),
                4 => self.widen::<W, 4>(panel, first, units),
                other => unreachable!("tiles of all instances have fewer than {other} vectors"),
            }
        }
    }

    unsafe fn widen<W: Widen<S>, const V: usize>(
        &mut self,
        mut panel: W,
        first: usize,
        units: usize,
    ) -> usize {
        let to: *mut f32 = self.numbers.0.as_mut_ptr().cast();
        // SAFETY: the caller's promise.
        let run = move || unsafe {
            let lanes = S::Floats::LANES;
            let put = |input: usize, numbers: [Vector<S>; V]| {
                for (v, x) in numbers.into_iter().enumerate() {
                    S::Floats::store(to.add((input * V + v) * lanes), lanes, x);
                }
            };
            let mut count = 0;
            for index in first..first + units {
                let unit = panel.unit::<V>(index);
                for input in 0..panel.inputs(index) {
                    put(count, W::wide(&unit, input));
                    count += 1;
                }
            }
            if !count.is_multiple_of(2) {
                put(count, [S::Floats::splat(0.0); V]);
                count += 1;
            }
            count
        };
        // SAFETY: as above.
        unsafe { S::vectorize(run) }
    }

    /// The chunk as tiles read it, two inputs a unit; with each, `ahead` prefetches two inputs
    /// of what the weight goes on with.
    pub fn source(&self, ahead: bool) -> Slice {
        Slice {
            data: self.numbers.0.as_ptr().cast(),
            next: self.next,
            pair_bytes: if ahead { self.pair_bytes } else { 0 },
        }
    }
}

/// Pairs of inputs, float32.
pub struct Slice {
    data: *const f32,
    next: *const u16,
    pair_bytes: usize,
}

impl<S: Simd> Source<S> for Slice {
    const COLUMNS: usize = Chunk::<S>::COLUMNS;
    const INPUTS: usize = 1;
    type Term = Vector<S>;
    type Unit<const V: usize> = *const f32;

    #[inline(always)]
    fn skip_columns(&self, columns: usize) -> Self {
        Self {
            data: self.data.wrapping_add(columns),
            ..*self
        }
    }

    #[inline(always)]
    fn terms(&self, _: usize) -> usize {
        2
    }

    #[inline(always)]
    unsafe fn unit<const V: usize>(&mut self, unit: usize) -> *const f32 {
        let next = self.next.wrapping_byte_add(unit * self.pair_bytes);
        for byte in (0..V * S::Floats::LANES * 4).step_by(LINE_BYTES) {
            prefetch(next.wrapping_byte_add(byte));
        }
        self.data
            .wrapping_add(2 * unit * <Self as Source<S>>::COLUMNS)
    }

    #[inline(always)]
    unsafe fn term<const V: usize>(unit: &*const f32, index: usize) -> [Vector<S>; V] {
        let lanes = S::Floats::LANES;
        let from = unit.wrapping_add(index * <Self as Source<S>>::COLUMNS);
        // SAFETY: the caller's promise; so below.
        std::array::from_fn(|v| unsafe { S::Floats::load(from.add(v * lanes), lanes) })
    }

    #[inline(always)]
    unsafe fn factor(row: *const S::Number) -> Vector<S> {
        // SAFETY: see above.
        unsafe { S::number(row) }
    }

    #[inline(always)]
    unsafe fn multiply_add(factor: Vector<S>, term: Vector<S>, sum: Vector<S>) -> Vector<S> {
        // SAFETY: see above.
        unsafe { S::Floats::fma(factor, term, sum) }
    }
}
