//! Which instances there are, which of them this processor runs, and which is the best.

use super::detect::{missing_amx_bf16, missing_avx2, missing_avx512, missing_avx512_bf16};
use crate::error::CpuError;

/// A set of instructions that the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instance {
    /// What every processor of the architecture has.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW and VL.
    Avx512,
    /// AVX-512 BF16 too, which multiplies pairs of bfloat16 numbers.
    Avx512Bf16,
    /// AMX too, which multiplies tiles of them.
    AmxBf16,
    /// AArch64's vectors.
    Neon,
}

impl Instance {
    /// All, the quickest on this processor last.
    ///
    /// A Sapphire Rapids serves prompts and eight requests at 0.6 and 0.7 of `Avx512`'s rate by
    /// `Avx512Bf16` (`benchmarks/results/engine_vs_peers_amx.json`); Intel's others are taken to
    /// be alike.
    pub fn all() -> [Self; 6] {
        let pairs = match slow_pairs() {
            true => [Self::Avx512Bf16, Self::Avx512],
            false => [Self::Avx512, Self::Avx512Bf16],
        };
        let [slower, quicker] = pairs;
        [
            Self::Portable,
            Self::Neon,
            Self::Avx2,
            slower,
            quicker,
            Self::AmxBf16,
        ]
    }

    /// As options and logs name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512_bf16",
            Self::AmxBf16 => "amx_bf16",
        }
    }

    /// Instructions that it requires and this processor lacks.
    pub fn missing(self) -> Vec<&'static str> {
        match self {
            Self::Portable => Vec::new(),
            Self::Neon if cfg!(target_arch = "aarch64") => Vec::new(),
            Self::Neon => vec!["neon"],
            Self::Avx2 => missing_avx2(),
            Self::Avx512 => missing_avx512(),
            Self::Avx512Bf16 => missing_avx512_bf16(),
            Self::AmxBf16 => missing_amx_bf16(),
        }
    }

    /// The quickest that this processor runs.
    pub fn best() -> Self {
        let runs = |instance: &Self| instance.missing().is_empty();
        Self::all()
            .into_iter()
            .rfind(runs)
            .unwrap_or(Self::Portable)
    }

    /// The instance of a name, if this processor runs it.
    ///
    /// # Errors
    /// There is none of this name, or the processor lacks instructions.
    pub fn named(name: &str) -> Result<Self, CpuError> {
        let Some(found) = Self::all().into_iter().find(|known| known.name() == name) else {
            let names = Self::all().map(Self::name).join(", ");
            return Err(CpuError::Unavailable(format!(
                "CPU kernels {name:?} do not exist, must be one of {names}"
            )));
        };
        found.check().map(|()| found)
    }

    /// An error unless this processor runs it.
    pub fn check(self) -> Result<(), CpuError> {
        let missing = self.missing();
        if missing.is_empty() {
            return Ok(());
        }
        Err(CpuError::Unavailable(format!(
            "CPU kernels {:?} require {}, which this processor lacks; it runs {}",
            self.name(),
            missing.join(", "),
            Self::best().name()
        )))
    }
}

/// Whether the processor is Intel's, which multiply pairs of bfloat16 numbers slowly.
#[cfg(target_arch = "x86_64")]
fn slow_pairs() -> bool {
    let vendor = super::detect::cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes) == [*b"Genu", *b"ineI", *b"ntel"]
}

#[cfg(not(target_arch = "x86_64"))]
fn slow_pairs() -> bool {
    false
}

/// Evaluate an expression with a type name bound to an instance's type. The instance has
/// been checked; what this architecture does not have is unreachable.
macro_rules! with_instance {
    ($instance:expr, $S:ident => $result:expr) => {{
        use $crate::simd::*;
        match $instance {
            Instance::Portable => {
                type $S = Widened<Portable>;
                $result
            }
            #[cfg(target_arch = "x86_64")]
            Instance::Avx2 => {
                type $S = Widened<Avx2>;
                $result
            }
            #[cfg(target_arch = "x86_64")]
            Instance::Avx512 => {
                type $S = Widened<Avx512>;
                $result
            }
            #[cfg(target_arch = "x86_64")]
            Instance::Avx512Bf16 => {
                type $S = Avx512Bf16;
                $result
            }
            #[cfg(target_arch = "x86_64")]
            Instance::AmxBf16 => {
                type $S = AmxBf16;
                $result
            }
            #[cfg(target_arch = "aarch64")]
            Instance::Neon => {
                type $S = Widened<Neon>;
                $result
            }
            other => unreachable!("{other:?} passed its check on another architecture"),
        }
    }};
}
pub(crate) use with_instance;
