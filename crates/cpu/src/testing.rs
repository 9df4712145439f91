//! Numbers for tests, and tests of every instance.

/// Make a test of each generic function `fn test<S: Simd>()` for each instance.
///
/// An instance that this processor does not run is reported as ignored, with its reason
/// (`build.rs` looks; the build fails to match a machine that is not the one that built it).
macro_rules! each_instance {
    ($($test:ident),+ $(,)?) => {
        crate::testing::each_instance!(@ portable, all(), "", $($test)+);
        #[cfg(target_arch = "x86_64")]
        crate::testing::each_instance!(
            @ avx2, runs_avx2, "this processor has no AVX2 and FMA", $($test)+
        );
        #[cfg(target_arch = "x86_64")]
        crate::testing::each_instance!(
            @ avx512, runs_avx512, "this processor has no AVX-512 F, BW and VL", $($test)+
        );
        #[cfg(target_arch = "x86_64")]
        crate::testing::each_instance!(
            @ avx512_bf16, runs_avx512_bf16, "this processor has no AVX-512 BF16", $($test)+
        );
        #[cfg(target_arch = "x86_64")]
        crate::testing::each_instance!(
            @ amx_bf16, runs_amx_bf16, "this processor has no AMX with bfloat16", $($test)+
        );
        #[cfg(target_arch = "aarch64")]
        crate::testing::each_instance!(@ neon, all(), "", $($test)+);
    };
    (@ $instance:ident, $runs:meta, $reason:literal, $($test:ident)+) => {
        mod $instance {
            use crate::simd::Instance;
            $(
                #[test]
                #[cfg_attr(not($runs), ignore = $reason)]
                fn $test() {
                    let instance = Instance::named(stringify!($instance));
                    let instance = instance.expect("built on another machine: cargo clean");
                    crate::simd::with_instance!(instance, S => super::$test::<S>());
                }
            )+
        }
    };
}
pub(crate) use each_instance;

use crate::simd::{Floats, Simd, vectors};

/// Repeatable random numbers.
pub struct Numbers(u64);

impl Numbers {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % limit
    }

    /// bfloat16 numbers between -1 and 1.
    pub fn bits(&mut self, len: usize) -> Vec<u16> {
        (0..len)
            .map(|_| bits(self.below(2001) as f32 / 1000.0 - 1.0))
            .collect()
    }
}

/// Round to bfloat16, to the nearest.
pub fn bits(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// bfloat16 as float32.
pub fn wide(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// bfloat16 numbers as a row of an instance.
pub fn numbers_of<S: Simd>(bits: &[u16]) -> Vec<S::Number> {
    let mut to = vec![S::Number::default(); bits.len()];
    // SAFETY: whoever tests an instance looked whether the machine can; the lengths agree.
    unsafe {
        S::vectorize(|| {
            for (at, left) in vectors::<S::Floats>(bits.len()) {
                let x = S::Floats::widen(bits.as_ptr().add(at), left);
                S::put(to.as_mut_ptr().add(at), left, x);
            }
        });
    }
    to
}

/// Numbers of a row as float32.
pub fn widened<S: Simd>(row: &[S::Number]) -> Vec<f32> {
    // SAFETY: as above.
    let number = |x: &S::Number| unsafe { S::vectorize(|| S::Floats::largest(S::number(x))) };
    row.iter().map(number).collect()
}
