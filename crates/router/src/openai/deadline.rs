//! When a request has taken too long as a whole.

use std::time::{Duration, Instant};

use tokio::time::timeout_at;

use crate::error::ApiError;

/// Of one request, from the last byte of its body to the end of its answer.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    at: Instant,
    limit: Duration,
}

impl Deadline {
    pub fn after(begun: Instant, limit: Duration) -> Self {
        Self {
            at: begun + limit,
            limit,
        }
    }

    /// Waits for `work`, until the deadline.
    ///
    /// # Errors
    /// `Deadline` when that passes first.
    pub async fn limit<T>(&self, work: impl Future<Output = T>) -> Result<T, ApiError> {
        let limited = timeout_at(self.at.into(), work).await;
        limited.map_err(|_| ApiError::Deadline { limit: self.limit })
    }
}
