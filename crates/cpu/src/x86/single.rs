//! One product alone, on one thread: to measure, and to test, what models are made of.

use super::panels::{Panels, WIDTH};
use super::product::{Rows, product};
use super::supported;
use crate::error::CpuError;
use crate::memory::Arena;
use crate::shape::check_length;

/// A packed weight.
pub struct Product {
    weight: Panels,
    inputs: usize,
}

impl Product {
    /// Pack a weight of rows of `inputs` bfloat16 numbers.
    ///
    /// # Errors
    /// The kernels do not run here, or the weight has no whole rows.
    pub fn new(weight: &[u16], inputs: usize) -> Result<Self, CpuError> {
        if let Some(reason) = supported() {
            return Err(CpuError::Unavailable(reason));
        }
        let inputs = inputs.max(1);
        let outputs = weight.len() / inputs;
        check_length("weight", weight.len(), outputs * inputs)?;
        let weight = Panels::pack(&mut Arena::new(0), weight, inputs);
        Ok(Self { weight, inputs })
    }

    /// Multiply the rows of `x`; `out` gets a row of sums for each.
    ///
    /// # Errors
    /// `x` has no whole rows, or `out` is not as long as the result.
    pub fn run(&self, x: &[u16], out: &mut [f32]) -> Result<(), CpuError> {
        let (rows, outputs) = (x.len() / self.inputs, self.weight.outputs());
        check_length("x", x.len(), rows * self.inputs)?;
        check_length("out", out.len(), rows * outputs)?;
        if self.inputs.is_multiple_of(2) {
            // SAFETY: the machine can (`new`).
            unsafe { self.multiply(x, self.inputs, rows, out) };
        } else {
            let stride = self.inputs + 1;
            let mut even = vec![0; rows * stride];
            for (to, from) in even
                .chunks_exact_mut(stride)
                .zip(x.chunks_exact(self.inputs))
            {
                to[..self.inputs].copy_from_slice(from);
            }
            // SAFETY: as above.
            unsafe { self.multiply(&even, stride, rows, out) };
        }
        Ok(())
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    fn multiply(&self, x: &[u16], stride: usize, count: usize, out: &mut [f32]) {
        let (weight, outputs) = (&self.weight, self.weight.outputs());
        let rows = Rows {
            data: x.as_ptr(),
            stride,
        };
        let panels = 0..weight.count();
        let put = |first: usize, rows: usize, panel: usize, sums: &[[f32; 8 * WIDTH]; 1]| {
            let column = panel * WIDTH;
            let width = WIDTH.min(outputs - column);
            for row in 0..rows {
                let to = &mut out[(first + row) * outputs + column..][..width];
                to.copy_from_slice(&sums[0][row * WIDTH..][..width]);
            }
        };
        // SAFETY: rows of an even number of inputs.
        unsafe { product::<1>(rows, count, weight, panels, put) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Numbers, wide};

    #[test]
    fn sums_agree_with_float64_at_every_number_of_rows() {
        if supported().is_some() {
            return;
        }
        let mut numbers = Numbers::new(1);
        for (inputs, outputs) in [(64, 48), (130, 49), (7, 200), (1, 1), (576, 100)] {
            let weight = numbers.bits(inputs * outputs);
            let product = Product::new(&weight, inputs).expect("supported");
            for rows in (0..=17).chain([64]) {
                let x = numbers.bits(rows * inputs);
                let mut out = vec![f32::NAN; rows * outputs];
                product.run(&x, &mut out).expect("lengths agree");
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

    #[test]
    fn a_rows_sums_do_not_depend_on_the_others() {
        if supported().is_some() {
            return;
        }
        let mut numbers = Numbers::new(2);
        let (weight, x) = (numbers.bits(96 * 60), numbers.bits(17 * 96));
        let product = Product::new(&weight, 96).expect("supported");
        let mut all = vec![0.0; 17 * 60];
        product.run(&x, &mut all).expect("lengths agree");
        for row in 0..17 {
            let mut alone = vec![0.0; 60];
            product
                .run(&x[row * 96..][..96], &mut alone)
                .expect("lengths agree");
            assert_eq!(alone, all[row * 60..][..60]);
        }
    }

    #[test]
    fn wrong_lengths_are_refused() {
        if supported().is_some() {
            return;
        }
        let product = Product::new(&[0; 12], 4).expect("supported");
        assert!(Product::new(&[0; 13], 4).is_err());
        assert!(product.run(&[0; 5], &mut [0.0; 3]).is_err());
        assert!(product.run(&[0; 4], &mut [0.0; 4]).is_err());
    }
}
