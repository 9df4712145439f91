//! An answer as server-sent events: chunks, then the usage if asked for, then
//! `[DONE]`; a failure is an `error` event and the end.
//!
//! A client that stops reading is not asked for by anybody: between two events
//! the request lies in a [`Shelf`], from where it is taken and aborted when that
//! takes too long.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use axum::body::Bytes;
use futures::Stream;
use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::outputs::Output;
use super::running::Running;
use super::shape::{Envelope, Shape};
use super::usage::timings_json;
use crate::error::ApiError;
use crate::serve::api::ServeError;

type Next = Option<Result<Output, ServeError>>;

/// The client read nothing for too long; its connection is to be cut.
#[derive(Debug, thiserror::Error)]
#[error("the client did not read its stream for {0:?}")]
pub struct Stalled(Duration);

/// The events of a request whose first output is there already. The request
/// is aborted when the stream is dropped, or not read for as long as `patience`.
pub fn events<S: Shape>(
    running: Running<S>,
    first: Next,
    patience: Duration,
) -> impl Stream<Item = Result<Bytes, Stalled>> + Send {
    let shelf = Arc::new(Shelf::default());
    shelf.put(State {
        running,
        first: Some(first),
        ended: false,
    });
    let mut watcher = JoinSet::new(); // ends with the stream, not with its patience
    watcher.spawn(watch(Arc::downgrade(&shelf), patience));
    futures::stream::try_unfold((shelf, watcher), move |(shelf, watcher)| async move {
        let mut state = shelf.take().ok_or(Stalled(patience))?;
        let frames = state.frames().await;
        Ok(frames.map(|frames| {
            shelf.put(state);
            (frames, (shelf, watcher))
        }))
    })
}

/// A request between two events, and since when it waits to be asked for more.
struct Shelf<S>(Mutex<Option<(State<S>, Instant)>>);

impl<S> Default for Shelf<S> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<S> Shelf<S> {
    fn put(&self, state: State<S>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((state, Instant::now()));
    }

    fn take(&self) -> Option<State<S>> {
        let taken = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        taken.map(|(state, _)| state)
    }

    /// When the client will have been too slow, if it asks for nothing; `None`: it waits for us.
    fn due(&self, patience: Duration) -> Option<Instant> {
        let lying = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lying.as_ref().map(|(_, since)| *since + patience)
    }
}

/// Gives the request up once its client has been too slow; ends with the stream.
async fn watch<S: Shape>(shelf: Weak<Shelf<S>>, patience: Duration) {
    loop {
        let Some(due) = shelf.upgrade().map(|shelf| shelf.due(patience)) else {
            return;
        };
        let now = Instant::now();
        if due.is_some_and(|due| due <= now) {
            if let Some(mut state) = shelf.upgrade().and_then(|shelf| shelf.take()) {
                state.running.log.outcome = "stalled";
            }
            return;
        }
        sleep(due.map_or(patience, |due| due - now)).await;
    }
}

struct State<S> {
    running: Running<S>,
    first: Option<Next>,
    ended: bool,
}

impl<S: Shape> State<S> {
    /// The next bytes of the body, never none before its end.
    async fn frames(&mut self) -> Option<Bytes> {
        if self.ended {
            return None;
        }
        let mut frames = Frames::default();
        let mut next = match self.first.take() {
            Some(first) => {
                self.open(&mut frames);
                first
            }
            None => self.running.outputs.next().await,
        };
        loop {
            match next {
                Some(Ok(output)) => self.output(output, &mut frames),
                Some(Err(error)) => self.fail(error, &mut frames),
                None => self.close(&mut frames),
            }
            if !frames.0.is_empty() {
                return Some(frames.0.into());
            }
            next = self.running.outputs.next().await;
        }
    }

    fn open(&self, frames: &mut Frames) {
        for index in 0..self.running.outputs.choices() {
            if let Some(chunk) = self.running.shape.opening(index) {
                let mut envelope = self.envelope(vec![chunk]);
                if index == 0 {
                    envelope.prompt_token_ids = self.running.prompt_ids(0, S::PROMPT_IDS_ON_TOP);
                }
                frames.event(&envelope);
            }
        }
    }

    fn output(&self, output: Output, frames: &mut Frames) {
        let Output {
            index,
            first,
            piece,
        } = output;
        let prompt_ids = self
            .running
            .prompt_ids(index, first && !S::PROMPT_IDS_ON_TOP);
        for chunk in self.running.shape.chunks(index, piece, prompt_ids) {
            let mut envelope = self.envelope(vec![chunk]);
            if self.running.delivery.continuous_usage {
                envelope.usage = Some(Some(self.running.outputs.summary().usage));
            }
            frames.event(&envelope);
        }
    }

    fn fail(&mut self, error: ServeError, frames: &mut Frames) {
        self.ended = true;
        self.running.log.outcome = "failed";
        frames.0.extend_from_slice(b"event: error\n");
        frames.event(&ApiError::from(error).body());
    }

    fn close(&mut self, frames: &mut Frames) {
        self.ended = true;
        self.running.log.outcome = "finished";
        if self.running.delivery.include_usage {
            let summary = self.running.outputs.summary();
            let mut envelope = self.envelope(Vec::new());
            envelope.usage = Some(Some(summary.usage));
            envelope.timings = Some(timings_json(&summary.timings));
            frames.event(&envelope);
        }
        frames.0.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn envelope(&self, choices: Vec<S::Chunk>) -> Envelope<'_, S::Chunk> {
        let mut envelope = self.running.identity.envelope(S::CHUNK_OBJECT, choices);
        envelope.usage = self.running.delivery.include_usage.then_some(None);
        envelope
    }
}

/// Events, written one after another.
#[derive(Default)]
struct Frames(Vec<u8>);

impl Frames {
    /// JSON has no line feeds outside strings and escapes them inside, so an
    /// event's data is one line.
    fn event(&mut self, data: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        serde_json::to_writer(&mut self.0, data).expect("a chunk can be written as JSON");
        self.0.extend_from_slice(b"\n\n");
    }
}
