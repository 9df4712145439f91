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
