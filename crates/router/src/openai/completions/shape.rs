//! Completion answers: plain text, whole or in pieces.

use std::sync::Arc;

use serde::Serialize;
use tasuki_text::ModelText;

use crate::openai::answer::choice::Piece;
use crate::openai::answer::logprobs::CompletionLogprobs;
use crate::openai::answer::wording::{Shape, finish_reason};
use crate::openai::request::delivery::Delivery;

pub struct CompletionShape {
    pub text: Arc<ModelText>,
    pub logprobs: bool,
    pub token_ids: bool,
}

impl CompletionShape {
    pub fn new(text: Arc<ModelText>, delivery: &Delivery, logprobs: bool) -> Self {
        Self {
            text,
            logprobs,
            token_ids: delivery.return_token_ids,
        }
    }
}

/// A choice of a completion, whole or a piece of it.
#[derive(Debug, Serialize)]
pub struct CompletionChoice {
    index: usize,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
}

impl Shape for CompletionShape {
    const ID_PREFIX: &'static str = "cmpl-";
    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = "text_completion";
    const PROMPT_IDS_ON_TOP: bool = false;
    const LOGPROB_BYTES: usize = 32;
    type Chunk = CompletionChoice;
    type Whole = CompletionChoice;

    fn opening(&self, _index: usize) -> Option<CompletionChoice> {
        None
    }

    fn chunks(
        &mut self,
        index: usize,
        piece: Piece,
        prompt_ids: Option<Vec<u32>>,
    ) -> Vec<CompletionChoice> {
        if piece.is_empty(self.token_ids) && prompt_ids.is_none() {
            return Vec::new();
        }
        vec![self.whole(index, piece, prompt_ids)]
    }

    fn whole(
        &mut self,
        index: usize,
        piece: Piece,
        prompt_ids: Option<Vec<u32>>,
    ) -> CompletionChoice {
        CompletionChoice {
            index,
            logprobs: self.logprobs.then(|| CompletionLogprobs {
                text: Arc::clone(&self.text),
                tokens: piece.logprobs,
            }),
            text: piece.text,
            finish_reason: piece.finish.map(finish_reason),
            token_ids: self.token_ids.then_some(piece.tokens),
            prompt_token_ids: prompt_ids,
        }
    }
}
