//! What chat and completion answers have in common, streamed or whole.

use serde::Serialize;

use super::choice::Piece;
use super::usage::Usage;
use crate::serve::api::Finish;

/// The way one endpoint words its choices.
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
pub struct Identity {
    pub id: String,
    /// Unix time in seconds.
    pub created: u64,
    /// As the client called it.
    pub model: String,
}

impl Identity {
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

/// OpenAI's word for the end of a choice.
pub fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
    }
}
