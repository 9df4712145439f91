//! When a request has taken too long as a whole.

use std::time::{Duration, Instant};

use crate::alarm::Alarm;
use crate::error::ApiError;

/// Of one request, from the last byte of its body to the end of its answer.
pub struct Deadline {
    alarm: Alarm,
    limit: Duration,
}

impl Deadline {
    pub fn after(begun: Instant, limit: Duration) -> Self {
        let mut alarm = Alarm::new();
        alarm.set(Some(begun + limit));
        Self { alarm, limit }
    }

    /// Waits for `work`, until the deadline.
    ///
    /// # Errors
    /// `Deadline` when that passes first.
    pub async fn limit<T>(&mut self, work: impl Future<Output = T>) -> Result<T, ApiError> {
        let limit = self.limit;
        let done = self.alarm.before(work).await;
        done.ok_or(ApiError::Deadline { limit })
    }
}
