//! Instances that widen bfloat16 weights to float32 and keep activations in float32.

use super::{Floats, Instance, Simd};

/// bfloat16 in memory, float32 in registers.
#[derive(Debug, Clone, Copy)]
pub struct Widened<F>(std::marker::PhantomData<F>);

/// The instance that a kind of vectors makes.
pub trait Named {
    const INSTANCE: Instance;
}

impl<F: Floats + Named> Simd for Widened<F> {
    type Floats = F;
    type Number = f32;
    type Term = F::Vector;
    const INPUTS: usize = 1;
    const INSTANCE: Instance = F::INSTANCE;

    #[inline(always)]
    unsafe fn vectorize<R>(run: impl FnOnce() -> R) -> R {
        // SAFETY: the caller's promise; so below.
        unsafe { F::vectorize(run) }
    }

    #[inline(always)]
    unsafe fn narrow(to: *mut u16, count: usize, x: F::Vector) {
        // SAFETY: see above.
        unsafe { F::narrow(to, count, x) };
    }

    #[inline(always)]
    unsafe fn put(to: *mut f32, count: usize, x: F::Vector) {
        // SAFETY: see above.
        unsafe { F::store(to, count, x) };
    }

    #[inline(always)]
    unsafe fn number(from: *const f32) -> F::Vector {
        // SAFETY: see above.
        unsafe { F::splat(*from) }
    }

    #[inline(always)]
    unsafe fn factor(from: *const f32) -> F::Vector {
        // SAFETY: see above.
        unsafe { F::splat(*from) }
    }

    #[inline(always)]
    unsafe fn term(pairs: *const u16, index: usize) -> F::Vector {
        // SAFETY: see above.
        unsafe {
            match index {
                0 => F::even(pairs),
                _ => F::odd(pairs),
            }
        }
    }

    #[inline(always)]
    unsafe fn token_terms<const V: usize>(
        tokens: [*const u16; 2],
        index: usize,
        count: usize,
    ) -> [F::Vector; V] {
        std::array::from_fn(|v| {
            // Behind the last number there is no sum to care for: any numbers will do.
            let begin = v * F::LANES;
            let begin = if begin < count { begin } else { 0 };
            // SAFETY: see above.
            unsafe { F::widen(tokens[index].wrapping_add(begin), F::LANES) }
        })
    }

    #[inline(always)]
    unsafe fn multiply_add(factor: F::Vector, term: F::Vector, sum: F::Vector) -> F::Vector {
        // SAFETY: see above.
        unsafe { F::fma(factor, term, sum) }
    }
}
