//! What a worker says of its prefix cache.

/// Chunks that a worker's prefix cache has stored or dropped, by their names
/// ([`tasuki_core::Chunks`]).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CacheEvents {
    /// Counts the events of a connection, from 1.
    pub number: u64,
    /// What was said before is void.
    pub reset: bool,
    pub stored: Vec<u64>,
    pub dropped: Vec<u64>,
    /// Stored before the reset, the last used first.
    pub held: Vec<u64>,
}
