//! Steps of one row, or one row's heads, between the products.

use std::arch::x86_64::*;

use super::vector::{LANES, narrow, silu, vectors, widen};

/// Normalise by the root of the mean square, times `weight`; round to bfloat16.
///
/// # Safety
/// `to` holds `weight.len()` numbers, and so does `x`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub unsafe fn norm(x: *const f32, weight: &[f32], eps: f32, to: *mut u16) {
    // SAFETY: the caller's promise.
    let factor = _mm512_set1_ps(unsafe { norm_factor(x, weight.len(), eps) });
    for (at, mask) in vectors(weight.len()) {
        // SAFETY: the caller's promise.
        unsafe {
            let x = _mm512_maskz_loadu_ps(mask, x.add(at));
            let weight = _mm512_maskz_loadu_ps(mask, weight.as_ptr().add(at));
            narrow(
                to.add(at),
                mask,
                _mm512_mul_ps(_mm512_mul_ps(x, factor), weight),
            );
        }
    }
}

/// One over the root of the mean square of `len` numbers.
///
/// # Safety
/// `x` holds them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn norm_factor(x: *const f32, len: usize, eps: f32) -> f32 {
    let mut squares = _mm512_setzero_ps();
    for (at, mask) in vectors(len) {
        // SAFETY: the caller's promise.
        let x = unsafe { _mm512_maskz_loadu_ps(mask, x.add(at)) };
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    1.0 / (_mm512_reduce_add_ps(squares) / len as f32 + eps).sqrt()
}

/// `to = from`, widened to float32.
///
/// # Safety
/// `to` holds as many numbers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub unsafe fn widen_row(from: &[u16], to: *mut f32) {
    for (at, mask) in vectors(from.len()) {
        // SAFETY: the slice's length, and the caller's promise.
        unsafe { _mm512_mask_storeu_ps(to.add(at), mask, widen(from.as_ptr().add(at), mask)) };
    }
}

/// `to = x * factor`, rounded to bfloat16.
///
/// # Safety
/// Both hold `len` numbers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub unsafe fn narrow_row(x: *const f32, len: usize, factor: f32, to: *mut u16) {
    let factor = _mm512_set1_ps(factor);
    for (at, mask) in vectors(len) {
        // SAFETY: the caller's promise.
        unsafe {
            let x = _mm512_maskz_loadu_ps(mask, x.add(at));
            narrow(to.add(at), mask, _mm512_mul_ps(x, factor));
        }
    }
}

/// What becomes of one head of a query or key.
#[derive(Clone, Copy)]
pub struct Turn<'a> {
    /// Weight of the head's norm, and its epsilon.
    pub norm: Option<(&'a [f32], f32)>,
    /// Cosines, then sines, of the row's position.
    pub rotation: &'a [f32],
    /// On the result.
    pub factor: f32,
}

/// Norm and rotate one head; round to bfloat16.
///
/// The first half of the numbers and the second are the two coordinates.
///
/// # Safety
/// `x` and `to` hold as many numbers as the rotation, the norm's weight too.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub unsafe fn turn(x: *const f32, turn: Turn<'_>, to: *mut u16) {
    let half = turn.rotation.len() / 2;
    let (cos, sin) = (turn.rotation.as_ptr(), turn.rotation[half..].as_ptr());
    let mut factor = turn.factor;
    if let Some((weight, eps)) = turn.norm {
        // SAFETY: the caller's promise.
        factor *= unsafe { norm_factor(x, weight.len(), eps) };
    }
    let factor = _mm512_set1_ps(factor);
    for (at, mask) in vectors(half) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut low = _mm512_maskz_loadu_ps(mask, x.add(at));
            let mut high = _mm512_maskz_loadu_ps(mask, x.add(half + at));
            if let Some((weight, _)) = turn.norm {
                let weight = weight.as_ptr();
                low = _mm512_mul_ps(low, _mm512_maskz_loadu_ps(mask, weight.add(at)));
                high = _mm512_mul_ps(high, _mm512_maskz_loadu_ps(mask, weight.add(half + at)));
            }
            let cos = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, cos.add(at)), factor);
            let sin = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, sin.add(at)), factor);
            let new_low = _mm512_fmsub_ps(low, cos, _mm512_mul_ps(high, sin));
            let new_high = _mm512_fmadd_ps(high, cos, _mm512_mul_ps(low, sin));
            narrow(to.add(at), mask, new_low);
            narrow(to.add(half + at), mask, new_high);
        }
    }
}

/// `to = silu(gate) * up`, rounded to bfloat16; whole vectors.
///
/// # Safety
/// `to` holds as many numbers as the slices, which are equally long.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub unsafe fn gated(gate: &[f32], up: &[f32], to: *mut u16) {
    debug_assert!(gate.len() == up.len() && gate.len().is_multiple_of(LANES));
    for (at, mask) in vectors(gate.len()) {
        // SAFETY: the lengths, and the caller's promise.
        unsafe {
            let gate = silu(_mm512_loadu_ps(gate.as_ptr().add(at)));
            let up = _mm512_loadu_ps(up.as_ptr().add(at));
            narrow(to.add(at), mask, _mm512_mul_ps(gate, up));
        }
    }
}

/// `to = x + bias`, or `to += x + bias`; the first `len` numbers of a tile's row.
///
/// # Safety
/// All hold `len` numbers; `bias` may be null: none.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub unsafe fn put(x: &[f32], bias: *const f32, to: *mut f32, add: bool) {
    for (at, mask) in vectors(x.len()) {
        // SAFETY: the lengths, and the caller's promise.
        unsafe {
            let mut x = _mm512_maskz_loadu_ps(mask, x.as_ptr().add(at));
            if !bias.is_null() {
                x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, bias.add(at)));
            }
            if add {
                x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, to.add(at)));
            }
            _mm512_mask_storeu_ps(to.add(at), mask, x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Numbers, wide};
    use crate::x86::supported;

    const EPS: f32 = 1e-5;

    fn floats(numbers: &mut Numbers, len: usize) -> Vec<f32> {
        numbers.bits(len).into_iter().map(wide).collect()
    }

    /// As close as rounding to 8 bits leaves it.
    fn assert_close(got: &[u16], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        for (&got, &expected) in got.iter().zip(expected) {
            let error = (f64::from(wide(got)) - expected).abs();
            assert!(error <= expected.abs() / 250.0 + 1e-6, "{got}, {expected}");
        }
    }

    fn normed(x: &[f32], weight: &[f32]) -> Vec<f64> {
        let squares: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
        let root = (squares / x.len() as f64 + f64::from(EPS)).sqrt();
        let pairs = x.iter().zip(weight);
        pairs
            .map(|(&x, &w)| f64::from(x) / root * f64::from(w))
            .collect()
    }

    #[test]
    fn norms_of_any_length() {
        if supported().is_some() {
            return;
        }
        let mut numbers = Numbers::new(5);
        for len in [1, 15, 16, 17, 48, 100, 576] {
            let (x, weight) = (floats(&mut numbers, len), floats(&mut numbers, len));
            let mut to = vec![9; len + 1];
            // SAFETY: the machine can, the lengths agree.
            unsafe { norm(x.as_ptr(), &weight, EPS, to.as_mut_ptr()) };
            assert_close(&to[..len], &normed(&x, &weight));
            assert_eq!(to[len], 9, "nothing is written behind the end");
        }
    }

    #[test]
    fn heads_turn_with_and_without_a_norm() {
        if supported().is_some() {
            return;
        }
        let mut numbers = Numbers::new(6);
        for dim in [2, 12, 64, 80, 128] {
            let (x, weight) = (floats(&mut numbers, dim), floats(&mut numbers, dim));
            let rotation = floats(&mut numbers, dim);
            for norm in [None, Some((&weight[..], EPS))] {
                let factor = 0.7;
                let how = Turn {
                    norm,
                    rotation: &rotation,
                    factor,
                };
                let mut to = vec![0; dim];
                // SAFETY: as above.
                unsafe { turn(x.as_ptr(), how, to.as_mut_ptr()) };
                let plain = || x.iter().map(|&x| f64::from(x)).collect();
                let y: Vec<f64> = norm.map_or_else(plain, |(weight, _)| normed(&x, weight));
                let half = dim / 2;
                let expected: Vec<f64> = (0..dim)
                    .map(|i| {
                        let (cos, sin) = (rotation[i % half], rotation[half + i % half]);
                        let (low, high) = (y[i % half], y[half + i % half]);
                        let (a, b) = if i < half { (low, -high) } else { (high, low) };
                        (a * f64::from(cos) + b * f64::from(sin)) * f64::from(factor)
                    })
                    .collect();
                for (&got, &expected) in to.iter().zip(&expected) {
                    let error = (f64::from(wide(got)) - expected).abs();
                    assert!(error < 0.02, "{dim}: {error}"); // terms of up to 3 may cancel
                }
            }
        }
    }

    #[test]
    fn gates_sums_and_widths() {
        if supported().is_some() {
            return;
        }
        let mut numbers = Numbers::new(7);
        let (gate, up) = (floats(&mut numbers, 48), floats(&mut numbers, 48));
        let mut to = vec![0; 48];
        // SAFETY: as above.
        unsafe { gated(&gate, &up, to.as_mut_ptr()) };
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let pairs = gate.iter().zip(&up);
        let expected: Vec<f64> = pairs
            .map(|(&g, &u)| silu(f64::from(g)) * f64::from(u))
            .collect();
        assert_close(&to, &expected);

        let mut sums = up[..37].to_vec();
        // SAFETY: as above; no bias, then one.
        unsafe {
            put(&gate[..37], std::ptr::null(), sums.as_mut_ptr(), true);
            put(&gate[..37], up.as_ptr(), sums.as_mut_ptr(), true);
        }
        for (i, got) in sums.iter().enumerate() {
            assert_eq!(*got, (up[i] + gate[i]) + (gate[i] + up[i]));
        }

        let bits = numbers.bits(37);
        let (mut floats, mut back) = (vec![0.0; 37], vec![0; 37]);
        // SAFETY: as above.
        unsafe {
            widen_row(&bits, floats.as_mut_ptr());
            narrow_row(floats.as_ptr(), 37, 1.0, back.as_mut_ptr());
        }
        assert_eq!(back, bits);
    }
}
