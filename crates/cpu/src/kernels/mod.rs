//! The kernels, written once over `Simd`.

mod attention;
mod chunk;
mod forward;
mod gemm;
mod int8;
mod keys;
mod layer;
mod model;
mod packed;
mod panels;
mod rows;
mod single;
mod step;
mod tile;
#[cfg(target_arch = "x86_64")]
mod tiled;
mod values;
mod weights;

pub use model::{Packed, Steps};
pub use panels::Format;
pub use single::Linear;
