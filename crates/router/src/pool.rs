//! The processors' share for work on request bodies: parsing, templates, tokenizing.
//!
//! That work never runs on the event loop, where everybody's tokens would wait for it.
//! It runs in lanes, so that large bodies do not delay small ones, and `/tokenize` does
//! not delay requests that generate. The lanes together have as many threads as there
//! are processors (at least one each), and a lane's queue is limited.

use std::num::NonZero;
use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use crate::error::ApiError;

/// Bodies beyond this take up to seconds.
const LARGE_BYTES: usize = 128 << 10;
/// Bodies that may wait in a lane, large or for the tokenizing endpoints.
const BULK_QUEUE: usize = 256;

/// The lanes.
#[derive(Debug)]
pub struct Pool {
    prompts: Lane,
    large_prompts: Lane,
    text: Lane,
}

/// What the work is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A request that generates, with a body of so many bytes.
    Prompt { bytes: usize },
    /// `/tokenize` and `/detokenize`.
    Text,
}

#[derive(Debug)]
struct Lane {
    threads: Arc<Semaphore>,
    /// For each body that waits or is worked on.
    places: Arc<Semaphore>,
    limit: usize,
}

impl Pool {
    /// `queue`: small prompts that may wait.
    pub fn new(queue: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        Self {
            prompts: Lane::new(cores / 2, queue),
            large_prompts: Lane::new(cores / 4, BULK_QUEUE),
            text: Lane::new(cores / 4, BULK_QUEUE),
        }
    }

    /// Runs `work` on a thread of its lane. It is not begun when the caller has left
    /// before its turn.
    ///
    /// # Errors
    /// `Crowded` when the lane's queue is full; those of `work`; `Failed` if it panics.
    pub async fn run<T: Send + 'static>(
        &self,
        purpose: Purpose,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let lane = match purpose {
            Purpose::Prompt { bytes } if bytes <= LARGE_BYTES => &self.prompts,
            Purpose::Prompt { .. } => &self.large_prompts,
            Purpose::Text => &self.text,
        };
        let place = Arc::clone(&lane.places).try_acquire_owned();
        let place = place.map_err(|_| lane.full())?;
        let thread = Arc::clone(&lane.threads).acquire_owned().await;
        spawn_blocking(move || {
            // Here, as the work goes on when the client has hung up.
            let _held = (place, thread);
            work()
        })
        .await
        .unwrap_or_else(|_| {
            tracing::error!("work on a request body panicked");
            Err(ApiError::Failed("The request could not be read.".into()))
        })
    }
}

impl Lane {
    fn new(threads: usize, limit: usize) -> Self {
        Self {
            threads: Arc::new(Semaphore::new(threads.max(1))),
            places: Arc::new(Semaphore::new(limit)),
            limit,
        }
    }

    fn full(&self) -> ApiError {
        ApiError::Crowded {
            what: "Requests that wait to be tokenized:",
            used: self.limit - self.places.available_permits(),
            limit: self.limit,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const SMALL: Purpose = Purpose::Prompt { bytes: 10 };

    /// Occupies a lane until the sender is dropped.
    fn occupy(pool: &Arc<Pool>, purpose: Purpose) -> mpsc::Sender<()> {
        let (release, released) = mpsc::channel::<()>();
        let pool = Arc::clone(pool);
        tokio::spawn(async move {
            let work = move || {
                let _ = released.recv();
                Ok(())
            };
            pool.run(purpose, work).await
        });
        release
    }

    #[tokio::test]
    async fn a_full_lane_refuses_and_does_not_delay_the_others() {
        let pool = Arc::new(Pool::new(BULK_QUEUE));
        let held: Vec<_> = (0..BULK_QUEUE)
            .map(|_| occupy(&pool, Purpose::Text))
            .collect();
        let full = async {
            while pool.text.places.available_permits() > 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), full)
            .await
            .unwrap();
        let refused = pool.run(Purpose::Text, || Ok(())).await.unwrap_err();
        assert!(
            refused.to_string().contains("256; the limit is 256"),
            "{refused}"
        );
        let other = tokio::time::timeout(Duration::from_secs(20), pool.run(SMALL, || Ok(1)));
        assert_eq!(other.await.unwrap().unwrap(), 1);
        drop(held);
    }

    #[tokio::test]
    async fn a_panic_is_an_error_and_gives_the_thread_back() {
        let pool = Pool::new(1);
        for _ in 0..3 {
            let failed = pool.run(SMALL, || -> Result<(), _> { panic!("planted") });
            assert!(matches!(failed.await, Err(ApiError::Failed(_))));
        }
        assert!(pool.run(SMALL, || Ok(())).await.is_ok());
    }
}
