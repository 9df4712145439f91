//! Functions of vectors.

use super::Floats;

/// 2 to the power of `x`, to about 2e-7; 0 below 2^-150, NaN stays NaN.
///
/// Source: Taylor polynomial of degree 6 of 2^f on [-1/2, 1/2], scaled by the whole part.
///
/// # Safety
/// As for `Floats`.
#[inline(always)]
pub unsafe fn exp2<F: Floats>(x: F::Vector) -> F::Vector {
    // SAFETY: the caller's promise.
    unsafe {
        let x = F::min(F::splat(254.0), F::max(F::splat(-200.0), x));
        let whole = F::round(x);
        let f = F::sub(x, whole);
        let mut sum = F::splat(1.540_353e-4);
        for factor in [
            1.333_355_8e-3,
            9.618_129e-3,
            5.550_411e-2,
            0.240_226_5,
            std::f32::consts::LN_2,
            1.0,
        ] {
            sum = F::fma(sum, f, F::splat(factor));
        }
        F::scale(sum, whole)
    }
}

/// `x / (1 + e^-x)`.
///
/// # Safety
/// As for `Floats`.
#[inline(always)]
pub unsafe fn silu<F: Floats>(x: F::Vector) -> F::Vector {
    // SAFETY: the caller's promise.
    unsafe {
        let power = F::mul(x, F::splat(-std::f32::consts::LOG2_E));
        // Beyond 2^126 the quotient is 0 anyway, and its reciprocal would underflow.
        let power = exp2::<F>(F::min(F::splat(126.0), power));
        F::mul(x, F::reciprocal(F::add(F::splat(1.0), power)))
    }
}
