//! A request's work in the task of its client's connection.
//!
//! Between a worker's chunk and the client each task costs a wake-up and a turn of the scheduler.
//! So the work of a connection's request is no task of its own. The future that waits for its results
//! polls it. While the client does not read, no future waits for results; the connection's task then
//! polls the work, so that it always goes on. A request whose client is gone ends in a task of its own.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};

use tokio::runtime::Handle;

use crate::woken::Woken;

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

tokio::task_local! {
    /// Of the connection whose task runs.
    static PLACE: Arc<Place>;
}

/// Where a connection's task finds the work that it is to do.
#[derive(Default)]
struct Place(Mutex<Weak<Inner>>);

/// Work that the holder of this polls. Dropped before the work's end, it goes on as a task.
pub struct Attached {
    inner: Arc<Inner>,
    runtime: Handle,
}

struct Inner(Mutex<Running>);

struct Running {
    /// `None`: it has ended, or is a task now.
    work: Option<Work>,
    woken: Woken,
}

/// Runs a connection, and the work that is attached to it meanwhile.
pub async fn run<T>(connection: impl Future<Output = T>) -> T {
    let mut connection = pin!(connection);
    let place = Arc::new(Place::default());
    let both = poll_fn(|context| {
        let polled = connection.as_mut().poll(context);
        if polled.is_pending() {
            let inner = lock(&place.0).upgrade();
            if let Some(inner) = inner {
                let mut running = lock(&inner.0);
                // Otherwise the task that polled it last is still the one to be woken.
                if running.woken.is_set() {
                    let _ = running.poll(context);
                }
            }
        }
        polled
    });
    PLACE.scope(Arc::clone(&place), both).await
}

/// Attaches work to the connection whose task runs. Where there is none, or it has work already,
/// it becomes a task, and there is nothing to poll.
pub fn attach(work: impl Future<Output = ()> + Send + 'static) -> Option<Attached> {
    let mut work = Some(work);
    let attached = PLACE.try_with(|place| {
        let mut place = lock(&place.0);
        if place
            .upgrade()
            .is_some_and(|inner| lock(&inner.0).work.is_some())
        {
            return None;
        }
        let work: Work = Box::pin(work.take()?);
        let inner = Arc::new(Inner(Mutex::new(Running {
            work: Some(work),
            woken: Woken::new(),
        })));
        *place = Arc::downgrade(&inner);
        let runtime = Handle::current();
        Some(Attached { inner, runtime })
    });
    if let Some(work) = work {
        tokio::spawn(work);
    }
    attached.ok().flatten()
}

impl Attached {
    /// Goes on with the work, if something has happened that it waits for. Ready: it has ended, or
    /// is a task now.
    pub fn poll(&self, context: &Context<'_>) -> Poll<()> {
        lock(&self.inner.0).poll(context)
    }
}

impl Running {
    fn poll(&mut self, context: &Context<'_>) -> Poll<()> {
        let Some(work) = &mut self.work else {
            return Poll::Ready(());
        };
        let polled = self
            .woken
            .poll(context, |context| work.as_mut().poll(context));
        if polled.is_ready() {
            self.work = None;
        }
        polled
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if let Some(work) = lock(&self.inner.0).work.take() {
            self.runtime.spawn(work);
        }
    }
}

/// A panic elsewhere leaves it usable.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::time::Duration;

    use tokio::sync::{mpsc, oneshot};
    use tokio::task;
    use tokio::time::timeout;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    /// Work that passes what comes on, with the task that it ran in.
    fn passing_on() -> (
        mpsc::UnboundedSender<u32>,
        mpsc::UnboundedReceiver<(u32, task::Id)>,
        impl Future<Output = ()> + Send + 'static,
    ) {
        let (sender, mut from) = mpsc::unbounded_channel();
        let (to, receiver) = mpsc::unbounded_channel();
        let work = async move {
            while let Some(item) = from.recv().await {
                let _ = to.send((item, task::id()));
            }
        };
        (sender, receiver, work)
    }

    async fn next(receiver: &mut mpsc::UnboundedReceiver<(u32, task::Id)>) -> (u32, task::Id) {
        let item = timeout(LONG, receiver.recv()).await;
        item.expect("in time").expect("there is more")
    }

    #[tokio::test]
    async fn work_goes_on_in_its_connection_whether_it_is_polled_there_or_not() {
        let (sender, mut receiver, work) = passing_on();
        let (go, gone) = oneshot::channel();
        let connection = tokio::spawn(run(async move {
            let attached = attach(work).expect("it has a place");
            // Until something else is asked for, as an answer that is not read.
            let mut gone = pin!(gone);
            poll_fn(|context| gone.as_mut().poll(context))
                .await
                .unwrap();
            poll_fn(|context| {
                let _ = attached.poll(context);
                Poll::<()>::Pending
            })
            .await;
        }));
        sender.send(1).unwrap();
        assert_eq!(next(&mut receiver).await, (1, connection.id()));
        sender.send(2).unwrap();
        assert_eq!(next(&mut receiver).await, (2, connection.id()));
        go.send(()).unwrap();
        for item in 3..6 {
            sender.send(item).unwrap();
            assert_eq!(next(&mut receiver).await, (item, connection.id()));
        }
        connection.abort();
        // Its connection is gone.
        sender.send(6).unwrap();
        let (item, other) = next(&mut receiver).await;
        assert_eq!(item, 6);
        assert_ne!(other, connection.id());
        drop(sender);
        assert!(timeout(LONG, receiver.recv()).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_connection_has_one_place_and_elsewhere_work_is_a_task() {
        let (_first, _, work) = passing_on();
        let (second, mut from_second, other) = passing_on();
        let (third, mut from_third, last) = passing_on();
        let here = tokio::spawn(run(async move {
            let attached = attach(work);
            assert!(attached.is_some());
            assert!(attach(other).is_none());
            drop(attached);
            let _attached = attach(last).expect("the place is free again");
            pending::<()>().await;
        }));
        second.send(2).unwrap();
        assert_ne!(next(&mut from_second).await.1, here.id());
        third.send(3).unwrap();
        assert_eq!(next(&mut from_third).await, (3, here.id()));
        let (outside, mut from_outside, work) = passing_on();
        assert!(attach(work).is_none());
        outside.send(4).unwrap();
        assert_eq!(next(&mut from_outside).await.0, 4);
    }
}
