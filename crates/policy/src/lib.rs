//! Where a request runs. Pure: time and randomness are arguments.

pub mod config;
pub mod error;
pub mod placement;

pub use config::PolicyConfig;
pub use error::NoPlacement;
pub use placement::{Choosing, Placement, place, place_decode};
