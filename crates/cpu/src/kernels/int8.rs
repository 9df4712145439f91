//! Weights of 8 bits: groups of 64 inputs of an output share a scale.
//!
//! ```text
//! unit   | scales of 48 outputs, bfloat16, and padding | input 0: 48 numbers | input 1 | ...
//! ```
//!
//! A scale is the least bfloat16 number with which no number of the group exceeds 127, so
//! that scale times number is exact in float32. Weights are widened in registers:
//! activations are not rounded to 8 bits.

use super::chunk::Widen;
use super::panels::WIDTH;
use super::tile::Source;
use crate::simd::{Floats, Simd, Vector, prefetch};

/// Inputs that share a scale.
pub const GROUP: usize = 64;

/// Numbers of 16 bits before a unit's first input: the scales, on whole cache lines.
const SCALES_LEN: usize = 64;

/// Numbers of 16 bits of a unit.
pub const UNIT_LEN: usize = SCALES_LEN + GROUP * WIDTH / 2;

const MOST: f32 = 127.0;

fn wide(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Round up to 64 bfloat16 weights of one output into a unit.
pub fn put(unit: &mut [u16], column: usize, weights: &[u16]) {
    let largest = weights
        .iter()
        .fold(0.0, |most: f32, &x| match wide(x).abs() {
            x if x.is_nan() => x,
            x => {
                if x > most {
                    x
                } else {
                    most
                }
            }
        });
    let scale = ((largest / MOST).to_bits().wrapping_add(0xffff) >> 16) as u16;
    unit[column] = scale;
    let numbers = &mut unit[SCALES_LEN..];
    for (input, &weight) in weights.iter().enumerate() {
        let number = (wide(weight) / wide(scale)).round_ties_even() as i8; // 0 where both are
        let place = input * WIDTH + column;
        let mut pair = numbers[place / 2].to_ne_bytes();
        pair[place % 2] = number.cast_unsigned();
        numbers[place / 2] = u16::from_ne_bytes(pair);
    }
}

/// One panel, group by group.
#[derive(Debug, Clone, Copy)]
pub struct Int8Panel {
    data: *const u16,
    /// Inputs of the weight.
    inputs: usize,
    /// The first column to read.
    column: usize,
    ahead_bytes: usize,
}

impl Int8Panel {
    /// A panel of a weight of so many inputs, prefetched so far ahead of its reading (0: not).
    pub fn new(data: *const u16, inputs: usize, ahead_bytes: usize) -> Self {
        Self {
            data,
            inputs,
            column: 0,
            ahead_bytes,
        }
    }
}

/// A unit's numbers and the scales of `V` vectors of them.
pub struct Group<S: Simd, const V: usize> {
    scales: [Vector<S>; V],
    numbers: *const i8,
    ahead_bytes: usize,
}

impl<S: Simd> Source<S> for Int8Panel {
    const COLUMNS: usize = WIDTH;
    const INPUTS: usize = 1;
    type Term = Vector<S>;
    type Unit<const V: usize> = Group<S, V>;

    #[inline(always)]
    fn skip_columns(&self, columns: usize) -> Self {
        Self {
            column: self.column + columns,
            ..*self
        }
    }

    #[inline(always)]
    fn terms(&self, unit: usize) -> usize {
        GROUP.min(self.inputs - unit * GROUP)
    }

    #[inline(always)]
    unsafe fn unit<const V: usize>(&mut self, unit: usize) -> Group<S, V> {
        let data = self.data.wrapping_add(unit * UNIT_LEN);
        let lanes = S::Floats::LANES;
        let scale = |v: usize| data.wrapping_add(self.column + v * lanes);
        Group {
            // SAFETY: the caller's promise; so below.
            scales: std::array::from_fn(|v| unsafe { S::Floats::widen(scale(v), lanes) }),
            numbers: data
                .wrapping_add(SCALES_LEN)
                .cast::<i8>()
                .wrapping_add(self.column),
            ahead_bytes: self.ahead_bytes,
        }
    }

    #[inline(always)]
    unsafe fn term<const V: usize>(unit: &Group<S, V>, index: usize) -> [Vector<S>; V] {
        let numbers = unit.numbers.wrapping_add(index * WIDTH);
        prefetch(numbers.wrapping_add(unit.ahead_bytes));
        // SAFETY: see above.
        std::array::from_fn(|v| unsafe {
            let number = S::Floats::int8(numbers.add(v * S::Floats::LANES));
            S::Floats::mul(number, unit.scales[v])
        })
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

impl<S: Simd> Widen<S> for Int8Panel {
    const PAIR_BYTES: usize = 2 * WIDTH;

    #[inline(always)]
    fn inputs(&self, unit: usize) -> usize {
        <Self as Source<S>>::terms(self, unit)
    }

    #[inline(always)]
    fn place(&self, unit: usize) -> *const u16 {
        let numbers = self.data.wrapping_add(unit * UNIT_LEN + SCALES_LEN);
        numbers.wrapping_byte_add(self.column)
    }

    #[inline(always)]
    unsafe fn wide<const V: usize>(unit: &Group<S, V>, input: usize) -> [Vector<S>; V] {
        // SAFETY: the caller's promise.
        unsafe { <Self as Source<S>>::term(unit, input) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::panels::{Format, Panels};
    use crate::memory::Arena;
    use crate::testing::{Numbers, bits};

    #[test]
    fn numbers_are_rounded_to_the_nearest_multiple_of_their_groups_scale() {
        let mut numbers = Numbers::new(21);
        let (inputs, outputs) = (150, 50);
        let mut weight = numbers.bits(inputs * outputs);
        weight[..GROUP].fill(0);
        weight[inputs + 3] = bits(-100.0); // the rest of its group becomes 0
        let panels = Panels::pack(&mut Arena::new(0), Format::Int8, &weight, inputs);
        assert_eq!((panels.units(), panels.panel(0).len()), (3, 3 * UNIT_LEN));
        for output in 0..outputs {
            for input in 0..inputs {
                let unit = &panels.panel(output / WIDTH)[input / GROUP * UNIT_LEN..];
                let column = output % WIDTH;
                let place = input % GROUP * WIDTH + column;
                let number = unit[SCALES_LEN + place / 2].to_ne_bytes()[place % 2];
                let scale = wide(unit[column]);
                let got = f32::from(number.cast_signed()) * scale;
                let want = wide(weight[output * inputs + input]);
                assert!((got - want).abs() <= scale / 2.0, "{got}, {want}");
                let group = input / GROUP * GROUP..inputs.min(input / GROUP * GROUP + GROUP);
                let largest = weight[output * inputs..][group]
                    .iter()
                    .map(|&x| wide(x).abs())
                    .fold(0.0, f32::max);
                assert!(scale <= largest / MOST * 1.008 && scale * MOST >= largest);
            }
        }
    }

    #[test]
    fn what_is_not_a_number_stays_so() {
        let mut unit = vec![0; UNIT_LEN];
        put(&mut unit, 3, &[bits(1.0), 0x7fc0]);
        assert!(wide(unit[3]).is_nan());
    }
}
