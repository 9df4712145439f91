// Which instructions an instance requires that this processor lacks; build.rs includes it too.

macro_rules! missing {
    ($name:ident: $($feature:tt),+) => {
        #[cfg(target_arch = "x86_64")]
        pub fn $name() -> Vec<&'static str> {
            [$(($feature, is_x86_feature_detected!($feature))),+]
                .into_iter()
                .filter_map(|(feature, found)| (!found).then_some(feature))
                .collect()
        }

        #[cfg(not(target_arch = "x86_64"))]
        pub fn $name() -> Vec<&'static str> {
            vec![$($feature),+]
        }
    };
}

missing!(missing_avx2: "avx2", "fma");
missing!(missing_avx512: "avx2", "fma", "avx512f", "avx512bw", "avx512vl");
missing!(missing_avx512_bf16: "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512bf16");

/// A leaf of what the processor says of itself.
#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe, reason = "newer compilers call it safe")]
pub fn cpuid(leaf: u32) -> std::arch::x86_64::CpuidResult {
    // SAFETY: every x86-64 processor has the instruction.
    unsafe { std::arch::x86_64::__cpuid_count(leaf, 0) }
}

/// AMX with bfloat16, and what `missing_avx512_bf16` looks for. The system is asked to let this
/// process use tiles: it keeps 8 KiB more of each thread that does.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub fn missing_amx_bf16() -> Vec<&'static str> {
    const FEATURES: u32 = 7;
    const AMX: [(&str, u32); 2] = [("amx-bf16", 1 << 22), ("amx-tile", 1 << 24)];
    const REQUEST_PERMISSION: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;

    let mut missing = missing_avx512_bf16();
    if missing.is_empty() {
        let found = cpuid(FEATURES).edx;
        let lacking = AMX.iter().filter(|(_, bit)| found & bit == 0);
        missing.extend(lacking.map(|(name, _)| *name));
    }
    if missing.is_empty() {
        // SAFETY: numbers alone; a kernel that does not know the request refuses it.
        let refused = unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) };
        if refused != 0 {
            missing.push("amx-tile (the system does not allow it)");
        }
    }
    missing
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub fn missing_amx_bf16() -> Vec<&'static str> {
    vec!["amx-bf16", "amx-tile"]
}
