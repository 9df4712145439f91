//! A deadline that moves with every token: one registered timer serves many of them, where
//! `tokio::time::timeout` registers one for each.

use std::future::pending;
use std::pin::Pin;
use std::time::{Duration, Instant};

use tokio::time::{Sleep, sleep_until};

/// Goes off at a time that may be moved, or never.
pub struct Alarm {
    sleep: Pin<Box<Sleep>>,
    at: Option<Instant>,
    /// When `sleep` ends: at `at` or before it; `None`: it has ended.
    armed_for: Option<Instant>,
}

impl Alarm {
    pub fn new() -> Self {
        Self {
            sleep: Box::pin(sleep_until(Instant::now().into())),
            at: None,
            armed_for: None,
        }
    }

    /// When it goes off; `None`: never.
    pub fn set(&mut self, at: Option<Instant>) {
        self.at = at;
        if let Some(at) = at
            && self.armed_for.is_none_or(|armed| at < armed)
        {
            self.arm(at);
        }
    }

    /// Waits until it goes off. May be dropped and called again.
    pub async fn rings(&mut self) {
        while let Some(at) = self.at {
            self.sleep.as_mut().await;
            self.armed_for = None;
            if Instant::now() >= at {
                return;
            }
            self.arm(at); // it was moved meanwhile
        }
        pending().await
    }

    /// Waits for `work`; `None` when the alarm goes off first.
    pub async fn before<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            done = work => Some(done),
            () = self.rings() => None,
        }
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
        self.armed_for = Some(at);
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use tokio::time::timeout;

    use super::*;

    const SHORT: Duration = Duration::from_millis(30);
    const LONG: Duration = Duration::from_secs(20);

    async fn rings_within(alarm: &mut Alarm, limit: Duration) -> bool {
        timeout(limit, alarm.rings()).await.is_ok()
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
        // What has passed is told again, until it is set anew.
        assert!(rings_within(&mut alarm, LONG).await);
        alarm.set(None);
        assert!(!rings_within(&mut alarm, SHORT).await);
        alarm.set(Some(Instant::now() + SHORT));
        assert!(rings_within(&mut alarm, LONG).await);
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
