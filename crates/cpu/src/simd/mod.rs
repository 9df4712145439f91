//! Vectors of numbers, as each kind of processor has them.
//!
//! ```text
//! Floats   float32 vectors, bfloat16 and int8 in memory     Portable, Avx2, Avx512, Neon
//! Simd     how rows meet bfloat16 weights                   Widened<Floats>, Avx512Bf16, AmxBf16
//! ```
//!
//! The kernels (`kernels/`) are written once over `Simd`. `vectorize` compiles a closure
//! with the instance's instructions enabled; every other method is inlined there.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
mod detect;
pub mod functions;
mod instance;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod widened;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
#[cfg(target_arch = "x86_64")]
pub use avx512_bf16::{AmxBf16, Avx512Bf16};
pub use instance::Instance;
pub(crate) use instance::with_instance;
#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
pub use portable::Portable;
pub use widened::Widened;

use crate::memory::Element;

/// Tokens, or pairs of bfloat16 numbers, that `Floats::transpose` takes at once.
pub const SQUARE: usize = 16;

/// bfloat16 numbers that `Floats::interleave` takes of each token.
pub const HALF: usize = 32;

/// Vectors of float32 numbers.
///
/// A `count` says how many lanes there are in memory, all from `LANES` on; the others are
/// neither read nor written, and read as 0.
///
/// # Safety
/// Of all methods: the processor has the instructions, and pointers lead to as many
/// numbers as the method reads or writes.
pub trait Floats: Copy + Send + Sync + 'static {
    type Vector: Copy;
    const LANES: usize;
    /// Vectors that the processor's registers hold.
    const REGISTERS: usize;
    /// Most rows of a tile of a GEMM.
    const ROWS: usize;

    unsafe fn vectorize<R>(run: impl FnOnce() -> R) -> R;

    unsafe fn splat(x: f32) -> Self::Vector;
    unsafe fn load(from: *const f32, count: usize) -> Self::Vector;
    unsafe fn store(to: *mut f32, count: usize, x: Self::Vector);

    /// bfloat16 numbers.
    unsafe fn widen(from: *const u16, count: usize) -> Self::Vector;
    /// Round to bfloat16, to the nearest, ties to even.
    unsafe fn narrow(to: *mut u16, count: usize, x: Self::Vector);
    /// The first numbers of `LANES` pairs of bfloat16 numbers.
    unsafe fn even(pairs: *const u16) -> Self::Vector;
    /// The second ones.
    unsafe fn odd(pairs: *const u16) -> Self::Vector;
    /// `LANES` numbers of 8 bits.
    unsafe fn int8(from: *const i8) -> Self::Vector;

    unsafe fn add(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    unsafe fn sub(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    unsafe fn mul(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b + c`, rounded once where the processor can.
    unsafe fn fma(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// NaN if `b` is NaN.
    unsafe fn max(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// NaN if `b` is NaN.
    unsafe fn min(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// To the nearest whole number.
    unsafe fn round(x: Self::Vector) -> Self::Vector;
    /// `x * 2^whole`, for whole numbers from -200 to 254.
    unsafe fn scale(x: Self::Vector, whole: Self::Vector) -> Self::Vector;
    /// `1 / x`, to a few units in the last place.
    unsafe fn reciprocal(x: Self::Vector) -> Self::Vector;
    unsafe fn sum(x: Self::Vector) -> f32;
    unsafe fn largest(x: Self::Vector) -> f32;

    /// Exchange rows and columns: `pairs` (at most 16) pairs of bfloat16 numbers of 16 rows
    /// become `pairs` rows of 16 pairs, `stride` pairs apart.
    unsafe fn transpose(from: &[*const u16; SQUARE], pairs: usize, to: *mut u32, stride: usize);

    /// Up to 32 numbers of two tokens in turn, and zeros up to 64 numbers.
    unsafe fn interleave(even: *const u16, odd: *const u16, count: usize, to: *mut u16);
}

/// A vector of an instance.
pub type Vector<S> = <<S as Simd>::Floats as Floats>::Vector;

/// An instance of the kernels: how activations are kept, and multiplied with bfloat16.
///
/// A *term* is what one instruction multiplies with a row's numbers and adds to a vector of
/// sums: `INPUTS` inputs of each of `LANES` outputs. A pair of inputs is `2 / INPUTS` terms.
///
/// # Safety
/// Of all methods: as for `Floats`.
pub trait Simd: Copy + Send + Sync + 'static {
    type Floats: Floats;
    /// A number of a row, as GEMMs read it.
    type Number: Element;
    type Term: Copy;
    const INPUTS: usize;
    /// GEMMs of bfloat16 weights, and attention, go by AMX's tiles; `Number` is bfloat16.
    const TILED: bool = false;
    const INSTANCE: Instance;

    unsafe fn vectorize<R>(run: impl FnOnce() -> R) -> R;

    /// As `Floats::narrow`.
    unsafe fn narrow(to: *mut u16, count: usize, x: Vector<Self>);
    /// Store numbers of a row.
    unsafe fn put(to: *mut Self::Number, count: usize, x: Vector<Self>);
    /// One number of a row, in all lanes.
    unsafe fn number(from: *const Self::Number) -> Vector<Self>;
    /// `INPUTS` numbers of a row, in all lanes.
    unsafe fn factor(from: *const Self::Number) -> Self::Term;
    /// Of `LANES` pairs of weights, the term `index`.
    unsafe fn term(pairs: *const u16, index: usize) -> Self::Term;
    /// The same for numbers of two tokens, `V` vectors of them. `count` numbers exist, whole
    /// vectors and at least one; terms beyond them are undefined, but finite if those are.
    unsafe fn token_terms<const V: usize>(
        tokens: [*const u16; 2],
        index: usize,
        count: usize,
    ) -> [Self::Term; V];
    /// `sum + factor * term`.
    unsafe fn multiply_add(factor: Self::Term, term: Self::Term, sum: Vector<Self>)
    -> Vector<Self>;
}

/// Begins of the vectors that cover `len` numbers, and the numbers from there on.
#[inline]
pub fn vectors<F: Floats>(len: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(F::LANES).map(move |at| (at, len - at))
}

/// Ask for a cache line that will be needed; any address is allowed.
#[inline(always)]
pub fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch may point anywhere, and every x86-64 processor has it.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// The same address, unknown to the compiler: what was loaded from there is loaded again.
///
/// Where registers are scarce that is better than to keep a pair until its second half is due.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
#[expect(clippy::pointers_in_nomem_asm_block, reason = "nothing is read there")]
fn again<T>(mut at: *const T) -> *const T {
    // SAFETY: no instruction at all.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) at, options(pure, nomem, nostack, preserves_flags));
    }
    at
}

#[cfg(test)]
mod tests;
