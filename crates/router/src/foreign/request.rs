//! What the HTTP side and the links exchange, through the state machine: a request as its
//! client sent it, and the parts of its answer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use serde_json::value::RawValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::object::Object;

/// Bytes of a streamed answer between the worker and the client's connection: beyond it, the
/// worker's connection is not read until the client reads.
pub const WINDOW_BYTES: usize = 256 << 10;

/// A request for workers of other engines.
#[derive(Debug)]
pub struct ForeignRequest {
    /// Of the client's request, and of each leg's.
    pub path: &'static str,
    /// Those of the client that workers get.
    pub headers: HeaderMap,
    pub body: Object,
    pub stream: bool,
    /// SGLang's meeting places: `None` for a single sequence, else one for each, as lists.
    pub rooms: Option<u32>,
    pub window: Arc<Semaphore>,
    pub shared: Shared,
}

impl ForeignRequest {
    /// The same as [`ForeignRequest::room`], if there is as much now.
    pub fn room_now(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.window)
            .try_acquire_many_owned(asked(bytes))
            .ok()
    }

    /// Room for bytes of the answer, which lasts until they are sent on; `None` for one that
    /// is larger than all the room there is.
    pub async fn room(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let room = Arc::clone(&self.window).acquire_many_owned(asked(bytes));
        room.await.ok()
    }
}

fn asked(bytes: usize) -> u32 {
    u32::try_from(bytes.min(WINDOW_BYTES)).unwrap_or(u32::MAX)
}

/// What the two legs of an attempt tell each other, by the attempt's name.
#[derive(Debug, Default)]
pub struct Shared(Mutex<HashMap<String, watch::Sender<Option<PromptLogprobs>>>>);

/// Of each prompt, the prefill worker's `input_token_logprobs`: a list's items.
pub type PromptLogprobs = Arc<Vec<Vec<Box<RawValue>>>>;

impl Shared {
    pub fn send(&self, attempt: &str, logprobs: PromptLogprobs) {
        self.of(attempt).send_replace(Some(logprobs));
    }

    /// Waits until the other leg has sent them.
    pub async fn receive(&self, attempt: &str) -> Option<PromptLogprobs> {
        let mut sent = self.of(attempt).subscribe();
        let logprobs = sent.wait_for(Option::is_some).await.ok()?;
        logprobs.clone()
    }

    fn of(&self, attempt: &str) -> watch::Sender<Option<PromptLogprobs>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = all
            .entry(attempt.to_owned())
            .or_insert_with(|| watch::Sender::new(None));
        sender.clone()
    }
}

/// A part of the worker's answer.
#[derive(Debug)]
pub struct Answer {
    /// With the first part.
    pub head: Option<Head>,
    pub bytes: Bytes,
    /// What the worker said of its tokens, if this part has it.
    pub usage: Option<Usage>,
    /// Held until the part is dropped: it is sent on by then.
    #[expect(dead_code, reason = "it is held")]
    pub room: Option<OwnedSemaphorePermit>,
}

/// How an answer begins.
#[derive(Debug, Clone)]
pub struct Head {
    pub status: StatusCode,
    pub content_type: Option<HeaderValue>,
}

/// Tokens by the worker's own count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Deserialize)]
pub struct Usage {
    #[serde(default)]
    pub prompt_tokens: u64,
    #[serde(default)]
    pub completion_tokens: u64,
    pub prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Deserialize)]
pub struct PromptDetails {
    pub cached_tokens: Option<u64>,
}
