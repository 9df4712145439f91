//! The kernels, written once over `Simd`.

mod attention;
mod chunk;
mod forward;
mod gemm;
mod int8;
mod keys;
mod layer;
mod model;
mod panels;
mod rows;
mod single;
mod step;
mod tile;
mod values;
mod weights;

pub use model::{Packed, Steps};
pub use panels::Format;
pub use single::Linear;
