//! Vectors of 8 with AVX2 and FMA.

use std::arch::x86_64::*;

use super::widened::Named;
use super::{Floats, HALF, Instance, SQUARE, again};

const LANES: usize = 8;

/// AVX2 and FMA.
#[derive(Debug, Clone, Copy)]
pub struct Avx2;

impl Named for Avx2 {
    const INSTANCE: Instance = Instance::Avx2;
}

/// All bits of the first `count` lanes, for loads and stores of a part.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn first(count: usize) -> __m256i {
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes)
}

/// The upper halves of lanes, as bfloat16 bits, rounded to the nearest; NaN stays NaN.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn round_bf16(x: __m256) -> __m128i {
    let bits = _mm256_castps_si256(x);
    let lowest = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), lowest);
    let rounded = _mm256_castsi256_ps(_mm256_add_epi32(bits, half));
    let quiet = _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000)));
    let rounded = _mm256_blendv_ps(rounded, quiet, _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
    let upper = _mm256_srli_epi32::<16>(_mm256_castps_si256(rounded));
    _mm_packus_epi32(
        _mm256_castsi256_si128(upper),
        _mm256_extracti128_si256::<1>(upper),
    )
}

/// Exchange rows and columns of 8 x 8 numbers of 32 bits.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn transpose8(r: [__m256i; LANES]) -> [__m256i; LANES] {
    let (mut t, mut u) = (r, r);
    for i in 0..4 {
        t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for i in 0..2 {
        for j in 0..2 {
            let (a, b) = (t[4 * i + j], t[4 * i + 2 + j]);
            u[4 * i + 2 * j] = _mm256_unpacklo_epi64(a, b);
            u[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(a, b);
        }
    }
    for j in 0..4 {
        t[j] = _mm256_permute2x128_si256::<0x20>(u[j], u[4 + j]);
        t[4 + j] = _mm256_permute2x128_si256::<0x31>(u[j], u[4 + j]);
    }
    t
}

impl Floats for Avx2 {
    type Vector = __m256;
    const LANES: usize = LANES;
    const REGISTERS: usize = 16;
    const ROWS: usize = 6;

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn vectorize<R>(run: impl FnOnce() -> R) -> R {
        run()
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn splat(x: f32) -> __m256 {
        _mm256_set1_ps(x)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn load(from: *const f32, count: usize) -> __m256 {
        // SAFETY: the caller's promise; so below.
        unsafe {
            match count {
                LANES.. => _mm256_loadu_ps(from),
                _ => _mm256_maskload_ps(from, first(count)),
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn store(to: *mut f32, count: usize, x: __m256) {
        // SAFETY: see above.
        unsafe {
            match count {
                LANES.. => _mm256_storeu_ps(to, x),
                _ => _mm256_maskstore_ps(to, first(count), x),
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn widen(from: *const u16, count: usize) -> __m256 {
        let mut part = [0u16; LANES];
        // SAFETY: see above.
        let bits = unsafe {
            if count >= LANES {
                _mm_loadu_si128(from.cast())
            } else {
                part.as_mut_ptr().copy_from_nonoverlapping(from, count);
                _mm_loadu_si128(part.as_ptr().cast())
            }
        };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn narrow(to: *mut u16, count: usize, x: __m256) {
        let bits = round_bf16(x);
        // SAFETY: see above.
        unsafe {
            if count >= LANES {
                _mm_storeu_si128(to.cast(), bits);
            } else {
                let mut part = [0u16; LANES];
                _mm_storeu_si128(part.as_mut_ptr().cast(), bits);
                to.copy_from_nonoverlapping(part.as_ptr(), count);
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn even(pairs: *const u16) -> __m256 {
        // SAFETY: see above.
        let both = unsafe { _mm256_loadu_si256(pairs.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(both))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn odd(pairs: *const u16) -> __m256 {
        // SAFETY: see above.
        let both = unsafe { _mm256_loadu_ps(again(pairs).cast()) };
        _mm256_and_ps(both, _mm256_castsi256_ps(_mm256_set1_epi32(-0x1_0000)))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn int8(from: *const i8) -> __m256 {
        // SAFETY: see above.
        let bytes = unsafe { _mm_loadl_epi64(from.cast()) };
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        _mm256_sub_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        _mm256_max_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        _mm256_min_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn round(x: __m256) -> __m256 {
        _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn scale(x: __m256, whole: __m256) -> __m256 {
        let power = |whole: __m256i| {
            let biased = _mm256_add_epi32(whole, _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        };
        let whole = _mm256_cvtps_epi32(whole);
        let half = _mm256_srai_epi32::<1>(whole);
        let x = _mm256_mul_ps(x, power(half));
        _mm256_mul_ps(x, power(_mm256_sub_epi32(whole, half)))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn reciprocal(x: __m256) -> __m256 {
        _mm256_div_ps(_mm256_set1_ps(1.0), x)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn sum(x: __m256) -> f32 {
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn largest(x: __m256) -> f32 {
        let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn transpose(from: &[*const u16; SQUARE], pairs: usize, to: *mut u32, stride: usize) {
        for column in (0..SQUARE).step_by(LANES) {
            for pair in (0..pairs).step_by(LANES) {
                let mask = first(pairs - pair);
                // SAFETY: see above; masked lanes are not read.
                let rows = std::array::from_fn(|i| unsafe {
                    let from = from[column + i].wrapping_add(2 * pair);
                    _mm256_maskload_epi32(from.cast(), mask)
                });
                let columns = transpose8(rows).into_iter().enumerate();
                for (i, row) in columns.take(pairs - pair) {
                    // SAFETY: see above.
                    unsafe {
                        _mm256_storeu_si256(to.add((pair + i) * stride + column).cast(), row)
                    };
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn interleave(even: *const u16, odd: *const u16, count: usize, to: *mut u16) {
        let mut parts = [[0u16; HALF]; 2];
        let mut from = [even, odd];
        if count < HALF {
            for (part, from) in parts.iter_mut().zip(&mut from) {
                // SAFETY: see above.
                unsafe { part.as_mut_ptr().copy_from_nonoverlapping(*from, count) };
                *from = part.as_ptr();
            }
        }
        for begin in (0..HALF).step_by(2 * LANES) {
            // SAFETY: see above; both lead to 32 numbers now.
            unsafe {
                let even = _mm256_loadu_si256(from[0].add(begin).cast());
                let odd = _mm256_loadu_si256(from[1].add(begin).cast());
                let low = _mm256_unpacklo_epi16(even, odd);
                let high = _mm256_unpackhi_epi16(even, odd);
                let to = to.add(2 * begin).cast::<__m256i>();
                _mm256_storeu_si256(to, _mm256_permute2x128_si256::<0x20>(low, high));
                _mm256_storeu_si256(to.add(1), _mm256_permute2x128_si256::<0x31>(low, high));
            }
        }
    }
}
