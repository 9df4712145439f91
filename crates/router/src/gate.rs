//! Which requests may run: a limited number of sequences at a time, none while draining.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;

/// Open, to the end of the router's life.
const OPEN: u8 = 0;
/// Requests still come in, but readiness is off so that no more are sent.
const LEAVING: u8 = 1;
const DRAINING: u8 = 2;

/// Counts sequences (`n` times prompts) from their acceptance to the end of their
/// answer's body.
#[derive(Debug)]
pub struct Gate {
    phase: AtomicU8,
    permits: Arc<Semaphore>,
    limit: u32,
}

/// Held as long as the request lives.
#[derive(Debug)]
pub struct Permit {
    _permit: OwnedSemaphorePermit,
}

impl Gate {
    /// `limit`: sequences that may run at once.
    pub fn new(limit: u32) -> Self {
        Self {
            phase: AtomicU8::new(OPEN),
            permits: Arc::new(Semaphore::new(limit as usize)),
            limit,
        }
    }

    /// Refuses early what [`Gate::enter`] would refuse in any case.
    ///
    /// # Errors
    /// `Draining`, or `Busy` when nothing at all may come in.
    pub fn check_open(&self) -> Result<(), ApiError> {
        if self.phase() == DRAINING {
            return Err(ApiError::Draining);
        }
        match self.permits.available_permits() {
            0 => Err(self.busy(1)),
            _ => Ok(()),
        }
    }

    /// Lets a request of so many sequences in.
    ///
    /// # Errors
    /// `Draining`; `Busy` when too many run; `Invalid` when it could never run.
    pub fn enter(&self, sequences: usize) -> Result<Permit, ApiError> {
        let limit = self.limit;
        let asked = u32::try_from(sequences).unwrap_or(u32::MAX);
        if asked > limit {
            return Err(ApiError::invalid(
                "n",
                format!(
                    "n times the number of prompts is {asked}; the limit is {limit} \
                     (--max-concurrent-requests). Send several requests instead."
                ),
            ));
        }
        if self.phase() == DRAINING {
            return Err(ApiError::Draining);
        }
        match Arc::clone(&self.permits).try_acquire_many_owned(asked) {
            Ok(permit) => Ok(Permit { _permit: permit }),
            Err(_) => Err(self.busy(sequences)),
        }
    }

    fn busy(&self, asked: usize) -> ApiError {
        let limit = self.limit as usize;
        ApiError::Busy {
            asked,
            running: limit - self.permits.available_permits(),
            limit,
        }
    }

    /// From now on readiness is off; requests still come in.
    pub fn leave(&self) {
        self.phase.fetch_max(LEAVING, Ordering::AcqRel);
    }

    /// From now on no request comes in.
    pub fn close(&self) {
        self.phase.store(DRAINING, Ordering::Release);
    }

    /// # Errors
    /// `Draining` once [`Gate::leave`] or [`Gate::close`] was called.
    pub fn check_ready(&self) -> Result<(), ApiError> {
        match self.phase() {
            OPEN => Ok(()),
            _ => Err(ApiError::Draining),
        }
    }

    fn phase(&self) -> u8 {
        self.phase.load(Ordering::Acquire)
    }

    /// Waits until all who entered have left. Returns whether they did in time.
    pub async fn wait_empty(&self, deadline: Duration) -> bool {
        let all = self.permits.acquire_many(self.limit);
        tokio::time::timeout(deadline, all).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn turns_away_beyond_the_limit_and_while_draining() {
        let gate = Gate::new(4);
        let permit = gate.enter(3).unwrap();
        let busy = gate.enter(2).unwrap_err().to_string();
        assert!(busy.contains("3 sequences are running"), "{busy}");
        assert!(
            busy.contains("limit is 4") && busy.contains("has 2"),
            "{busy}"
        );
        let never = gate.enter(5).unwrap_err();
        assert_eq!(never.status(), axum::http::StatusCode::BAD_REQUEST);
        let last = gate.enter(1).unwrap();
        assert!(matches!(gate.check_open(), Err(ApiError::Busy { .. })));
        drop(last);
        gate.leave();
        assert!(gate.check_ready().is_err());
        drop(gate.enter(1).expect("it still serves"));
        gate.close();
        assert!(matches!(gate.enter(1), Err(ApiError::Draining)));
        assert!(!gate.wait_empty(Duration::from_millis(1)).await);
        drop(permit);
        assert!(gate.wait_empty(Duration::from_secs(5)).await);
    }
}
