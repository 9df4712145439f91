//! Tells the tests which instances this processor runs, so that the others are ignored by name.

include!("src/simd/detect.rs");

fn main() {
    println!("cargo::rerun-if-changed=src/simd/detect.rs");
    for (name, missing) in [
        ("avx2", missing_avx2 as fn() -> Vec<&'static str>),
        ("avx512", missing_avx512),
        ("avx512_bf16", missing_avx512_bf16),
        ("amx_bf16", missing_amx_bf16),
    ] {
        println!("cargo::rustc-check-cfg=cfg(runs_{name})");
        if missing().is_empty() {
            println!("cargo::rustc-cfg=runs_{name}");
        }
    }
}
