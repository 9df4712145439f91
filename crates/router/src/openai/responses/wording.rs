//! How a response is worded, streamed or whole.

use axum::Json;
use axum::response::{IntoResponse, Response};
use tasuki_text::Detokenizer;

use super::events::Numbering;
use super::items::{Change, Content, Items};
use super::object::{Echoed, IncompleteDetails, ResponseObject, ResponseUsage, Status};
use super::reasoning::ReasoningTokens;
use crate::error::ApiError;
use crate::openai::answer::Run;
use crate::openai::answer::choice::Piece;
use crate::openai::answer::outputs::Output;
use crate::openai::answer::wording::{Events, Wording, unix_seconds};
use crate::openai::calls::{Parsers, Reader};
use crate::openai::request::intake::Common;
use crate::serve::api::Finish;

/// What cut an incomplete response.
const TOO_FEW_TOKENS: &str = "max_output_tokens";

pub struct ResponseWording {
    parsers: Parsers,
    reader: Reader,
    reasoning_tokens: ReasoningTokens,
    items: Items,
    /// Once it is known.
    finish: Option<Finish>,
    echoed: Echoed,
    /// `None` until the stream has its first event.
    numbering: Option<Numbering>,
}

impl ResponseWording {
    /// `echoed`: without what the model has to say of sampling.
    pub fn new(common: &Common, parsers: Parsers, mut echoed: Echoed) -> Self {
        echoed.temperature = common.sampling.temperature;
        echoed.top_p = common.sampling.top_p;
        let delivery = &common.delivery;
        let detokenizer = Detokenizer::new(&common.model.text, delivery.skip_special_tokens)
            .keeping(delivery.kept_special_tokens.clone());
        Self {
            reader: parsers.reader(),
            reasoning_tokens: ReasoningTokens::new(detokenizer, parsers.reasoning_end()),
            parsers,
            items: Items::default(),
            finish: None,
            echoed,
            numbering: None,
        }
    }

    /// What a piece changes in the output.
    fn take(&mut self, piece: Piece) -> Vec<Change> {
        self.reasoning_tokens.push(&piece.tokens);
        let parts = self.reader.read(piece.text, piece.finish.is_some());
        let parsers = &self.parsers;
        let mut changes = Vec::new();
        for part in parts {
            changes.extend(self.items.add(part, || parsers.call_id()));
        }
        if let Some(finish) = piece.finish {
            self.finish = Some(finish);
            changes.extend(self.items.end(finish == Finish::Length));
        }
        changes
    }

    fn begun<'a>(&'a self, run: &'a Run) -> ResponseObject<'a> {
        ResponseObject::new(&run.info, self.items.all(), &self.echoed)
    }

    /// The response at its end.
    fn ended<'a>(&'a self, run: &'a Run) -> ResponseObject<'a> {
        let is_cut = self.finish == Some(Finish::Length);
        ResponseObject {
            status: if is_cut {
                Status::Incomplete
            } else {
                Status::Completed
            },
            completed_at: (!is_cut).then(unix_seconds),
            incomplete_details: is_cut.then_some(IncompleteDetails {
                reason: TOO_FEW_TOKENS,
            }),
            usage: Some(self.usage(run)),
            ..self.begun(run)
        }
    }

    fn usage(&self, run: &Run) -> ResponseUsage {
        let mut items = self.items.all().iter();
        let has_reasoning = items.any(|item| matches!(item.content, Content::Reasoning(_)));
        let reasoning = if has_reasoning {
            self.reasoning_tokens.count()
        } else {
            0
        };
        ResponseUsage::new(run.outputs.summary().usage, reasoning)
    }
}

impl Wording for ResponseWording {
    const ID_PREFIX: &'static str = "resp_";
    /// No logprobs are asked for.
    const LOGPROB_BYTES: usize = 0;

    fn open(&mut self, run: &Run, events: &mut Events) {
        let mut numbering = Numbering::default();
        let begun = self.begun(run);
        numbering.response("response.created", &begun, events);
        numbering.response("response.in_progress", &begun, events);
        self.numbering = Some(numbering);
    }

    fn output(&mut self, _run: &Run, output: Output, events: &mut Events) {
        let changes = self.take(output.piece);
        let numbering = self.numbering.get_or_insert_default();
        for change in changes {
            numbering.change(&change, self.items.all(), events);
        }
    }

    fn fail(&mut self, run: &Run, error: &ApiError, events: &mut Events) {
        let Some(mut numbering) = self.numbering.take() else {
            Numbering::default().error(&error.into(), events);
            return;
        };
        let failed = ResponseObject {
            status: Status::Failed,
            error: Some(error.into()),
            usage: Some(self.usage(run)),
            ..self.begun(run)
        };
        numbering.response("response.failed", &failed, events);
    }

    fn close(&mut self, run: &Run, events: &mut Events) {
        let mut numbering = self.numbering.take().unwrap_or_default();
        let ended = self.ended(run);
        let kind = match ended.status {
            Status::Incomplete => "response.incomplete",
            _ => "response.completed",
        };
        numbering.response(kind, &ended, events);
    }

    fn whole(&mut self, run: &Run, pieces: Vec<Piece>) -> Response {
        for piece in pieces {
            self.take(piece);
        }
        Json(self.ended(run)).into_response()
    }
}
