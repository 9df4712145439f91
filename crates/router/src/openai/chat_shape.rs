//! Chat answers: messages, and the deltas of their stream.

use std::sync::Arc;

use serde::Serialize;
use tasuki_text::ModelText;

use super::choice::{Piece, PlacedToken};
use super::delivery::Delivery;
use super::logprobs::ChatLogprobs;
use super::shape::{Shape, finish_reason};

pub struct ChatShape {
    pub text: Arc<ModelText>,
    pub logprobs: bool,
    pub token_ids: bool,
}

impl ChatShape {
    pub fn new(text: Arc<ModelText>, delivery: &Delivery, logprobs: bool) -> Self {
        Self {
            text,
            logprobs,
            token_ids: delivery.return_token_ids,
        }
    }

    fn logprobs(&self, tokens: Vec<PlacedToken>) -> Option<ChatLogprobs> {
        self.logprobs.then(|| ChatLogprobs {
            text: Arc::clone(&self.text),
            tokens,
        })
    }
}

#[derive(Debug, Serialize)]
pub struct ChatChunk {
    index: usize,
    delta: Delta,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Debug, Default, Serialize)]
struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct ChatChoice {
    index: usize,
    message: Message,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Debug, Serialize)]
struct Message {
    role: &'static str,
    content: String,
    refusal: Option<String>,
}

const ROLE: &str = "assistant";

impl Shape for ChatShape {
    const ID_PREFIX: &'static str = "chatcmpl-";
    const OBJECT: &'static str = "chat.completion";
    const CHUNK_OBJECT: &'static str = "chat.completion.chunk";
    const PROMPT_IDS_ON_TOP: bool = true;
    const LOGPROB_BYTES: usize = 80;
    type Chunk = ChatChunk;
    type Whole = ChatChoice;

    fn opening(&self, index: usize) -> Option<ChatChunk> {
        Some(ChatChunk {
            index,
            delta: Delta {
                role: Some(ROLE),
                content: Some(String::new()),
            },
            logprobs: None,
            finish_reason: None,
            token_ids: None,
        })
    }

    fn chunks(&self, index: usize, piece: Piece, _prompt_ids: Option<Vec<u32>>) -> Vec<ChatChunk> {
        let mut chunks = Vec::with_capacity(2);
        let finish = piece.finish;
        let content = Piece {
            finish: None,
            ..piece
        };
        if !content.is_empty(self.token_ids) {
            chunks.push(ChatChunk {
                index,
                logprobs: self.logprobs(content.logprobs),
                delta: Delta {
                    role: None,
                    content: Some(content.text),
                },
                finish_reason: None,
                token_ids: self.token_ids.then_some(content.tokens),
            });
        }
        if let Some(finish) = finish {
            chunks.push(ChatChunk {
                index,
                delta: Delta::default(),
                logprobs: None,
                finish_reason: Some(finish_reason(finish)),
                token_ids: None,
            });
        }
        chunks
    }

    fn whole(&self, index: usize, piece: Piece, _prompt_ids: Option<Vec<u32>>) -> ChatChoice {
        ChatChoice {
            index,
            logprobs: self.logprobs(piece.logprobs),
            message: Message {
                role: ROLE,
                content: piece.text,
                refusal: None,
            },
            finish_reason: piece.finish.map(finish_reason),
            token_ids: self.token_ids.then_some(piece.tokens),
        }
    }
}
