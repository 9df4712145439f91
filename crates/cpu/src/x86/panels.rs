//! Weights as the products read them: once, from end to end.
//!
//! A weight `[outputs, inputs]` becomes *panels* of 48 outputs, 3 vectors of 16. Two
//! neighbouring inputs lie together, for an instruction multiplies pairs:
//!
//! ```text
//! panel 0 | panel 1 | ...                         ceil(outputs / 48)
//! panel   | pair 0 | pair 1 | ...                 ceil(inputs / 2)
//! pair    | output 0: (w0, w1) | output 1 | ...   48
//! ```
//!
//! Places beyond `outputs` and `inputs` are 0.

use crate::memory::{Arena, Buffer};

/// Outputs of a panel.
pub const WIDTH: usize = 48;

/// A packed weight of bfloat16 numbers.
pub struct Panels {
    data: Buffer<u16>,
    outputs: usize,
    pairs: usize,
}

impl Panels {
    /// Pack a weight of rows of `inputs` numbers.
    pub fn pack(arena: &mut Arena, weight: &[u16], inputs: usize) -> Self {
        let mut panels = Self::empty(arena, weight.len() / inputs, inputs);
        for (output, row) in weight.chunks_exact(inputs).enumerate() {
            panels.put(output / WIDTH, output % WIDTH, row);
        }
        panels
    }

    /// Pack two weights of one shape in turn: a panel of `first`, then one of `second`.
    pub fn interleave(arena: &mut Arena, first: &[u16], second: &[u16], inputs: usize) -> Self {
        let each = (first.len() / inputs).next_multiple_of(WIDTH);
        let mut panels = Self::empty(arena, 2 * each, inputs);
        for (side, weight) in [first, second].into_iter().enumerate() {
            for (output, row) in weight.chunks_exact(inputs).enumerate() {
                panels.put(2 * (output / WIDTH) + side, output % WIDTH, row);
            }
        }
        panels
    }

    fn empty(arena: &mut Arena, outputs: usize, inputs: usize) -> Self {
        let pairs = inputs.div_ceil(2);
        let panels = outputs.div_ceil(WIDTH);
        Self {
            data: arena.take(panels * pairs * 2 * WIDTH),
            outputs,
            pairs,
        }
    }

    fn put(&mut self, panel: usize, column: usize, row: &[u16]) {
        let size = self.pairs * 2 * WIDTH;
        let panel = &mut self.data[panel * size..][..size];
        let places = panel.chunks_exact_mut(2 * WIDTH);
        for (place, pair) in places.zip(row.chunks(2)) {
            place[2 * column..][..pair.len()].copy_from_slice(pair);
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.outputs.div_ceil(WIDTH)
    }

    /// Outputs, without padding; of an interleaved weight with it.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Pairs of inputs.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// The numbers of one panel.
    pub fn panel(&self, index: usize) -> &[u16] {
        let size = self.pairs * 2 * WIDTH;
        &self.data[index * size..][..size]
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
        let panels = Panels::pack(&mut Arena::new(0), &all, 5);
        assert_eq!(
            (panels.count(), panels.pairs(), panels.outputs()),
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
        let panels = Panels::interleave(&mut Arena::new(0), &a, &b, 4);
        assert_eq!(panels.count(), 4);
        assert_eq!(panels.panel(0)[..2], a[..2]);
        assert_eq!(panels.panel(1)[..2], b[..2]);
        assert_eq!(panels.panel(3)[..2], b[WIDTH * 4..][..2]);
    }
}
