//! A part of a task that is polled only when its own waker was used.
//!
//! A task is woken for one of its parts, and polling the others costs as much. Here each part
//! has a waker of its own, which remembers that it was used and wakes the task.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use futures::task::{ArcWake, AtomicWaker, waker};

/// Whether a part is to be polled. In the beginning it is.
pub struct Woken {
    signal: Arc<Signal>,
    waker: Waker,
}

struct Signal {
    is_woken: AtomicBool,
    /// The task that polled the part last.
    task: AtomicWaker,
}

impl ArcWake for Signal {
    fn wake_by_ref(signal: &Arc<Self>) {
        signal.is_woken.store(true, Ordering::Release);
        signal.task.wake();
    }
}

impl Woken {
    pub fn new() -> Self {
        let signal = Arc::new(Signal {
            is_woken: AtomicBool::new(true),
            task: AtomicWaker::new(),
        });
        let waker = waker(Arc::clone(&signal));
        Self { signal, waker }
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
        &self,
        context: &Context<'_>,
        part: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        // Before the look: what wakes the part after it wakes this task.
        self.signal.task.register(context.waker());
        if !self.signal.is_woken.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        let polled = part(&mut Context::from_waker(&self.waker));
        if polled.is_ready() {
            self.set();
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures::task::noop_waker;
    use tokio::sync::mpsc;

    use super::*;

    #[test]
    fn a_part_is_polled_at_first_when_it_is_woken_and_after_it_was_ready() {
        let task = noop_waker();
        let context = Context::from_waker(&task);
        let (sender, mut receiver) = mpsc::unbounded_channel();
        let (woken, polls) = (Woken::new(), Cell::new(0));
        let mut poll = || {
            woken.poll(&context, |context| {
                polls.set(polls.get() + 1);
                receiver.poll_recv(context)
            })
        };
        assert_eq!((poll(), polls.get()), (Poll::Pending, 1));
        assert_eq!((poll(), polls.get()), (Poll::Pending, 1));
        sender.send('a').unwrap();
        sender.send('b').unwrap();
        assert_eq!((poll(), polls.get()), (Poll::Ready(Some('a')), 2));
        assert_eq!((poll(), polls.get()), (Poll::Ready(Some('b')), 3));
        assert_eq!((poll(), polls.get()), (Poll::Pending, 4));
        assert_eq!((poll(), polls.get()), (Poll::Pending, 4));
        woken.set();
        assert_eq!((poll(), polls.get()), (Poll::Pending, 5));
    }

    #[tokio::test]
    async fn the_task_that_polled_last_is_woken() {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let woken = Woken::new();
        let mut receiver = std::pin::pin!(receiver);
        let first = noop_waker();
        let poll = |context: &Context<'_>, receiver: std::pin::Pin<&mut _>| {
            woken.poll(context, |context| Future::poll(receiver, context))
        };
        let looked = poll(&Context::from_waker(&first), receiver.as_mut());
        assert!(looked.is_pending());
        tokio::spawn(async move { sender.send(7) });
        let got = std::future::poll_fn(|context| poll(context, receiver.as_mut()));
        assert_eq!(got.await, Ok(7));
    }
}
