//! `POST /v1/chat/completions`.

pub mod conversation;
pub mod request;
mod shape;
pub mod tools;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use self::request::ChatRequest;
use self::shape::ChatShape;
use crate::app::App;
use crate::error::ApiError;
use crate::openai::fields::{self, Endpoint};
use crate::openai::request::body;
use crate::openai::request::intake::{self, Prepared};
use crate::openai::request::types::{ChatFields, CommonFields, TemplateFields};
use crate::openai::request::validate::{self, integer};

/// The handler.
pub async fn chat_completions(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let endpoint = intake::Endpoint {
        path: "/v1/chat/completions",
        find_foreign: intake::find_foreign,
        prepare,
    };
    intake::serve(app, request, endpoint).await
}

fn prepare(app: &App, bytes: &[u8]) -> Result<Prepared<ChatShape>, ApiError> {
    fields::check(Endpoint::Chat, bytes)?;
    let fields: CommonFields = body::parse(bytes)?;
    let chat: ChatFields = body::parse(bytes)?;
    let mut template: TemplateFields = body::parse(bytes)?;
    let logprobs = logprobs(&chat)?;
    let (name, max_tokens) = validate::requested_tokens(&fields, 1)?;
    template.names.max_tokens = name;
    let request = ChatRequest {
        logprobs,
        max_tokens,
        parallel_tool_calls: chat.parallel_tool_calls,
        fields,
        template,
    };
    request.prepare(app, |common, parsers| {
        ChatShape::new(
            Arc::clone(&common.model.text),
            &common.delivery,
            common.sampling.logprobs.is_some(),
            parsers,
        )
    })
}

fn logprobs(chat: &ChatFields) -> Result<Option<u32>, ApiError> {
    let top = integer(
        "top_logprobs",
        chat.top_logprobs,
        0..=validate::MAX_LOGPROBS,
    )?;
    match (chat.logprobs.unwrap_or(false), top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(top)) => Err(ApiError::invalid(
            "top_logprobs",
            format!("top_logprobs is {top}, which needs logprobs to be true."),
        )),
    }
}
