//! The messages of `proto/tasuki/v1`, and the version of them that this build speaks.

#[allow(clippy::all, clippy::pedantic, missing_docs)]
pub mod v1 {
    include!("../generated/tasuki.v1.rs");
}

/// Compared by both sides before anything else; a difference is a refusal.
pub const PROTOCOL_VERSION: u32 = 2;
