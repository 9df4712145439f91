//! An answer as server-sent events: chunks, then the usage if asked for, then
//! `[DONE]`; a failure is an `error` event and the end.

use std::convert::Infallible;

use axum::body::Bytes;
use futures::Stream;
use serde::Serialize;

use super::answer::Running;
use super::outputs::Output;
use super::shape::{Envelope, Shape};
use super::usage::timings_json;
use crate::error::ApiError;
use crate::serve::api::ServeError;

type Next = Option<Result<Output, ServeError>>;

/// The events of a request whose first output is there already. The request
/// is aborted when the stream is dropped.
pub fn events<S: Shape>(
    running: Running<S>,
    first: Next,
) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
    let state = State {
        running,
        first: Some(first),
        ended: false,
    };
    futures::stream::unfold(state, |mut state| async move {
        let frames = state.frames().await?;
        Some((Ok(frames), state))
    })
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
            frames.event(&self.envelope(vec![chunk]));
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
