//! Vectors of 4 with AArch64's NEON. Compiled and linted, not run by the tests here.

use std::arch::aarch64::*;

use super::widened::Named;
use super::{Floats, HALF, Instance, Portable, SQUARE};

const LANES: usize = 4;

/// NEON, which every AArch64 processor has.
#[derive(Debug, Clone, Copy)]
pub struct Neon;

impl Named for Neon {
    const INSTANCE: Instance = Instance::Neon;
}

/// A part of a vector, filled up with zeros.
#[inline(always)]
unsafe fn part<T: Copy + Default>(from: *const T, count: usize) -> [T; LANES] {
    let mut part = [T::default(); LANES];
    // SAFETY: the caller has `count` numbers.
    unsafe {
        part.as_mut_ptr()
            .copy_from_nonoverlapping(from, count.min(LANES))
    };
    part
}

impl Floats for Neon {
    type Vector = float32x4_t;
    const LANES: usize = LANES;
    const REGISTERS: usize = 32;
    const ROWS: usize = 8;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn vectorize<R>(run: impl FnOnce() -> R) -> R {
        run()
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn splat(x: f32) -> float32x4_t {
        vdupq_n_f32(x)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(from: *const f32, count: usize) -> float32x4_t {
        // SAFETY: the caller's promise; so below.
        unsafe {
            match count {
                LANES.. => vld1q_f32(from),
                _ => vld1q_f32(part(from, count).as_ptr()),
            }
        }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn store(to: *mut f32, count: usize, x: float32x4_t) {
        // SAFETY: see above.
        unsafe {
            if count >= LANES {
                vst1q_f32(to, x);
            } else {
                let mut part = [0.0; LANES];
                vst1q_f32(part.as_mut_ptr(), x);
                to.copy_from_nonoverlapping(part.as_ptr(), count);
            }
        }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn widen(from: *const u16, count: usize) -> float32x4_t {
        // SAFETY: see above.
        let bits = unsafe {
            match count {
                LANES.. => vld1_u16(from),
                _ => vld1_u16(part(from, count).as_ptr()),
            }
        };
        vreinterpretq_f32_u32(vshll_n_u16::<16>(bits))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn narrow(to: *mut u16, count: usize, x: float32x4_t) {
        let bits = vreinterpretq_u32_f32(x);
        let lowest = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let rounded = vaddq_u32(bits, vaddq_u32(vdupq_n_u32(0x7fff), lowest));
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x40_0000));
        let upper = vshrn_n_u32::<16>(vbslq_u32(vceqq_f32(x, x), rounded, quiet));
        // SAFETY: see above.
        unsafe {
            if count >= LANES {
                vst1_u16(to, upper);
            } else {
                let mut part = [0; LANES];
                vst1_u16(part.as_mut_ptr(), upper);
                to.copy_from_nonoverlapping(part.as_ptr(), count);
            }
        }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn even(pairs: *const u16) -> float32x4_t {
        // SAFETY: see above.
        let both = unsafe { vreinterpretq_u32_u16(vld1q_u16(pairs)) };
        vreinterpretq_f32_u32(vshlq_n_u32::<16>(both))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn odd(pairs: *const u16) -> float32x4_t {
        // SAFETY: see above.
        let both = unsafe { vreinterpretq_u32_u16(vld1q_u16(pairs)) };
        vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff_0000)))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn int8(from: *const i8) -> float32x4_t {
        // SAFETY: see above.
        let bytes = unsafe { from.cast::<u32>().read_unaligned() };
        let bytes = vreinterpret_s8_u32(vdup_n_u32(bytes));
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vaddq_f32(a, b)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vsubq_f32(a, b)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vmulq_f32(a, b)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vfmaq_f32(c, a, b)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vmaxq_f32(a, b)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn min(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vminq_f32(a, b)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn round(x: float32x4_t) -> float32x4_t {
        vrndnq_f32(x)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn scale(x: float32x4_t, whole: float32x4_t) -> float32x4_t {
        let power = |whole: int32x4_t| {
            let biased = vaddq_s32(whole, vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
        };
        let whole = vcvtq_s32_f32(whole);
        let half = vshrq_n_s32::<1>(whole);
        let x = vmulq_f32(x, power(half));
        vmulq_f32(x, power(vsubq_s32(whole, half)))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn reciprocal(x: float32x4_t) -> float32x4_t {
        vdivq_f32(vdupq_n_f32(1.0), x)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sum(x: float32x4_t) -> f32 {
        vaddvq_f32(x)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn largest(x: float32x4_t) -> f32 {
        vmaxvq_f32(x)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn transpose(from: &[*const u16; SQUARE], pairs: usize, to: *mut u32, stride: usize) {
        // SAFETY: see above.
        unsafe { Portable::transpose(from, pairs, to, stride) };
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn interleave(even: *const u16, odd: *const u16, count: usize, to: *mut u16) {
        if count < HALF {
            // SAFETY: see above.
            unsafe { Portable::interleave(even, odd, count, to) };
            return;
        }
        for begin in (0..HALF).step_by(8) {
            // SAFETY: see above.
            unsafe {
                let both = uint16x8x2_t(vld1q_u16(even.add(begin)), vld1q_u16(odd.add(begin)));
                vst2q_u16(to.add(2 * begin), both);
            }
        }
    }
}
