//! A part of a task that is polled only when its own waker was used.
//!
//! A task is woken for one of its parts, and polling the others costs as much. Here each part
//! has a waker of its own, which remembers that it was used and wakes the task.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures::task::{ArcWake, waker};

/// Whether a part is to be polled. In the beginning it is.
pub struct Woken {
    signal: Arc<Signal>,
    waker: Waker,
    /// The signal's task. It seldom changes, so most polls take no lock.
    task: Option<Waker>,
}

struct Signal {
    is_woken: AtomicBool,
    /// The task that polled the part last.
    task: Mutex<Option<Waker>>,
}

impl Signal {
    fn task(&self) -> MutexGuard<'_, Option<Waker>> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ArcWake for Signal {
    fn wake_by_ref(signal: &Arc<Self>) {
        signal.is_woken.store(true, Ordering::Release);
        if let Some(task) = &*signal.task() {
            task.wake_by_ref();
        }
    }
}

impl Woken {
    pub fn new() -> Self {
        let signal = Arc::new(Signal {
            is_woken: AtomicBool::new(true),
            task: Mutex::new(None),
        });
        let waker = waker(Arc::clone(&signal));
        Self {
            signal,
            waker,
            task: None,
        }
    }

    /// The part is to be polled the next time. The task is not woken for it.
    pub fn set(&self) {
        self.signal.is_woken.store(true, Ordering::Release);
    }

    /// Whether it is to be polled the next time.
    pub fn is_set(&self) -> bool {
        self.signal.is_woken.load(Ordering::Acquire)
    }

    /// Polls the part if it was woken. One that is ready is polled the next time too: it may
    /// have more.
    pub fn poll<T>(
        &mut self,
        context: &Context<'_>,
        part: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let polled = self.poll_once(context, part);
        if polled.is_ready() {
            self.set();
        }
        polled
    }

    /// The same, but that one that is ready is polled the next time only if it was woken again.
    pub fn poll_once<T>(
        &mut self,
        context: &Context<'_>,
        part: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        // Before the look: what wakes the part after it wakes this task.
        self.register(context.waker());
        if !self.is_set() || !self.signal.is_woken.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        part(&mut Context::from_waker(&self.waker))
    }

    fn register(&mut self, task: &Waker) {
        if self
            .task
            .as_ref()
            .is_some_and(|known| known.will_wake(task))
        {
            return;
        }
        self.task = Some(task.clone());
        // The one before is dropped without the lock: its task may end with it.
        let _before = self.signal.task().replace(task.clone());
    }
}

#[cfg(test)]
mod tests {
    use futures::task::noop_waker;
    use tokio::sync::mpsc;

    use super::*;
    use crate::workers::testing::soon;

    #[test]
    fn a_part_is_polled_at_first_when_it_is_woken_and_after_it_was_ready() {
        let task = noop_waker();
        let context = Context::from_waker(&task);
        let (sender, mut receiver) = mpsc::unbounded_channel();
        let (mut woken, mut polls) = (Woken::new(), 0);
        let mut poll = |woken: &mut Woken, once: bool| {
            let part = |context: &mut Context<'_>| {
                polls += 1;
                receiver.poll_recv(context)
            };
            let polled = match once {
                true => woken.poll_once(&context, part),
                false => woken.poll(&context, part),
            };
            (polled, polls)
        };
        assert_eq!(poll(&mut woken, false), (Poll::Pending, 1));
        assert_eq!(poll(&mut woken, false), (Poll::Pending, 1));
        sender.send('a').unwrap();
        sender.send('b').unwrap();
        assert_eq!(poll(&mut woken, false), (Poll::Ready(Some('a')), 2));
        assert_eq!(poll(&mut woken, false), (Poll::Ready(Some('b')), 3));
        assert_eq!(poll(&mut woken, false), (Poll::Pending, 4));
        assert_eq!(poll(&mut woken, false), (Poll::Pending, 4));
        woken.set();
        assert_eq!(poll(&mut woken, false), (Poll::Pending, 5));
        sender.send('c').unwrap();
        assert_eq!(poll(&mut woken, true), (Poll::Ready(Some('c')), 6));
        assert_eq!(poll(&mut woken, true), (Poll::Pending, 6));
    }

    #[tokio::test]
    async fn the_task_that_polled_last_is_woken() {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let mut woken = Woken::new();
        let mut receiver = std::pin::pin!(receiver);
        let first = noop_waker();
        let mut poll = |context: &Context<'_>, receiver: std::pin::Pin<&mut _>| {
            woken.poll(context, |context| Future::poll(receiver, context))
        };
        let looked = poll(&Context::from_waker(&first), receiver.as_mut());
        assert!(looked.is_pending());
        tokio::spawn(async move { sender.send(7) });
        let got = std::future::poll_fn(|context| poll(context, receiver.as_mut()));
        assert_eq!(soon("the task", got).await, Ok(7));
    }
}
