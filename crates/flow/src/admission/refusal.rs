//! Why a request is turned away.

use std::time::Duration;

/// The reason, with the numbers that led to it.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum RefusalReason {
    #[error(
        "its first token is expected after {expected:.2?}; the limit is {limit:.2?}: the \
         objective, or twice the time of its own prompt if that is longer, less a margin"
    )]
    TooLate { expected: Duration, limit: Duration },
    #[error("{waiting} sequences wait, and it has {asked}; the limit is {limit}")]
    Sequences {
        waiting: u64,
        asked: u64,
        limit: u64,
    },
    #[error("{waiting} prompt tokens wait, and it has {asked}; the limit is {limit}")]
    Tokens {
        waiting: u64,
        asked: u64,
        limit: u64,
    },
    #[error("it has waited for {waited:.1?}; the limit is {limit:.1?}")]
    Waited { waited: Duration, limit: Duration },
}

impl RefusalReason {
    /// The word used in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TooLate { .. } => "too_late",
            Self::Sequences { .. } => "sequences",
            Self::Tokens { .. } => "tokens",
            Self::Waited { .. } => "waited",
        }
    }
}

/// A request is turned away.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Refusal {
    pub reason: RefusalReason,
    /// Requests before it in the queue.
    pub ahead: usize,
    /// At least half of the work before it is its tenant's own, and others wait too.
    pub over_share: bool,
    /// When a retry may find room.
    pub retry_after: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_request_names_its_limit_so_that_it_differs() {
        let expected = Duration::from_millis(1520);
        let limit = Duration::from_millis(1480); // of an objective of 400 ms
        let says = RefusalReason::TooLate { expected, limit }.to_string();
        assert!(says.contains("1.52s") && says.contains("1.48s"), "{says}");
        assert!(says.contains("twice"), "{says}");
    }
}
