//! Vectors in plain Rust, for processors without an instance of their own.

use std::array::from_fn;

use super::widened::Named;
use super::{Floats, HALF, Instance, SQUARE};

const LANES: usize = 4;

/// Arrays of 4; the compiler makes of them what the architecture has.
#[derive(Debug, Clone, Copy)]
pub struct Portable;

impl Named for Portable {
    const INSTANCE: Instance = Instance::Portable;
}

fn wide(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

fn round_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

impl Floats for Portable {
    type Vector = [f32; LANES];
    const LANES: usize = LANES;
    const REGISTERS: usize = 16;
    const ROWS: usize = 6;

    #[inline]
    unsafe fn vectorize<R>(run: impl FnOnce() -> R) -> R {
        run()
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::Vector {
        [x; LANES]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32, count: usize) -> Self::Vector {
        let mut to = [0.0; LANES];
        for (i, to) in to.iter_mut().enumerate().take(count) {
            // SAFETY: the caller's promise; so below.
            *to = unsafe { *from.add(i) };
        }
        to
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, count: usize, x: Self::Vector) {
        for (i, x) in x.into_iter().enumerate().take(count) {
            // SAFETY: see above.
            unsafe { *to.add(i) = x };
        }
    }

    #[inline(always)]
    unsafe fn widen(from: *const u16, count: usize) -> Self::Vector {
        let mut to = [0.0; LANES];
        for (i, to) in to.iter_mut().enumerate().take(count) {
            // SAFETY: see above.
            *to = wide(unsafe { *from.add(i) });
        }
        to
    }

    #[inline(always)]
    unsafe fn narrow(to: *mut u16, count: usize, x: Self::Vector) {
        for (i, x) in x.into_iter().enumerate().take(count) {
            // SAFETY: see above.
            unsafe { *to.add(i) = round_bf16(x) };
        }
    }

    #[inline(always)]
    unsafe fn even(pairs: *const u16) -> Self::Vector {
        // SAFETY: see above.
        from_fn(|i| wide(unsafe { *pairs.add(2 * i) }))
    }

    #[inline(always)]
    unsafe fn odd(pairs: *const u16) -> Self::Vector {
        // SAFETY: see above.
        from_fn(|i| wide(unsafe { *pairs.add(2 * i + 1) }))
    }

    #[inline(always)]
    unsafe fn int8(from: *const i8) -> Self::Vector {
        // SAFETY: see above.
        from_fn(|i| f32::from(unsafe { *from.add(i) }))
    }

    #[inline(always)]
    unsafe fn add(a: Self::Vector, b: Self::Vector) -> Self::Vector {
        from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    unsafe fn sub(a: Self::Vector, b: Self::Vector) -> Self::Vector {
        from_fn(|i| a[i] - b[i])
    }

    #[inline(always)]
    unsafe fn mul(a: Self::Vector, b: Self::Vector) -> Self::Vector {
        from_fn(|i| a[i] * b[i])
    }

    /// Rounds twice: without an instruction for it, rounding once is a slow call.
    #[inline(always)]
    unsafe fn fma(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    unsafe fn max(a: Self::Vector, b: Self::Vector) -> Self::Vector {
        from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    unsafe fn min(a: Self::Vector, b: Self::Vector) -> Self::Vector {
        from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    unsafe fn round(x: Self::Vector) -> Self::Vector {
        x.map(f32::round_ties_even)
    }

    #[inline(always)]
    unsafe fn scale(x: Self::Vector, whole: Self::Vector) -> Self::Vector {
        let power = |whole: i32| f32::from_bits(((whole + 127) << 23) as u32);
        from_fn(|i| {
            let whole = whole[i] as i32;
            x[i] * power(whole / 2) * power(whole - whole / 2)
        })
    }

    #[inline(always)]
    unsafe fn reciprocal(x: Self::Vector) -> Self::Vector {
        x.map(f32::recip)
    }

    #[inline(always)]
    unsafe fn sum(x: Self::Vector) -> f32 {
        (x[0] + x[2]) + (x[1] + x[3])
    }

    #[inline(always)]
    unsafe fn largest(x: Self::Vector) -> f32 {
        x.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    #[inline(always)]
    unsafe fn transpose(from: &[*const u16; SQUARE], pairs: usize, to: *mut u32, stride: usize) {
        for (column, from) in from.iter().enumerate() {
            for pair in 0..pairs {
                // SAFETY: see above.
                unsafe {
                    let both = from.add(2 * pair).cast::<u32>().read_unaligned();
                    to.add(pair * stride + column).write_unaligned(both);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn interleave(even: *const u16, odd: *const u16, count: usize, to: *mut u16) {
        for i in 0..HALF {
            for (side, from) in [even, odd].into_iter().enumerate() {
                // SAFETY: see above.
                unsafe { *to.add(2 * i + side) = if i < count { *from.add(i) } else { 0 } };
            }
        }
    }
}
