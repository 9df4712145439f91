//! AVX-512 BF16: one instruction multiplies pairs of bfloat16 numbers and adds both.

use std::arch::x86_64::*;

use super::avx512::{Avx512, first, first32, interleaving};
use super::{Floats, HALF, Instance, Simd};

/// Activations are bfloat16; GEMMs go by tiles (`kernels/tiled.rs`) if `AMX`.
#[derive(Debug, Clone, Copy)]
pub struct Bf16<const AMX: bool>;

/// AVX-512 with BF16.
pub type Avx512Bf16 = Bf16<false>;

/// The same with AMX.
pub type AmxBf16 = Bf16<true>;

#[inline]
fn bits(x: __m512i) -> __m512bh {
    // SAFETY: both are 512 bits without meaning of their own.
    unsafe { std::mem::transmute(x) }
}

impl<const AMX: bool> Simd for Bf16<AMX> {
    type Floats = Avx512;
    type Number = u16;
    type Term = __m512i;
    const INPUTS: usize = 2;
    const TILED: bool = AMX;
    const INSTANCE: Instance = if AMX {
        Instance::AmxBf16
    } else {
        Instance::Avx512Bf16
    };

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn vectorize<R>(run: impl FnOnce() -> R) -> R {
        run()
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn narrow(to: *mut u16, count: usize, x: __m512) {
        // SAFETY: both types are 256 bits without meaning of their own.
        let bits: __m256i = unsafe { std::mem::transmute(_mm512_cvtneps_pbh(x)) };
        // SAFETY: the caller's promise; so below.
        unsafe { _mm256_mask_storeu_epi16(to.cast(), first(count), bits) };
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn put(to: *mut u16, count: usize, x: __m512) {
        // SAFETY: see above.
        unsafe { Self::narrow(to, count, x) };
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn number(from: *const u16) -> __m512 {
        // SAFETY: see above.
        unsafe { Avx512::splat(f32::from_bits(u32::from(*from) << 16)) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn factor(from: *const u16) -> __m512i {
        // SAFETY: see above.
        _mm512_set1_epi32(unsafe { from.cast::<i32>().read_unaligned() })
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn term(pairs: *const u16, _: usize) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_loadu_si512(pairs.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn token_terms<const V: usize>(
        tokens: [*const u16; 2],
        _: usize,
        count: usize,
    ) -> [__m512i; V] {
        let (low, high) = interleaving();
        let mut terms = [_mm512_setzero_si512(); V];
        for (half, terms) in terms.chunks_mut(2).enumerate() {
            let begin = half * HALF;
            let mask = first32(count.saturating_sub(begin));
            // SAFETY: see above.
            let [even, odd] = tokens.map(|token| unsafe {
                _mm512_maskz_loadu_epi16(mask, token.wrapping_add(begin).cast())
            });
            for (term, order) in terms.iter_mut().zip([low, high]) {
                *term = _mm512_permutex2var_epi16(even, order, odd);
            }
        }
        terms
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn multiply_add(factor: __m512i, term: __m512i, sum: __m512) -> __m512 {
        _mm512_dpbf16_ps(sum, bits(factor), bits(term))
    }
}
