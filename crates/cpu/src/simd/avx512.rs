//! Vectors of 16 with AVX-512 F, BW and VL.

use std::arch::x86_64::*;

use super::widened::Named;
use super::{Floats, HALF, Instance, SQUARE, again};

const LANES: usize = 16;

/// AVX-512 F, BW and VL.
#[derive(Debug, Clone, Copy)]
pub struct Avx512;

impl Named for Avx512 {
    const INSTANCE: Instance = Instance::Avx512;
}

/// The first `count` lanes.
#[inline]
pub fn first(count: usize) -> __mmask16 {
    if count >= LANES { !0 } else { (1 << count) - 1 }
}

/// The first `count` numbers of 16 bits.
#[inline]
pub fn first32(count: usize) -> __mmask32 {
    if count >= HALF { !0 } else { (1 << count) - 1 }
}

/// Indices that take numbers of two vectors in turn, from `begin` on.
const fn in_turn(begin: u16) -> [u16; HALF] {
    let mut indices = [0; HALF];
    let mut i = 0;
    while i < HALF {
        indices[i] = begin + i as u16 / 2 + (i as u16 % 2) * HALF as u16;
        i += 1;
    }
    indices
}

/// Indices that take numbers of two vectors in turn: their first halves, and their second.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub fn interleaving() -> (__m512i, __m512i) {
    static HALVES: [[u16; HALF]; 2] = [in_turn(0), in_turn(HALF as u16 / 2)];
    let [low, high] = &HALVES;
    // SAFETY: arrays of 512 bits.
    unsafe {
        (
            _mm512_loadu_si512(low.as_ptr().cast()),
            _mm512_loadu_si512(high.as_ptr().cast()),
        )
    }
}

/// Exchange rows and columns of 16 x 16 numbers of 32 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn transpose16(mut r: [__m512i; SQUARE]) -> [__m512i; SQUARE] {
    let mut t = r;
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for i in 0..4 {
        for j in 0..2 {
            r[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
            r[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
        }
    }
    // r[4 i + j], quarter q: column 4 q + j of rows 4 i .. 4 i + 3.
    for j in 0..4 {
        let (a, b, c, d) = (r[j], r[4 + j], r[8 + j], r[12 + j]);
        let ab_even = _mm512_shuffle_i32x4::<0x88>(a, b);
        let ab_odd = _mm512_shuffle_i32x4::<0xdd>(a, b);
        let cd_even = _mm512_shuffle_i32x4::<0x88>(c, d);
        let cd_odd = _mm512_shuffle_i32x4::<0xdd>(c, d);
        t[j] = _mm512_shuffle_i32x4::<0x88>(ab_even, cd_even);
        t[4 + j] = _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd);
        t[8 + j] = _mm512_shuffle_i32x4::<0xdd>(ab_even, cd_even);
        t[12 + j] = _mm512_shuffle_i32x4::<0xdd>(ab_odd, cd_odd);
    }
    t
}

impl Floats for Avx512 {
    type Vector = __m512;
    const LANES: usize = LANES;
    const REGISTERS: usize = 32;
    const ROWS: usize = 8;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn vectorize<R>(run: impl FnOnce() -> R) -> R {
        run()
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load(from: *const f32, count: usize) -> __m512 {
        // SAFETY: the caller's promise; so below.
        unsafe { _mm512_maskz_loadu_ps(first(count), from) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn store(to: *mut f32, count: usize, x: __m512) {
        // SAFETY: see above.
        unsafe { _mm512_mask_storeu_ps(to, first(count), x) };
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn widen(from: *const u16, count: usize) -> __m512 {
        // SAFETY: see above.
        let bits = unsafe { _mm256_maskz_loadu_epi16(first(count), from.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn narrow(to: *mut u16, count: usize, x: __m512) {
        let bits = _mm512_castps_si512(x);
        let lowest = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let half = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), lowest);
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
        let rounded = _mm512_mask_mov_epi32(_mm512_add_epi32(bits, half), nan, quiet);
        let upper = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded));
        // SAFETY: see above.
        unsafe { _mm256_mask_storeu_epi16(to.cast(), first(count), upper) };
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn even(pairs: *const u16) -> __m512 {
        // SAFETY: see above.
        let both = unsafe { _mm512_loadu_si512(pairs.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(both))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn odd(pairs: *const u16) -> __m512 {
        // SAFETY: see above.
        let both = unsafe { _mm512_loadu_si512(again(pairs).cast()) };
        _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(-0x1_0000)))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn int8(from: *const i8) -> __m512 {
        // SAFETY: see above.
        let bytes = unsafe { _mm_loadu_si128(from.cast()) };
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        _mm512_min_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn round(x: __m512) -> __m512 {
        _mm512_roundscale_ps::<0x08>(x)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn scale(x: __m512, whole: __m512) -> __m512 {
        _mm512_scalef_ps(x, whole)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn reciprocal(x: __m512) -> __m512 {
        let rough = _mm512_rcp14_ps(x); // one step of Newton's doubles its 14 bits
        let error = _mm512_fnmadd_ps(x, rough, _mm512_set1_ps(2.0));
        _mm512_mul_ps(rough, error)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn sum(x: __m512) -> f32 {
        _mm512_reduce_add_ps(x)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn largest(x: __m512) -> f32 {
        _mm512_reduce_max_ps(x)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn transpose(from: &[*const u16; SQUARE], pairs: usize, to: *mut u32, stride: usize) {
        let mask = first(pairs);
        let mut rows = [_mm512_setzero_si512(); SQUARE];
        for (row, from) in rows.iter_mut().zip(from) {
            // SAFETY: see above.
            *row = unsafe { _mm512_maskz_loadu_epi32(mask, from.cast()) };
        }
        for (i, row) in transpose16(rows).into_iter().enumerate() {
            if i < pairs {
                // SAFETY: see above.
                unsafe { _mm512_storeu_si512(to.add(i * stride).cast(), row) };
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn interleave(even: *const u16, odd: *const u16, count: usize, to: *mut u16) {
        let (mask, (low, high)) = (first32(count), interleaving());
        // SAFETY: see above.
        unsafe {
            let even = _mm512_maskz_loadu_epi16(mask, even.cast());
            let odd = _mm512_maskz_loadu_epi16(mask, odd.cast());
            let to = to.cast::<__m512i>();
            _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi16(even, low, odd));
            _mm512_storeu_si512(to.add(1).cast(), _mm512_permutex2var_epi16(even, high, odd));
        }
    }
}
