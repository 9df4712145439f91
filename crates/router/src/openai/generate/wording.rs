//! Answers of `/generate` as SGLang words them: each event of a stream has all of the choice so
//! far, and what is known about it in `meta_info`.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde::{Serialize, Serializer};
use tasuki_flow::TokenLogprob;
use tasuki_text::ModelText;

use crate::error::ApiError;
use crate::openai::answer::Run;
use crate::openai::answer::choice::{Piece, PlacedToken};
use crate::openai::answer::logprobs::{finite, token_string};
use crate::openai::answer::outputs::Output;
use crate::openai::answer::wording::{Events, Wording, finish_reason};
use crate::serve::api::Finish;

/// What a request wants to know of each token.
#[derive(Debug, Clone, Copy)]
pub struct AskedLogprobs {
    /// Alternatives.
    pub top: u32,
    /// Tokens as text too.
    pub text: bool,
}

pub struct GenerateWording {
    text: Arc<ModelText>,
    started: Instant,
    /// The answer is a list, and events have an index.
    listed: bool,
    logprobs: Option<AskedLogprobs>,
    /// Of each choice, all that came.
    so_far: Vec<Piece>,
}

impl GenerateWording {
    pub fn new(
        text: Arc<ModelText>,
        choices: usize,
        listed: bool,
        logprobs: Option<AskedLogprobs>,
    ) -> Self {
        Self {
            text,
            started: Instant::now(),
            listed,
            logprobs,
            so_far: vec![Piece::default(); choices],
        }
    }

    fn answer<'a>(&'a self, run: &Run, index: usize, piece: &'a Piece) -> Answer<'a> {
        let id = &run.info.id;
        let completion_tokens = piece.tokens.len();
        let logprobs = self.logprobs.map(|asked| Logprobs {
            tokens: &piece.logprobs,
            text: asked.text.then_some(&*self.text),
        });
        let top = logprobs.filter(|_| self.logprobs.is_some_and(|asked| asked.top > 0));
        Answer {
            text: &piece.text,
            output_ids: &piece.tokens,
            meta_info: MetaInfo {
                id: if self.listed {
                    format!("{id}-{index}")
                } else {
                    id.clone()
                },
                finish_reason: piece.finish.map(|finish| FinishReason {
                    kind: finish_reason(finish),
                    length: (finish == Finish::Length).then_some(completion_tokens),
                }),
                prompt_tokens: run.outputs.prompt_tokens(index).len(),
                completion_tokens,
                cached_tokens: run.outputs.cached_tokens(index).unwrap_or(0),
                e2e_latency: piece.finish.map(|_| self.started.elapsed().as_secs_f64()),
                output_token_logprobs: logprobs,
                output_top_logprobs: top.map(TopLogprobs),
            },
            index: (self.listed && run.delivery.stream).then_some(index),
        }
    }
}

impl Wording for GenerateWording {
    const ID_PREFIX: &'static str = "gen-";
    const LOGPROB_BYTES: usize = 48;
    const CUMULATIVE: bool = true;

    /// A choice's last event waits for the end of all, which has the number of cached tokens.
    fn output(&mut self, run: &Run, output: Output, events: &mut Events) {
        let Output { index, piece, .. } = output;
        let new = !piece.is_empty(true);
        self.so_far[index].append(piece);
        let so_far = &self.so_far[index];
        if new && so_far.finish.is_none() {
            events.event(&self.answer(run, index, so_far));
        }
    }

    fn fail(&mut self, _run: &Run, error: &ApiError, events: &mut Events) {
        events.event(&error.body());
        events.done();
    }

    fn close(&mut self, run: &Run, events: &mut Events) {
        for (index, piece) in self.so_far.iter().enumerate() {
            events.event(&self.answer(run, index, piece));
        }
        events.done();
    }

    fn whole(&mut self, run: &Run, pieces: Vec<Piece>) -> Response {
        let answers = pieces.iter().enumerate();
        let mut answers = answers.map(|(index, piece)| self.answer(run, index, piece));
        if self.listed {
            Json(answers.collect::<Vec<_>>()).into_response()
        } else {
            Json(answers.next()).into_response()
        }
    }
}

#[derive(Serialize)]
struct Answer<'a> {
    text: &'a str,
    output_ids: &'a [u32],
    meta_info: MetaInfo<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
}

#[derive(Serialize)]
struct MetaInfo<'a> {
    id: String,
    finish_reason: Option<FinishReason>,
    prompt_tokens: usize,
    completion_tokens: usize,
    /// Of the prompt; known when the choice has ended.
    cached_tokens: u32,
    /// In seconds, of a choice that has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    e2e_latency: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_token_logprobs: Option<Logprobs<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_top_logprobs: Option<TopLogprobs<'a>>,
}

#[derive(Serialize)]
struct FinishReason {
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    length: Option<usize>,
}

/// For each token `[logprob, id, text or null]`.
#[derive(Clone, Copy)]
struct Logprobs<'a> {
    tokens: &'a [PlacedToken],
    text: Option<&'a ModelText>,
}

/// For each token a list of its alternatives, the likeliest first.
struct TopLogprobs<'a>(Logprobs<'a>);

impl<'a> Logprobs<'a> {
    fn known(&self) -> impl Iterator<Item = &'a TokenLogprob> + use<'a> {
        self.tokens
            .iter()
            .filter_map(|token| token.logprob.as_ref())
    }

    fn entry(&self, token: u32, logprob: f32) -> (f32, u32, Option<String>) {
        let text = self
            .text
            .map(|text| token_string(&text.token_bytes(token), ""));
        (finite(logprob), token, text)
    }
}

impl Serialize for Logprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.known().map(|of| self.entry(of.token, of.logprob)))
    }
}

impl Serialize for TopLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let entries = |of: &TokenLogprob| {
            let top = of.top.iter();
            top.map(|top| self.0.entry(top.token, top.logprob))
                .collect::<Vec<_>>()
        };
        serializer.collect_seq(self.0.known().map(entries))
    }
}
