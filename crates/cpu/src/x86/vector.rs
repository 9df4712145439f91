//! Vectors of 16 float32 numbers, and bfloat16 ones in memory.

use std::arch::x86_64::*;

/// Numbers of a vector.
pub const LANES: usize = 16;

/// The first `count` lanes, all from 16 on.
#[inline]
pub fn first(count: usize) -> __mmask16 {
    if count >= LANES { !0 } else { (1 << count) - 1 }
}

/// Begins of the vectors that cover `len` numbers, and their lanes.
#[inline]
pub fn vectors(len: usize) -> impl Iterator<Item = (usize, __mmask16)> {
    (0..len).step_by(LANES).map(move |at| (at, first(len - at)))
}

/// bfloat16 numbers as float32, 0 in the lanes left out.
///
/// # Safety
/// The lanes of `mask` can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub unsafe fn widen(from: *const u16, mask: __mmask16) -> __m512 {
    // SAFETY: the caller's promise.
    let bits = unsafe { _mm256_maskz_loadu_epi16(mask, from.cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
}

/// Round to bfloat16 and store the lanes of `mask`.
///
/// # Safety
/// The lanes of `mask` can be written.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub unsafe fn narrow(to: *mut u16, mask: __mmask16, x: __m512) {
    // SAFETY: both types are 256 bits without meaning of their own.
    let bits: __m256i = unsafe { std::mem::transmute(_mm512_cvtneps_pbh(x)) };
    // SAFETY: the caller's promise.
    unsafe { _mm256_mask_storeu_epi16(to.cast(), mask, bits) };
}

/// 2 to the power of `x`, to about 2e-7; 0 below 2^-150, NaN stays NaN.
///
/// Source: Taylor polynomial of degree 6 of 2^f on [-1/2, 1/2], scaled by the whole part.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub fn exp2(x: __m512) -> __m512 {
    let x = _mm512_max_ps(_mm512_set1_ps(-200.0), x); // the second where one is NaN
    let whole = _mm512_roundscale_ps::<0x08>(x);
    let f = _mm512_sub_ps(x, whole);
    let mut sum = _mm512_set1_ps(1.540_353e-4);
    for factor in [
        1.333_355_8e-3,
        9.618_129e-3,
        5.550_411e-2,
        0.240_226_5,
        std::f32::consts::LN_2,
        1.0,
    ] {
        sum = _mm512_fmadd_ps(sum, f, _mm512_set1_ps(factor));
    }
    _mm512_scalef_ps(sum, whole)
}

/// `x / (1 + e^-x)`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub fn silu(x: __m512) -> __m512 {
    let power = _mm512_mul_ps(x, _mm512_set1_ps(-std::f32::consts::LOG2_E));
    // Beyond 2^126 the quotient is nothing anyway, and its reciprocal would underflow.
    let power = exp2(_mm512_min_ps(_mm512_set1_ps(126.0), power));
    let below = _mm512_add_ps(_mm512_set1_ps(1.0), power);
    let rough = _mm512_rcp14_ps(below); // one step of Newton's doubles its 14 bits
    let error = _mm512_fnmadd_ps(below, rough, _mm512_set1_ps(2.0));
    _mm512_mul_ps(x, _mm512_mul_ps(rough, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::x86::supported;

    fn lanes(x: __m512) -> [f32; LANES] {
        // SAFETY: both are 16 float32 numbers.
        unsafe { std::mem::transmute(x) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    fn compare(x: f32) {
        let x64 = f64::from(x);
        let close = |got: f32, expected: f64| {
            let error = (f64::from(got) - expected).abs();
            let allowed = (1e-6 + 1e-7 * x64.abs()) * expected.abs() + 1e-30;
            assert!(error <= allowed, "{x}: {got}, {expected}");
        };
        close(lanes(exp2(_mm512_set1_ps(x)))[0], x64.max(-200.0).exp2());
        close(
            lanes(silu(_mm512_set1_ps(x)))[3],
            x64 / (1.0 + (-x64).exp()),
        );
    }

    #[test]
    fn powers_and_silu_agree_with_the_library() {
        if supported().is_some() {
            return;
        }
        for i in -600..=600 {
            // SAFETY: the machine can.
            unsafe { compare(i as f32 * 0.1 + 0.003) };
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    fn extremes() {
        let run = |x: f32| {
            (
                lanes(exp2(_mm512_set1_ps(x)))[0],
                lanes(silu(_mm512_set1_ps(x)))[0],
            )
        };
        assert!(run(f32::NAN).0.is_nan() && run(f32::NAN).1.is_nan());
        assert!(run(f32::NEG_INFINITY).0 < 1e-37);
        assert_eq!(run(f32::INFINITY).0, f32::INFINITY);
        assert!(run(-1e30).1.abs() < 1e-6);
        assert_eq!(run(1e30).1, 1e30);
    }

    #[test]
    fn nothing_that_is_not_a_number_gets_lost() {
        if supported().is_none() {
            // SAFETY: the machine can.
            unsafe { extremes() };
        }
    }
}
