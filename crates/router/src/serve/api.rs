//! The border between HTTP (text) and serving (tokens).
//!
//! `openai/` turns a client's request into [`Generation`]s and the [`Event`]s of
//! each back into text. `serve/` turns a [`Generation`] into legs on workers.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use tasuki_flow::fleet::NotReady;
use tasuki_reqlog::Outcome;
use tokio::sync::mpsc;

use super::events::EventReceiver;
use super::meter::Ending;
use crate::attached::Attached;
use crate::traces::Trace;

pub use tasuki_flow::{Event, Finish, Generation, ServeError, Timings};

/// How a request ends that fails so.
pub fn outcome_of(error: &ServeError) -> Outcome {
    match error {
        ServeError::Unavailable { .. } => Outcome::Unavailable,
        ServeError::Overloaded { .. } => Outcome::Refused,
        ServeError::Rejected { .. } | ServeError::Answered(_) => Outcome::Rejected,
        ServeError::Failed { .. } => Outcome::Failed,
    }
}

/// What a client's request has to do with a generation of it besides its content.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// When the whole of the request was there.
    pub received: Instant,
    pub trace: Option<Trace>,
}

impl From<Instant> for Arrival {
    /// Of a request that is not traced.
    fn from(received: Instant) -> Self {
        let trace = None;
        Self { received, trace }
    }
}

/// The events of one generation. Dropping it aborts what is left.
pub struct Generating {
    pub(crate) events: EventReceiver,
    pub(crate) stop: mpsc::UnboundedSender<u32>,
    pub(crate) account: Arc<Account>,
    /// The last to be dropped: it then sees that the client is gone. `None`: a task does it.
    pub(crate) work: Option<Attached>,
}

/// What the access log needs to know of a generation that has not ended: its workers, and why
/// they were chosen. Its task writes it at each dispatch.
#[derive(Default)]
pub struct Account {
    timings: Mutex<Timings>,
    last: Mutex<Last>,
}

/// How a generation ended whose answer may go on as another one.
#[derive(Default)]
struct Last {
    goes_on: bool,
    /// Counted with the account's end.
    ending: Option<Ending>,
}

impl Account {
    pub fn write(&self, timings: &Timings) {
        *lock(&self.timings) = timings.clone();
    }

    pub fn read(&self) -> Timings {
        lock(&self.timings).clone()
    }

    /// The generation has failed. That counts unless its answer goes on.
    pub fn keep(&self, ending: Ending) {
        let mut last = lock(&self.last);
        if last.goes_on {
            ending.forget();
        } else {
            last.ending = Some(ending);
        }
    }

    /// Another generation goes on with its answer, and counts for both.
    pub fn goes_on(&self) {
        let mut last = lock(&self.last);
        last.goes_on = true;
        if let Some(ending) = last.ending.take() {
            ending.forget();
        }
    }
}

/// A panic elsewhere leaves it usable.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Generating {
    /// The next event; `None` after `Done` or `Failed`.
    pub async fn next(&mut self) -> Option<Event> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// The same.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.events.poll(self.work.as_ref(), context)
    }

    /// Ends one choice early: a stop string was found in its text. Its further
    /// tokens may still arrive and are to be ignored; `Done` follows as usual.
    pub fn stop(&self, choice: u32) {
        let _ = self.stop.send(choice);
    }
}

/// Why new requests should not come now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unready {
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error(transparent)]
    Workers(#[from] NotReady),
}

/// What the workers that are up agree on.
#[derive(Debug, Clone)]
pub struct ModelLimits {
    /// Prompt plus output, in tokens: the largest that some worker takes.
    pub max_model_len: u32,
    /// The same, of the worker that takes least: what any two workers can share.
    pub common_len: u32,
    pub vocab_size: u32,
}
