//! A deadline that moves with every token: one registered timer serves many of them, where
//! `tokio::time::timeout` registers one for each.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::time::{Sleep, sleep_until};

use crate::error::ApiError;
use crate::woken::Woken;

/// Goes off at a time that may be moved, or never.
pub struct Alarm {
    sleep: Pin<Box<Sleep>>,
    /// Whether `sleep` is to be looked at.
    woken: Woken,
    at: Option<Instant>,
    /// When `sleep` ends: at `at` or before it; `None`: it has ended.
    armed_for: Option<Instant>,
}

impl Alarm {
    pub fn new() -> Self {
        Self {
            sleep: Box::pin(sleep_until(Instant::now().into())),
            woken: Woken::new(),
            at: None,
            armed_for: None,
        }
    }

    /// When it goes off; `None`: never. True: it is to be waited for anew.
    pub fn set(&mut self, at: Option<Instant>) -> bool {
        let was_off = self.at.is_none();
        self.at = at;
        let Some(at) = at else {
            return false;
        };
        let is_early = self.armed_for.is_none_or(|armed| at < armed);
        if is_early {
            self.arm(at);
        }
        is_early || was_off
    }

    /// Whether the task that polled it last is woken when it goes off. Not so from the time it is
    /// armed, or its timer ends, until it is polled again.
    pub fn is_watched(&self) -> bool {
        self.at.is_none() || !self.woken.is_set()
    }

    /// Ready when it goes off.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        while let Some(at) = self.at {
            let sleep = self.sleep.as_mut();
            ready!(self.woken.poll(context, |context| sleep.poll(context)));
            self.armed_for = None;
            if Instant::now() >= at {
                return Poll::Ready(());
            }
            self.arm(at); // it was moved meanwhile
        }
        Poll::Pending
    }

    /// Waits for `work`; `None` when the alarm goes off first.
    pub async fn before<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = pin!(work);
        poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending => self.poll(context).map(|()| None),
        })
        .await
    }

    /// Waits for `work`; `None` when it takes longer than `limit`.
    pub async fn within<T>(
        &mut self,
        limit: Option<Duration>,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        self.set(limit.map(|limit| Instant::now() + limit));
        self.before(work).await
    }

    fn arm(&mut self, at: Instant) {
        self.sleep.as_mut().reset(at.into());
        self.woken.set();
        self.armed_for = Some(at);
    }
}

/// The deadline of one request as a whole, from the last byte of its body to the end of its answer.
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

    /// Whether the task that polled it last is woken when it passes.
    pub fn is_watched(&self) -> bool {
        self.alarm.is_watched()
    }

    /// Ready when it has passed.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<ApiError> {
        let late = ApiError::Deadline { limit: self.limit };
        self.alarm.poll(context).map(|()| late)
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use tokio::time::timeout;

    use super::*;

    const SHORT: Duration = Duration::from_millis(30);
    const LONG: Duration = Duration::from_secs(20);

    async fn rings_within(alarm: &mut Alarm, limit: Duration) -> bool {
        timeout(limit, poll_fn(|context| alarm.poll(context)))
            .await
            .is_ok()
    }

    #[tokio::test]
    async fn it_goes_off_when_it_was_set_last() {
        let mut alarm = Alarm::new();
        assert!(!rings_within(&mut alarm, SHORT).await, "it was not set");
        let start = Instant::now();
        // Later, earlier, and later again.
        for after in [1, 8, 2, 4] {
            alarm.set(Some(start + after * SHORT));
            assert!(!rings_within(&mut alarm, SHORT / 10).await);
        }
        assert!(rings_within(&mut alarm, LONG).await);
        assert!(start.elapsed() >= 4 * SHORT);
        // It stays ready after it went off, until it is set again.
        assert!(rings_within(&mut alarm, LONG).await);
        alarm.set(None);
        assert!(!rings_within(&mut alarm, SHORT).await);
        alarm.set(Some(Instant::now() + SHORT));
        assert!(rings_within(&mut alarm, LONG).await);
    }

    #[tokio::test]
    async fn it_is_watched_from_a_look_until_its_timer_ends() {
        let mut alarm = Alarm::new();
        assert!(alarm.is_watched(), "it never goes off");
        alarm.set(Some(Instant::now() + SHORT));
        assert!(!alarm.is_watched());
        assert!(!rings_within(&mut alarm, SHORT / 10).await);
        assert!(alarm.is_watched());
        tokio::time::sleep(2 * SHORT).await;
        // Its task was woken, and may not have looked at it.
        alarm.set(Some(Instant::now() + LONG));
        assert!(!alarm.is_watched());
        assert!(!rings_within(&mut alarm, SHORT / 10).await);
        assert!(alarm.is_watched());
        alarm.set(Some(Instant::now() + SHORT));
        assert!(!alarm.is_watched(), "earlier than its timer");
    }

    #[tokio::test]
    async fn work_is_waited_for_until_it_goes_off() {
        let mut alarm = Alarm::new();
        assert_eq!(alarm.before(ready(1)).await, Some(1));
        assert_eq!(alarm.within(Some(SHORT), pending::<()>()).await, None);
        // What is there is taken, however late.
        assert_eq!(alarm.before(ready(2)).await, Some(2));
        let start = Instant::now();
        assert_eq!(alarm.within(Some(LONG), ready(3)).await, Some(3));
        assert_eq!(alarm.within(Some(2 * SHORT), pending::<()>()).await, None);
        assert!(start.elapsed() >= 2 * SHORT);
        let without_end = alarm.within(None, pending::<()>());
        assert!(timeout(SHORT, without_end).await.is_err());
    }
}
