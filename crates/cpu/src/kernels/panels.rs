//! Panels: weights as GEMMs read them, once, from end to end.
//!
//! A weight `[outputs, inputs]` becomes *panels* of 48 outputs, in units of inputs:
//!
//! ```text
//! panel 0 | panel 1 | ...             ceil(outputs / 48)
//! panel   | unit 0 | unit 1 | ...     bfloat16: a pair of inputs, for there are instructions
//!                                     that multiply pairs; int8: a group of 64 (int8.rs)
//! pair    | output 0: (w0, w1) | output 1 | ...   48
//! ```
//!
//! Numbers beyond `outputs` and `inputs` are 0.

use super::chunk::Widen;
use super::int8;
use super::tile::Source;
use crate::memory::{Arena, Buffer};
use crate::simd::{Floats, Simd, Vector, prefetch};

/// Outputs of a panel.
pub const WIDTH: usize = 48;

const LINE_BYTES: usize = 64;

/// How weights are kept in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// As they were given.
    Bfloat16,
    /// Rounded to 8 bits, with a scale for each 64 inputs of an output.
    Int8,
}

impl Format {
    /// Inputs of a unit.
    pub fn inputs(self) -> usize {
        match self {
            Self::Bfloat16 => 2,
            Self::Int8 => int8::GROUP,
        }
    }

    /// Numbers of 16 bits that a unit occupies.
    fn unit_len(self) -> usize {
        match self {
            Self::Bfloat16 => 2 * WIDTH,
            Self::Int8 => int8::UNIT_LEN,
        }
    }
}

/// A packed weight.
pub struct Panels {
    data: Buffer<u16>,
    format: Format,
    outputs: usize,
    inputs: usize,
}

impl Panels {
    /// Pack a weight of rows of `inputs` bfloat16 numbers.
    pub fn pack(arena: &mut Arena, format: Format, weight: &[u16], inputs: usize) -> Self {
        let mut panels = Self::empty(arena, format, weight.len() / inputs, inputs);
        for (output, row) in weight.chunks_exact(inputs).enumerate() {
            panels.put(output / WIDTH, output % WIDTH, row);
        }
        panels
    }

    /// Pack two weights of one shape in turn: a panel of `first`, then one of `second`.
    pub fn interleave(
        arena: &mut Arena,
        format: Format,
        first: &[u16],
        second: &[u16],
        inputs: usize,
    ) -> Self {
        let each = (first.len() / inputs).next_multiple_of(WIDTH);
        let mut panels = Self::empty(arena, format, 2 * each, inputs);
        for (side, weight) in [first, second].into_iter().enumerate() {
            for (output, row) in weight.chunks_exact(inputs).enumerate() {
                panels.put(2 * (output / WIDTH) + side, output % WIDTH, row);
            }
        }
        panels
    }

    fn empty(arena: &mut Arena, format: Format, outputs: usize, inputs: usize) -> Self {
        let units = inputs.div_ceil(format.inputs());
        let panels = outputs.div_ceil(WIDTH);
        Self {
            data: arena.take(panels * units * format.unit_len()),
            format,
            outputs,
            inputs,
        }
    }

    fn put(&mut self, panel: usize, column: usize, row: &[u16]) {
        let (format, size) = (self.format, self.panel_len());
        let panel = &mut self.data[panel * size..][..size];
        let units = panel.chunks_exact_mut(format.unit_len());
        for (unit, numbers) in units.zip(row.chunks(format.inputs())) {
            match format {
                Format::Bfloat16 => {
                    unit[2 * column..][..numbers.len()].copy_from_slice(numbers);
                }
                Format::Int8 => int8::put(unit, column, numbers),
            }
        }
    }

    fn panel_len(&self) -> usize {
        self.units() * self.format.unit_len()
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.outputs.div_ceil(WIDTH)
    }

    /// How its numbers are kept.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Outputs, without padding; of an interleaved weight with it.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Inputs, without padding.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Units of a panel.
    pub fn units(&self) -> usize {
        self.inputs.div_ceil(self.format.inputs())
    }

    /// The numbers of one panel.
    pub fn panel(&self, index: usize) -> &[u16] {
        let size = self.panel_len();
        &self.data[index * size..][..size]
    }
}

/// One panel of `COLUMNS` outputs in bfloat16, pair by pair.
#[derive(Debug, Clone, Copy)]
pub struct Panel<const COLUMNS: usize> {
    pub data: *const u16,
    /// How far ahead of its reading it is prefetched; 0: not.
    pub ahead_bytes: usize,
}

impl<S: Simd, const COLUMNS: usize> Source<S> for Panel<COLUMNS> {
    const COLUMNS: usize = COLUMNS;
    const INPUTS: usize = S::INPUTS;
    type Term = S::Term;
    type Unit<const V: usize> = *const u16;

    #[inline(always)]
    fn skip_columns(&self, column: usize) -> Self {
        Self {
            data: self.data.wrapping_add(2 * column),
            ..*self
        }
    }

    #[inline(always)]
    fn terms(&self, _: usize) -> usize {
        2 / S::INPUTS
    }

    #[inline(always)]
    unsafe fn unit<const V: usize>(&mut self, unit: usize) -> *const u16 {
        let data = self.data.wrapping_add(unit * 2 * COLUMNS);
        for byte in (0..V * S::Floats::LANES * 4).step_by(LINE_BYTES) {
            prefetch(data.wrapping_byte_add(byte + self.ahead_bytes));
        }
        data
    }

    #[inline(always)]
    unsafe fn term<const V: usize>(unit: &*const u16, index: usize) -> [S::Term; V] {
        // SAFETY: the caller's promise; so below.
        std::array::from_fn(|v| unsafe { S::term(unit.add(v * 2 * S::Floats::LANES), index) })
    }

    #[inline(always)]
    unsafe fn factor(row: *const S::Number) -> S::Term {
        // SAFETY: see above.
        unsafe { S::factor(row) }
    }

    #[inline(always)]
    unsafe fn multiply_add(factor: S::Term, term: S::Term, sum: Vector<S>) -> Vector<S> {
        // SAFETY: see above.
        unsafe { S::multiply_add(factor, term, sum) }
    }
}

impl<S: Simd, const COLUMNS: usize> Widen<S> for Panel<COLUMNS> {
    const PAIR_BYTES: usize = 4 * COLUMNS;

    #[inline(always)]
    fn inputs(&self, _: usize) -> usize {
        2
    }

    #[inline(always)]
    fn place(&self, unit: usize) -> *const u16 {
        self.data.wrapping_add(unit * 2 * COLUMNS)
    }

    #[inline(always)]
    unsafe fn wide<const V: usize>(unit: &*const u16, input: usize) -> [Vector<S>; V] {
        let pairs = |v| unit.wrapping_add(v * 2 * S::Floats::LANES);
        // SAFETY: the caller's promise.
        std::array::from_fn(|v| unsafe {
            match input {
                0 => S::Floats::even(pairs(v)),
                _ => S::Floats::odd(pairs(v)),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(rows: usize, inputs: usize, first: u16) -> Vec<u16> {
        (0..rows * inputs).map(|i| first + i as u16).collect()
    }

    #[test]
    fn every_weight_is_where_the_drawing_says() {
        let all = numbers(55, 5, 1);
        let panels = Panels::pack(&mut Arena::new(0), Format::Bfloat16, &all, 5);
        assert_eq!(
            (panels.count(), panels.units(), panels.outputs()),
            (2, 3, 55)
        );
        for output in 0..2 * WIDTH {
            for input in 0..6 {
                let place = (input / 2) * 2 * WIDTH + (output % WIDTH) * 2 + input % 2;
                let expected = if output < 55 && input < 5 {
                    all[output * 5 + input]
                } else {
                    0
                };
                assert_eq!(panels.panel(output / WIDTH)[place], expected);
            }
        }
    }

    #[test]
    fn interleaved_weights_take_turns_by_panels() {
        let (a, b) = (numbers(50, 4, 1), numbers(50, 4, 5000));
        let panels = Panels::interleave(&mut Arena::new(0), Format::Bfloat16, &a, &b, 4);
        assert_eq!(panels.count(), 4);
        assert_eq!(panels.panel(0)[..2], a[..2]);
        assert_eq!(panels.panel(1)[..2], b[..2]);
        assert_eq!(panels.panel(3)[..2], b[WIDTH * 4..][..2]);
    }
}
