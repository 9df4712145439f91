//! One GEMM alone, on one thread: to measure, and to test, what models are made of.

use super::gemm::gemm;
use super::panels::{Format, Panels, WIDTH};
use super::tile::Rows;
use crate::error::CpuError;
use crate::memory::{Arena, Buffer};
use crate::shape::check_length;
use crate::simd::{Floats, Instance, Simd, vectors, with_instance};

/// A packed weight, and the instance that multiplies with it.
pub struct Linear {
    instance: Instance,
    weight: Panels,
    inputs: usize,
}

impl Linear {
    /// Pack a weight of rows of `inputs` bfloat16 numbers.
    ///
    /// # Errors
    /// The processor does not run the instance, or the weight has no whole rows.
    pub fn new(
        instance: Instance,
        format: Format,
        weight: &[u16],
        inputs: usize,
    ) -> Result<Self, CpuError> {
        instance.check()?;
        let inputs = inputs.max(1);
        let outputs = weight.len() / inputs;
        check_length("weight", weight.len(), outputs * inputs)?;
        Ok(Self {
            instance,
            weight: Panels::pack(&mut Arena::new(0), format, weight, inputs),
            inputs,
        })
    }

    /// Multiply the rows of `x`, bfloat16 numbers; `out` gets a row of sums for each.
    ///
    /// # Errors
    /// `x` has no whole rows, or `out` is not as long as the result.
    pub fn run(&self, x: &[u16], out: &mut [f32]) -> Result<(), CpuError> {
        let (rows, outputs) = (x.len() / self.inputs, self.weight.outputs());
        check_length("x", x.len(), rows * self.inputs)?;
        check_length("out", out.len(), rows * outputs)?;
        // SAFETY: the machine can (`new`).
        with_instance!(self.instance, S => unsafe { self.multiply::<S>(x, rows, out) });
        Ok(())
    }

    /// # Safety
    /// The processor runs the instance; lengths were checked.
    unsafe fn multiply<S: Simd>(&self, x: &[u16], count: usize, out: &mut [f32]) {
        let (weight, outputs) = (&self.weight, self.weight.outputs());
        let stride = self.inputs.next_multiple_of(2);
        let mut rows = Buffer::<S::Number>::zeroed(count * stride);
        for (row, from) in x.chunks_exact(self.inputs).enumerate() {
            let to = rows[row * stride..].as_mut_ptr();
            // SAFETY: a row of `inputs` numbers each.
            let run = || unsafe {
                for (at, left) in vectors::<S::Floats>(from.len()) {
                    S::put(
                        to.add(at),
                        left,
                        S::Floats::widen(from.as_ptr().add(at), left),
                    );
                }
            };
            // SAFETY: the caller's promise.
            unsafe { S::vectorize(run) };
        }
        let rows = Rows {
            data: rows.as_ptr(),
            stride,
        };
        let put = |first: usize, rows: usize, panel: usize, sums: [&[f32]; 1]| {
            let column = panel * WIDTH;
            let width = WIDTH.min(outputs - column);
            for row in 0..rows {
                let to = &mut out[(first + row) * outputs + column..][..width];
                to.copy_from_slice(&sums[0][row * WIDTH..][..width]);
            }
        };
        // SAFETY: rows of an even number of inputs.
        unsafe { gemm::<S, 1>(rows, count, weight, 0..weight.count(), put) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Numbers, bits, each_instance, wide};

    each_instance!(
        sums_agree_with_float64_at_every_number_of_rows,
        a_rows_sums_do_not_depend_on_the_others,
        int8_weights_are_widened_exactly,
        wrong_lengths_are_refused,
    );

    fn sums_agree_with_float64_at_every_number_of_rows<S: Simd>() {
        let mut numbers = Numbers::new(1);
        for (inputs, outputs) in [(64, 48), (130, 49), (7, 200), (1, 1), (576, 100)] {
            let weight = numbers.bits(inputs * outputs);
            let linear =
                Linear::new(S::INSTANCE, Format::Bfloat16, &weight, inputs).expect("supported");
            for rows in (0..=17).chain([64]) {
                let x = numbers.bits(rows * inputs);
                let mut out = vec![f32::NAN; rows * outputs];
                linear.run(&x, &mut out).expect("lengths agree");
                for (i, got) in out.iter().enumerate() {
                    let (row, output) = (i / outputs, i % outputs);
                    let pairs = x[row * inputs..][..inputs]
                        .iter()
                        .zip(&weight[output * inputs..]);
                    let terms = pairs.map(|(&a, &b)| f64::from(wide(a)) * f64::from(wide(b)));
                    let expected: f64 = terms.clone().sum();
                    let size: f64 = terms.map(f64::abs).sum();
                    let error = (f64::from(*got) - expected).abs();
                    assert!(
                        error <= 1e-6 * size,
                        "{inputs}x{outputs}, {rows} rows: {error}"
                    );
                }
            }
        }
    }

    fn a_rows_sums_do_not_depend_on_the_others<S: Simd>() {
        for format in [Format::Bfloat16, Format::Int8] {
            rows_alone_and_together::<S>(format);
        }
    }

    fn rows_alone_and_together<S: Simd>(format: Format) {
        let mut numbers = Numbers::new(2);
        for (inputs, count) in [(96, 17), (1701, 140)] {
            let (weight, x) = (numbers.bits(inputs * 60), numbers.bits(count * inputs));
            let linear = Linear::new(S::INSTANCE, format, &weight, inputs).expect("supported");
            let mut all = vec![0.0; count * 60];
            linear.run(&x, &mut all).expect("lengths agree");
            for rows in [1, 2, 3, 5, 7] {
                for (x, all) in x.chunks(rows * inputs).zip(all.chunks(rows * 60)) {
                    let mut few = vec![0.0; all.len()];
                    linear.run(x, &mut few).expect("lengths agree");
                    assert_eq!(few, all, "{rows} rows");
                }
            }
        }
    }

    /// Weights that 8 bits hold exactly bring what they bring in bfloat16.
    fn int8_weights_are_widened_exactly<S: Simd>() {
        let mut numbers = Numbers::new(3);
        for (inputs, outputs) in [(64, 48), (70, 49), (7, 100), (192, 60)] {
            let mut weight: Vec<u16> = (0..inputs * outputs)
                .map(|_| bits(numbers.below(255) as f32 - 127.0))
                .collect();
            // With 127 in every group all scales are 1.
            for row in weight.chunks_exact_mut(inputs) {
                row.iter_mut().step_by(64).for_each(|x| *x = bits(127.0));
            }
            for rows in [1, 3, 8, 20] {
                let x = numbers.bits(rows * inputs);
                let [exact, int8] = [Format::Bfloat16, Format::Int8].map(|format| {
                    let linear = Linear::new(S::INSTANCE, format, &weight, inputs);
                    let mut out = vec![f32::NAN; rows * outputs];
                    linear
                        .and_then(|linear| linear.run(&x, &mut out))
                        .expect("supported");
                    out
                });
                for (a, b) in exact.into_iter().zip(int8) {
                    let allowed = 1e-6 * 127.0 * inputs as f32;
                    assert!((a - b).abs() <= allowed, "{inputs}x{outputs}: {a}, {b}");
                }
            }
        }
    }

    fn wrong_lengths_are_refused<S: Simd>() {
        let linear = Linear::new(S::INSTANCE, Format::Bfloat16, &[0; 12], 4).expect("supported");
        assert!(Linear::new(S::INSTANCE, Format::Bfloat16, &[0; 13], 4).is_err());
        assert!(linear.run(&[0; 5], &mut [0.0; 3]).is_err());
        assert!(linear.run(&[0; 4], &mut [0.0; 4]).is_err());
    }
}
