//! Going on after a worker was lost in the middle of a streamed answer: another worker gets the
//! prompt and the text so far, and its answer is joined to what the client has.
//!
//! Only where both would say the same: greedy sampling, one choice, text alone. How the text so
//! far is cut into tokens may differ from how it was generated; the text goes on all the same.

use std::ops::Range;

use axum::body::Bytes;
use serde::Deserialize;
use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};
use tasuki_flow::{Generation, Opaque};

use super::events::{self, Data};
use super::object::Object;
use super::request::{ForeignRequest, Shared, Usage};
use super::template::Template;

/// A request that loses its workers again and again is likely the cause.
const MOST_RESUMPTIONS: u32 = 3;

/// Marks of reasoning in a text.
const THINK: [&str; 2] = ["<think>", "</think>"];

/// What a worker that begins anew keeps to as the first one did. Fields that are neither here nor
/// below may ask for what it cannot keep to: an answer with one of them does not go on.
const WITH: [&str; 42] = [
    "model",
    "messages",
    "prompt",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "no_stop_trim",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "ignore_eos",
    "logit_bias",
    "allowed_token_ids",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "tool_choice",
    "parallel_tool_calls",
    "lora_path",
    "user",
    "priority",
    "cache_salt",
    "request_id",
    "rid",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "routed_dp_rank",
    "data_parallel_rank",
];

/// What an answer so far must not depend on, or have: a worker that begins anew knows only the
/// text. Each with the values that ask for nothing.
const NOT_WITH: [(&str, &[&str]); 27] = [
    ("n", &["1"]),
    ("best_of", &["1"]),
    ("tools", &["[]"]),
    ("functions", &["[]"]),
    ("logprobs", &["false", "0"]),
    ("top_logprobs", &["0"]),
    ("prompt_logprobs", &[]),
    ("return_logprob", &["false"]),
    ("echo", &["false"]),
    ("suffix", &["\"\""]),
    ("presence_penalty", &["0", "0.0"]),
    ("frequency_penalty", &["0", "0.0"]),
    ("repetition_penalty", &["1", "1.0"]),
    ("response_format", &["{\"type\":\"text\"}"]),
    ("structured_outputs", &[]),
    ("guided_json", &[]),
    ("guided_regex", &[]),
    ("guided_choice", &[]),
    ("guided_grammar", &[]),
    ("json_schema", &[]),
    ("regex", &[]),
    ("ebnf", &[]),
    ("return_token_ids", &["false"]),
    ("continue_final_message", &["false"]),
    // Without it the answer belongs to the message before, and goes on as one of its own.
    ("add_generation_prompt", &["true"]),
    ("use_beam_search", &["false"]),
    ("min_tokens", &["0"]),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Chat,
    Completion,
}

/// One request's answer so far, and how to go on with it.
#[derive(Debug)]
pub struct Resumption {
    kind: Kind,
    text: String,
    tokens: u64,
    /// Of the first worker's chunks, which those of others get too.
    id: Option<Box<RawValue>>,
    created: Option<Box<RawValue>>,
    attempts: u32,
    /// Tokens of earlier workers, once there are any: their text is in the prompt now.
    earlier: u64,
    /// The present worker's answer has begun.
    begun: bool,
    /// Something came that is not text alone.
    spoilt: bool,
    finished: bool,
    /// Of the first worker's chunks: one that has nothing but text.
    template: Template,
}

/// What is read of a chunk.
#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(default, borrow)]
    choices: Vec<ChunkChoice<'a>>,
}

#[derive(Deserialize)]
struct ChunkChoice<'a> {
    #[serde(borrow)]
    delta: Option<Delta<'a>>,
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    #[serde(borrow)]
    finish_reason: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    reasoning: Option<String>,
    reasoning_content: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<serde::de::IgnoredAny>>,
}

impl Resumption {
    /// `None`: the request does not allow it.
    pub fn of(path: &str, body: &Object) -> Option<Self> {
        let kind = match path {
            "/v1/chat/completions" => Kind::Chat,
            "/v1/completions" => Kind::Completion,
            _ => return None,
        };
        let greedy = body.read::<f64>("temperature") == Some(0.0);
        let streams = body.read("stream") == Some(true);
        let plain = body.names().all(|name| {
            let value = body.get(name).map(RawValue::get);
            let nothing = NOT_WITH.iter().find(|(known, _)| *known == name);
            let asks_for_nothing = |(_, nothing): &(&str, &[&str])| {
                value.is_none_or(|value| value == "null" || nothing.contains(&value))
            };
            WITH.contains(&name) || nothing.is_some_and(asks_for_nothing)
        });
        let options: Object = body.read("stream_options").unwrap_or_default();
        let counts = options.read("continuous_usage_stats") == Some(true);
        let text = kind == Kind::Chat || body.read::<String>("prompt").is_some();
        let allowed = greedy && streams && plain && text && !counts;
        allowed.then_some(Self {
            kind,
            text: String::new(),
            tokens: 0,
            id: None,
            created: None,
            attempts: 0,
            earlier: 0,
            begun: false,
            spoilt: false,
            finished: false,
            template: Template::default(),
        })
    }

    /// Reads a part of the answer. What the client gets in its place: `None`: the same.
    pub fn take(&mut self, part: &Bytes) -> Option<Bytes> {
        if self.attempts == 0 {
            for data in events::data(part) {
                self.take_first(data);
            }
            return None;
        }
        let mut out = Vec::new();
        for data in events::data(part) {
            let kept = match Data::of(data, self.begun) {
                Data::Done => Some(data.to_vec()),
                Data::Token(_) => {
                    self.begun = true;
                    self.read(data);
                    Some(self.joined(data))
                }
                // The role is sent once.
                Data::Other(_) if !self.begun => None,
                Data::Other(_) => Some(self.joined(data)),
                Data::Error(_) => None,
            };
            if let Some(kept) = kept {
                out.extend_from_slice(b"data: ");
                out.extend_from_slice(&kept);
                out.extend_from_slice(b"\n\n");
            }
        }
        Some(out.into())
    }

    /// Takes a chunk of the first worker.
    fn take_first(&mut self, data: &[u8]) {
        if let Some(text) = self.template.text(data) {
            self.text.push_str(&text);
            self.tokens += 1;
        } else if let Data::Token(_) = Data::of(data, self.begun) {
            self.begun = true;
            if let Some(text) = self.read(data) {
                self.template.keep(data, text);
            }
        }
    }

    /// Reads a chunk. Where its text is, if there is nothing else to know of such a chunk.
    fn read(&mut self, data: &[u8]) -> Option<Range<usize>> {
        let Ok(chunk) = serde_json::from_slice::<Chunk<'_>>(data) else {
            self.spoilt = true;
            return None;
        };
        if self.id.is_none()
            && let Ok(whole) = serde_json::from_slice::<Object>(data)
        {
            self.id = whole.get("id").map(ToOwned::to_owned);
            self.created = whole.get("created").map(ToOwned::to_owned);
        }
        let mut alone = chunk.choices.len() == 1;
        let mut place = None;
        for choice in chunk.choices {
            // Of `null`, there is none.
            self.finished |= choice.finish_reason.is_some();
            let (mut other, mut calls, mut content) = (false, false, None);
            if let Some(delta) = choice.delta {
                let reasoning = [delta.reasoning, delta.reasoning_content];
                other = reasoning.into_iter().flatten().any(|text| !text.is_empty());
                calls = delta.tool_calls.is_some_and(|calls| !calls.is_empty());
                content = delta.content;
            }
            self.spoilt |= other || calls;
            alone &= choice.finish_reason.is_none() && choice.text.is_some() != content.is_some();
            for written in [choice.text, content].into_iter().flatten() {
                match serde_json::from_str::<String>(written.get()) {
                    Ok(text) => self.text.push_str(&text),
                    Err(_) => self.spoilt = true,
                }
                let start = written.get().as_ptr().addr() - data.as_ptr().addr();
                place = Some(start + 1..start + written.get().len() - 1);
            }
        }
        self.tokens += 1;
        place.filter(|_| alone && !self.spoilt)
    }

    /// A chunk of a later worker as one of the first: its name and its usage.
    fn joined(&self, data: &[u8]) -> Vec<u8> {
        let Ok(mut chunk) = serde_json::from_slice::<Object>(data) else {
            return data.to_vec();
        };
        for (name, value) in [("id", &self.id), ("created", &self.created)] {
            if let Some(value) = value {
                chunk.set_raw(name, value.clone());
            }
        }
        if chunk.has("usage")
            && let Some(usage) = chunk.read("usage")
            && let Some(mut fields) = chunk.read::<Object>("usage")
        {
            let usage = self.of_all(usage);
            fields.set("prompt_tokens", &usage.prompt_tokens);
            fields.set("completion_tokens", &usage.completion_tokens);
            chunk.set("usage", &fields);
        }
        chunk.to_json()
    }

    /// What a worker counted, of the whole answer: it took the text so far for prompt.
    pub fn of_all(&self, usage: Usage) -> Usage {
        Usage {
            prompt_tokens: usage.prompt_tokens.saturating_sub(self.earlier),
            completion_tokens: usage.completion_tokens + self.earlier,
            ..usage
        }
    }

    /// Whether another worker's output has come since the last loss.
    pub fn goes_on(&self) -> bool {
        self.attempts > 0 && self.begun
    }

    /// The request that goes on, if it may: not where the last worker brought nothing.
    pub fn next(&mut self, first: &Generation) -> Option<Generation> {
        if self.spoilt || self.finished || self.attempts >= MOST_RESUMPTIONS || !self.begun {
            return None;
        }
        // Reasoning that no parser took out: templates cut it from a message, or add marks of their own.
        if self.kind == Kind::Chat && THINK.iter().any(|mark| self.text.contains(mark)) {
            return None;
        }
        let opaque = first.opaque.as_ref()?;
        let request = opaque.content.get::<ForeignRequest>()?;
        let body = self.body(&request.body)?;
        self.attempts += 1;
        self.earlier = self.tokens;
        self.begun = false;
        let request = ForeignRequest {
            path: request.path,
            headers: request.headers.clone(),
            body,
            stream: true,
            rooms: request.rooms,
            window: request.window.clone(),
            shared: Shared::default(),
        };
        let mut next = first.clone();
        next.request_id = format!("{}-{}", first.request_id, self.attempts);
        let opaque = next.opaque.as_mut()?;
        opaque.content = Opaque::new(request);
        opaque.resumes = true;
        Some(next)
    }

    /// The client's body, with the text so far, and as many tokens less.
    fn body(&self, client: &Object) -> Option<Object> {
        let mut body = client.clone();
        let left = |name: &str| {
            let most = client.read::<u64>(name)?;
            Some(most.saturating_sub(self.tokens))
        };
        for name in ["max_tokens", "max_completion_tokens"] {
            match left(name) {
                Some(0) => return None,
                Some(left) => body.set(name, &left),
                None => {}
            }
        }
        match self.kind {
            Kind::Completion => {
                let prompt: String = client.read("prompt")?;
                body.set("prompt", &(prompt + &self.text));
                if !client.has("max_tokens") {
                    // The engines' default.
                    let left = 16u64.checked_sub(self.tokens).filter(|left| *left > 0)?;
                    body.set("max_tokens", &left);
                }
            }
            // Templates and engines cut white space at either end of a message.
            Kind::Chat if self.text.trim() != self.text => return None,
            Kind::Chat => {
                let mut messages: Vec<Box<RawValue>> = client.read("messages")?;
                let so_far = json!({"role": "assistant", "content": self.text});
                messages.push(to_raw_value(&so_far).ok()?);
                body.set("messages", &messages);
                body.set("add_generation_prompt", &false);
                body.set("continue_final_message", &true);
            }
        }
        Some(body)
    }
}
