//! Waking up on time. Tokio's timer counts whole milliseconds and rounds up;
//! at 1,000 requests a second that would be the error to measure. On Linux the
//! kernel's own timer tells the event loop, within microseconds.

use tokio::time::{Instant, sleep_until};

/// Waits for moments.
#[derive(Debug)]
pub enum Pacer {
    #[cfg(target_os = "linux")]
    Kernel(kernel::Timer),
    /// Tokio's timer, whose clock tests can stop.
    Tokio,
}

impl Pacer {
    /// The best that this system has. Must be called inside a runtime.
    pub fn precise() -> Self {
        #[cfg(target_os = "linux")]
        if let Ok(timer) = kernel::Timer::new() {
            return Self::Kernel(timer);
        }
        Self::Tokio
    }

    /// Returns at `at`, at once if that is past. May be dropped and called again.
    pub async fn until(&self, at: Instant) {
        match self {
            #[cfg(target_os = "linux")]
            Self::Kernel(timer) => {
                if timer.until(at).await.is_err() {
                    sleep_until(at).await;
                }
            }
            Self::Tokio => sleep_until(at).await,
        }
    }
}

#[cfg(target_os = "linux")]
mod kernel {
    use std::io;
    use std::os::fd::OwnedFd;

    use rustix::time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    };
    use tokio::io::unix::AsyncFd;
    use tokio::time::Instant;

    /// A timer of the kernel's as a file that becomes readable.
    #[derive(Debug)]
    pub struct Timer(AsyncFd<OwnedFd>);

    impl Timer {
        pub fn new() -> io::Result<Self> {
            let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
            let file = timerfd_create(TimerfdClockId::Monotonic, flags)?;
            // `register` needs an unsafe block, for types that may lose their
            // file meanwhile; an owned one cannot.
            #[allow(deprecated)]
            let file = AsyncFd::new(file)?;
            Ok(Self(file))
        }

        pub async fn until(&self, at: Instant) -> io::Result<()> {
            loop {
                let left = at.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Ok(());
                }
                let spec = Itimerspec {
                    it_interval: Timespec {
                        tv_sec: 0,
                        tv_nsec: 0,
                    },
                    it_value: Timespec {
                        tv_sec: left.as_secs() as i64,
                        tv_nsec: left.subsec_nanos().into(),
                    },
                };
                // Also takes back an expiry that nobody waited for.
                timerfd_settime(self.0.get_ref(), TimerfdTimerFlags::empty(), &spec)?;
                self.0.readable().await?.clear_ready();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn never_early_and_again_after_being_dropped() {
        let pacer = Pacer::precise();
        let soon = Instant::now() + Duration::from_millis(3);
        let far = pacer.until(soon + Duration::from_secs(3600));
        tokio::select! {
            () = far => panic!("an hour too early"),
            () = sleep_until(soon) => {}
        }
        for _ in 0..20 {
            let at = Instant::now() + Duration::from_micros(300);
            pacer.until(at).await;
            assert!(Instant::now() >= at);
        }
        pacer.until(soon).await; // long past
    }
}
