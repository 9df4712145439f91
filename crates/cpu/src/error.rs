//! What can be wrong with a model or a batch.

use thiserror::Error;

/// Why something was refused; nothing was computed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CpuError {
    /// These kernels do not run this model, or not here.
    #[error("{0}")]
    Unavailable(String),
    /// An array has another length than the model or the batch says.
    #[error("{what} holds {actual} numbers, must hold {expected}")]
    Length {
        what: &'static str,
        actual: usize,
        expected: usize,
    },
    /// An index points nowhere.
    #[error("{what} is {actual}, must be from 0 to {limit} exclusive")]
    Index {
        what: &'static str,
        actual: i64,
        limit: usize,
    },
}
