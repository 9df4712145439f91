//! The JSON of an answer: the events of a stream, or one body. Chats and completions of OpenAI share
//! an envelope around their choices; each has a [`Shape`] for a choice.

use axum::Json;
use axum::body::Bytes;
use axum::response::{IntoResponse, Response};
use bytes::{BufMut, BytesMut};
use chrono::Utc;
use serde::Serialize;

use super::Run;
use super::choice::Piece;
use super::outputs::Output;
use super::usage::{Usage, timings_json};
use crate::error::ApiError;
use crate::heartbeat::HEARTBEAT;
use crate::serve::api::Finish;

/// The form of one endpoint's answers.
pub trait Wording: Send + 'static {
    const ID_PREFIX: &'static str;
    /// JSON of one alternative of one token, about.
    const LOGPROB_BYTES: usize;
    /// Each event of a stream has all of its choice so far.
    const CUMULATIVE: bool = false;

    /// What a stream begins with, before its first output.
    fn open(&mut self, _run: &Run, _events: &mut Events) {}

    fn output(&mut self, run: &Run, output: Output, events: &mut Events);

    /// The last event of a stream that failed.
    fn fail(&mut self, run: &Run, error: &ApiError, events: &mut Events);

    /// What a stream ends with, after its last output.
    fn close(&mut self, run: &Run, events: &mut Events);

    /// The answer to a request that is not streamed: a piece for each choice.
    fn whole(&mut self, run: &Run, pieces: Vec<Piece>) -> Response;
}

/// Server-sent events, written one after another into one buffer.
#[derive(Debug)]
pub struct Events(BytesMut);

/// Room for a few tokens' events.
const BUFFER_BYTES: usize = 1 << 10;

impl Default for Events {
    fn default() -> Self {
        Self(BytesMut::with_capacity(BUFFER_BYTES))
    }
}

impl Events {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What was written since the last call. Its room is used again once it was sent.
    pub fn take(&mut self) -> Bytes {
        self.0.split().freeze()
    }

    /// JSON has no line feeds outside strings and escapes them inside, so an
    /// event's data is one line.
    pub fn event(&mut self, data: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        let writer = (&mut self.0).writer();
        serde_json::to_writer(writer, data).expect("a chunk can be written as JSON");
        self.0.extend_from_slice(b"\n\n");
    }

    /// An event with a name.
    pub fn named(&mut self, name: &str, data: &impl Serialize) {
        self.0.extend_from_slice(b"event: ");
        self.0.extend_from_slice(name.as_bytes());
        self.0.put_u8(b'\n');
        self.event(data);
    }

    pub fn done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }

    pub fn heartbeat(&mut self) {
        self.0.extend_from_slice(HEARTBEAT);
    }
}

/// The form of one endpoint's choices.
pub trait Shape: Send + 'static {
    const ID_PREFIX: &'static str;
    const OBJECT: &'static str;
    const CHUNK_OBJECT: &'static str;
    /// Where `return_token_ids` puts the prompt's ids: beside the choices (a
    /// chat has one prompt) or into each.
    const PROMPT_IDS_ON_TOP: bool;
    /// JSON of one alternative of one token, about.
    const LOGPROB_BYTES: usize;
    type Chunk: Serialize + Send;
    type Whole: Serialize + Send;

    /// The chunk that opens a choice's stream, before any token.
    fn opening(&self, index: usize) -> Option<Self::Chunk>;

    /// The chunks of a piece. `prompt_ids` only with a choice's first piece,
    /// and only if they belong into the choice.
    fn chunks(
        &mut self,
        index: usize,
        piece: Piece,
        prompt_ids: Option<Vec<u32>>,
    ) -> Vec<Self::Chunk>;

    /// A whole choice.
    fn whole(&mut self, index: usize, piece: Piece, prompt_ids: Option<Vec<u32>>) -> Self::Whole;
}

/// The frame around choices.
#[derive(Debug, Serialize)]
pub struct Envelope<'a, C> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub choices: Vec<C>,
    /// `Some(None)`: null, in the chunks of a stream whose last has the usage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<serde_json::Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// What names one answer.
#[derive(Debug, Clone)]
pub struct AnswerInfo {
    pub id: String,
    /// Unix time in seconds.
    pub created: u64,
    /// As the client called it.
    pub model: String,
}

impl AnswerInfo {
    /// An envelope with nothing optional in it.
    pub fn envelope<C>(&self, object: &'static str, choices: Vec<C>) -> Envelope<'_, C> {
        Envelope {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices,
            usage: None,
            timings: None,
            prompt_token_ids: None,
        }
    }
}

/// OpenAI's name for the end of a choice.
pub fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
    }
}

/// Seconds since 1970, as responses carry them.
pub fn unix_seconds() -> u64 {
    u64::try_from(Utc::now().timestamp()).unwrap_or(0)
}

/// OpenAI's chats and completions: choices in an envelope. The usage is the last event, if it was
/// asked for.
impl<S: Shape> Wording for S {
    const ID_PREFIX: &'static str = S::ID_PREFIX;
    const LOGPROB_BYTES: usize = S::LOGPROB_BYTES;

    fn open(&mut self, run: &Run, events: &mut Events) {
        for index in 0..run.outputs.choices() {
            if let Some(chunk) = self.opening(index) {
                let mut envelope = chunk_envelope::<S>(run, vec![chunk]);
                if index == 0 {
                    envelope.prompt_token_ids = run.prompt_ids(0, S::PROMPT_IDS_ON_TOP);
                }
                events.event(&envelope);
            }
        }
    }

    fn output(&mut self, run: &Run, output: Output, events: &mut Events) {
        let Output {
            index,
            first,
            piece,
        } = output;
        let prompt_ids = run.prompt_ids(index, first && !S::PROMPT_IDS_ON_TOP);
        for chunk in self.chunks(index, piece, prompt_ids) {
            let mut envelope = chunk_envelope::<S>(run, vec![chunk]);
            if run.delivery.continuous_usage {
                envelope.usage = Some(Some(run.outputs.summary().usage));
            }
            events.event(&envelope);
        }
    }

    fn fail(&mut self, _run: &Run, error: &ApiError, events: &mut Events) {
        events.named("error", &error.body());
    }

    fn close(&mut self, run: &Run, events: &mut Events) {
        if run.delivery.include_usage {
            let summary = run.outputs.summary();
            let mut envelope = chunk_envelope::<S>(run, Vec::new());
            envelope.usage = Some(Some(summary.usage));
            envelope.timings = Some(timings_json(&summary.timings));
            events.event(&envelope);
        }
        events.done();
    }

    fn whole(&mut self, run: &Run, pieces: Vec<Piece>) -> Response {
        let summary = run.outputs.summary();
        let choices = pieces
            .into_iter()
            .enumerate()
            .map(|(index, piece)| {
                let prompt_ids = run.prompt_ids(index, !S::PROMPT_IDS_ON_TOP);
                Shape::whole(self, index, piece, prompt_ids)
            })
            .collect();
        let mut envelope = run.info.envelope(S::OBJECT, choices);
        envelope.usage = Some(Some(summary.usage));
        envelope.prompt_token_ids = run.prompt_ids(0, S::PROMPT_IDS_ON_TOP);
        envelope.timings = run.delivery.timings.then(|| timings_json(&summary.timings));
        Json(envelope).into_response()
    }
}

fn chunk_envelope<S: Shape>(run: &Run, choices: Vec<S::Chunk>) -> Envelope<'_, S::Chunk> {
    let mut envelope = run.info.envelope(S::CHUNK_OBJECT, choices);
    envelope.usage = run.delivery.include_usage.then_some(None);
    envelope
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_that_were_sent_leave_their_room_to_the_next() {
        let mut events = Events::default();
        let buffer = events.0.as_ptr();
        let mut places = std::collections::HashSet::new();
        for number in 0..1_000 {
            events.event(&number);
            let sent = events.take();
            assert_eq!(sent, format!("data: {number}\n\n").into_bytes());
            assert!(events.is_empty());
            places.insert(sent.as_ptr() as usize - buffer as usize);
        }
        assert!(
            places.iter().all(|place| *place < BUFFER_BYTES),
            "{places:?}"
        );
    }
}
