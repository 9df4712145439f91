//! An answer as server-sent events: chunks, then the usage if asked for, then
//! `[DONE]`; a failure is an `error` event and the end.
//!
//! While there is nothing to send a comment goes out at each heartbeat. Clients ignore
//! it, and proxies see that the connection is alive.

use std::convert::Infallible;

use axum::body::Bytes;
use futures::Stream;
use serde::Serialize;
use tokio::time::timeout;

use super::outputs::Output;
use super::running::Running;
use super::shape::{Envelope, Shape};
use super::usage::timings_json;
use crate::error::ApiError;

type Next = Option<Result<Output, ApiError>>;

const HEARTBEAT: &[u8] = b": the request is still being processed\n\n";

/// The events of a request. `first` is its first output; `None`: it waits for that
/// still, and a comment comes first. The request is aborted when the stream is dropped.
pub fn events<S: Shape>(
    running: Running<S>,
    first: Option<Next>,
) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
    let state = State {
        running,
        next: first.map_or(Pending::Late, Pending::There),
        opened: false,
        ended: false,
    };
    futures::stream::unfold(state, |mut state| async move {
        let frames = state.frames().await?;
        Some((Ok(frames), state))
    })
}

/// What a stream begins with.
enum Pending {
    There(Next),
    /// The first output is late: its place is taken by a comment.
    Late,
    /// Nothing: the next output is to be waited for.
    Awaited,
}

struct State<S> {
    running: Running<S>,
    next: Pending,
    /// The chunks that open the choices were sent.
    opened: bool,
    ended: bool,
}

impl<S: Shape> State<S> {
    /// The next bytes of the body, never none before its end.
    async fn frames(&mut self) -> Option<Bytes> {
        if self.ended {
            return None;
        }
        let mut frames = Frames::default();
        while frames.0.is_empty() {
            let next = match std::mem::replace(&mut self.next, Pending::Awaited) {
                Pending::There(next) => Some(next),
                Pending::Late => None,
                Pending::Awaited => {
                    let wait = self.running.heartbeat;
                    timeout(wait, self.running.next()).await.ok()
                }
            };
            match next {
                Some(Some(Ok(output))) => self.output(output, &mut frames),
                Some(Some(Err(error))) => self.fail(&error, &mut frames),
                Some(None) => self.close(&mut frames),
                None => frames.0.extend_from_slice(HEARTBEAT),
            }
        }
        Some(frames.0.into())
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

    fn output(&mut self, output: Output, frames: &mut Frames) {
        if !std::mem::replace(&mut self.opened, true) {
            self.open(frames);
        }
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

    fn fail(&mut self, error: &ApiError, frames: &mut Frames) {
        self.ended = true;
        self.running.log.outcome = "failed";
        frames.0.extend_from_slice(b"event: error\n");
        frames.event(&error.body());
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
