//! What a request's task waits for besides the legs that it runs itself: all of it seldom, where
//! those bring each token, so it is polled only when something of it has happened.

use std::future::pending;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use futures::FutureExt;
use futures::future::BoxFuture;
use tasuki_flow::Input;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;

use super::driver::ClientEnds;
use crate::alarm::Alarm;
use crate::woken::Woken;

pub struct Others {
    woken: Woken,
    /// The client is gone, or running requests are to end. Never again once it was ready.
    end: futures::future::Fuse<BoxFuture<'static, Input>>,
    /// `None`: no choice can be stopped any more.
    stops: Option<UnboundedReceiver<u32>>,
    inbox: UnboundedReceiver<Input>,
    /// Ready when workers have changed.
    change: BoxFuture<'static, watch::Receiver<u64>>,
    deadline: Alarm,
}

impl Others {
    pub fn new(
        client: ClientEnds,
        cancel: watch::Receiver<bool>,
        changes: watch::Receiver<u64>,
        inbox: UnboundedReceiver<Input>,
    ) -> Self {
        let end = async move {
            tokio::select! {
                biased;
                () = client.events.closed() => Input::HangUp,
                () = cancelled(cancel) => Input::Cancel,
            }
        };
        Self {
            woken: Woken::new(),
            end: end.boxed().fuse(),
            stops: Some(client.stop),
            inbox,
            change: next_change(changes).boxed(),
            deadline: Alarm::new(),
        }
    }

    /// When to bring [`Input::Tick`].
    pub fn set_deadline(&mut self, at: Option<Instant>) {
        if self.deadline.set(at) {
            self.woken.set();
        }
    }

    /// The next input.
    pub fn poll(&mut self, context: &Context<'_>) -> Poll<Input> {
        let Self {
            woken,
            end,
            stops,
            inbox,
            change,
            deadline,
        } = self;
        woken.poll(context, |context| {
            if let Poll::Ready(input) = Pin::new(end).poll(context) {
                return Poll::Ready(input);
            }
            if let Some(open) = stops
                && let Poll::Ready(choice) = open.poll_recv(context)
            {
                match choice {
                    Some(choice) => return Poll::Ready(Input::Stop(choice)),
                    None => *stops = None,
                }
            }
            if let Poll::Ready(Some(input)) = inbox.poll_recv(context) {
                return Poll::Ready(input);
            }
            if let Poll::Ready(changes) = change.as_mut().poll(context) {
                *change = next_change(changes).boxed();
                return Poll::Ready(Input::WorkersChanged);
            }
            deadline.poll(context).map(|()| Input::Tick)
        })
    }
}

/// Waits until running requests are to end; forever once the sender is gone.
async fn cancelled(mut cancel: watch::Receiver<bool>) {
    if cancel.wait_for(|&cancel| cancel).await.is_err() {
        pending().await
    }
}

/// Waits until workers change; forever once the sender is gone.
async fn next_change(mut changes: watch::Receiver<u64>) -> watch::Receiver<u64> {
    match changes.changed().await {
        Ok(()) => changes,
        Err(_) => pending().await,
    }
}
