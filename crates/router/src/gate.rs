//! Who may come in: at most so many requests at a time, none while draining.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;

/// Counts requests from their acceptance to the end of their answer's body.
#[derive(Debug)]
pub struct Gate {
    draining: AtomicBool,
    permits: Arc<Semaphore>,
    limit: u32,
}

/// Held as long as the request lives.
#[derive(Debug)]
pub struct Permit {
    _permit: OwnedSemaphorePermit,
}

impl Gate {
    /// `limit`: requests that may run at once.
    pub fn new(limit: u32) -> Self {
        Self {
            draining: AtomicBool::new(false),
            permits: Arc::new(Semaphore::new(limit as usize)),
            limit,
        }
    }

    /// Lets a request in, or says why not.
    pub fn enter(&self) -> Result<Permit, ApiError> {
        if self.is_draining() {
            return Err(ApiError::Draining);
        }
        match Arc::clone(&self.permits).try_acquire_owned() {
            Ok(permit) => Ok(Permit { _permit: permit }),
            Err(_) => Err(ApiError::Busy {
                limit: self.limit as usize,
            }),
        }
    }

    /// From now on nobody enters.
    pub fn close(&self) {
        self.draining.store(true, Ordering::Release);
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
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
        let gate = Gate::new(1);
        let permit = gate.enter().unwrap();
        assert!(matches!(gate.enter(), Err(ApiError::Busy { limit: 1 })));
        gate.close();
        assert!(!gate.wait_empty(Duration::from_millis(1)).await);
        drop(permit);
        assert!(gate.wait_empty(Duration::from_secs(5)).await);
        assert!(matches!(gate.enter(), Err(ApiError::Draining)));
    }
}
