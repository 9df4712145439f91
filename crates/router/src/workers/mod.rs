//! The workers: one stream to each, and one registry of what is known of them.

mod key;

pub use key::{Seat, WorkerKey};
