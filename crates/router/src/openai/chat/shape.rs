//! Chat answers: messages, and the deltas of their stream.

use std::sync::Arc;

use serde::Serialize;
use tasuki_text::ModelText;

use crate::openai::answer::choice::{Piece, PlacedToken};
use crate::openai::answer::logprobs::ChatLogprobs;
use crate::openai::answer::wording::{Shape, finish_reason};
use crate::openai::calls::{Call, Parsers, Part, Reader};
use crate::openai::request::delivery::Delivery;
use crate::serve::api::Finish;

pub struct ChatShape {
    text: Arc<ModelText>,
    logprobs: bool,
    token_ids: bool,
    parsers: Parsers,
    /// Of each choice.
    readers: Vec<Reader>,
}

impl ChatShape {
    pub fn new(
        text: Arc<ModelText>,
        delivery: &Delivery,
        logprobs: bool,
        parsers: Parsers,
    ) -> Self {
        Self {
            text,
            logprobs,
            token_ids: delivery.return_token_ids,
            readers: vec![parsers.reader(); delivery.n as usize],
            parsers,
        }
    }

    /// What a piece says, and how the choice ended if it did.
    fn read(&mut self, index: usize, piece: &mut Piece) -> (Vec<Part>, Option<&'static str>) {
        let reader = &mut self.readers[index];
        let text = std::mem::take(&mut piece.text);
        let parts = reader.read(text, piece.finish.is_some());
        let finish = piece.finish.map(|finish| match finish {
            Finish::Stop if reader.calls() > 0 => TOOL_CALLS,
            finish => finish_reason(finish),
        });
        (parts, finish)
    }

    fn delta(&self, part: Part) -> Delta {
        let mut delta = Delta::default();
        match part {
            Part::Content(text) => delta.content = Some(text),
            Part::Reasoning(text) => delta.reasoning_content = Some(text),
            Part::Call(at, call) => delta.tool_calls = Some([self.tool_call(Some(at), call)]),
        }
        delta
    }

    fn tool_call(&self, index: Option<usize>, call: Call) -> ToolCall {
        ToolCall {
            index,
            id: self.parsers.call_id(),
            kind: "function",
            function: call,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[ToolCall; 1]>,
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
    /// `None` beside tool calls only.
    content: Option<String>,
    refusal: Option<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    reasoning_content: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
}

#[derive(Debug, Serialize)]
struct ToolCall {
    /// In a stream: which of the choice's calls this is.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: Call,
}

const ROLE: &str = "assistant";
/// The end of a choice that has tool calls.
const TOOL_CALLS: &str = "tool_calls";

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
                ..Delta::default()
            },
            logprobs: None,
            finish_reason: None,
            token_ids: None,
        })
    }

    fn chunks(
        &mut self,
        index: usize,
        mut piece: Piece,
        _prompt_ids: Option<Vec<u32>>,
    ) -> Vec<ChatChunk> {
        let (parts, finish) = self.read(index, &mut piece);
        let mut deltas: Vec<Delta> = parts.into_iter().map(|part| self.delta(part)).collect();
        piece.finish = None;
        if deltas.is_empty() && !piece.is_empty(self.token_ids) {
            // The text of these tokens is held back.
            deltas.push(Delta::default());
        }
        let mut logprobs = self.logprobs(piece.logprobs);
        let mut token_ids = self.token_ids.then_some(piece.tokens);
        let mut chunks: Vec<ChatChunk> = deltas
            .into_iter()
            .map(|delta| ChatChunk {
                index,
                delta,
                logprobs: logprobs.take(),
                finish_reason: None,
                token_ids: token_ids.take(),
            })
            .collect();
        if finish.is_some() {
            chunks.push(ChatChunk {
                index,
                delta: Delta::default(),
                logprobs: None,
                finish_reason: finish,
                token_ids: None,
            });
        }
        chunks
    }

    fn whole(
        &mut self,
        index: usize,
        mut piece: Piece,
        _prompt_ids: Option<Vec<u32>>,
    ) -> ChatChoice {
        let (parts, finish_reason) = self.read(index, &mut piece);
        let (mut content, mut reasoning_content) = (String::new(), String::new());
        let mut tool_calls = Vec::new();
        for part in parts {
            match part {
                Part::Content(text) => content.push_str(&text),
                Part::Reasoning(text) => reasoning_content.push_str(&text),
                Part::Call(_, call) => tool_calls.push(self.tool_call(None, call)),
            }
        }
        ChatChoice {
            index,
            logprobs: self.logprobs(piece.logprobs),
            message: Message {
                role: ROLE,
                content: (tool_calls.is_empty() || !content.is_empty()).then_some(content),
                refusal: None,
                reasoning_content,
                tool_calls,
            },
            finish_reason,
            token_ids: self.token_ids.then_some(piece.tokens),
        }
    }
}
