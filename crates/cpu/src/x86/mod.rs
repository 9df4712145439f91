//! Kernels for x86-64 with AVX-512 BF16: two products a lane and cycle.

mod attention;
mod forward;
mod keys;
mod layer;
mod model;
mod panels;
mod product;
mod rows;
mod single;
mod step;
mod vector;
mod weigh;
mod weights;

pub use model::Model;
pub use single::Product;

/// Why this machine cannot run the kernels; `None`: it can.
pub fn supported() -> Option<String> {
    let missing: Vec<&str> = [
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
    ]
    .into_iter()
    .filter_map(|(name, there)| (!there).then_some(name))
    .collect();
    (!missing.is_empty()).then(|| format!("this processor has no {}", missing.join(", ")))
}
