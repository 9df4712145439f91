//! `POST /tokenize` and `POST /detokenize`.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Request, State};
use serde::Serialize;

use crate::alarm::Deadline;
use crate::api_keys::Caller;
use crate::app::App;
use crate::error::ApiError;
use crate::foreign::object::Object;
use crate::models::Model;
use crate::openai::chat::conversation::{self, text_error};
use crate::openai::fields::{self, Endpoint};
use crate::openai::request::body;
use crate::openai::request::intake::work_up;
use crate::openai::request::types::{DetokenizeFields, TemplateFields, TokenizeFields};
use crate::openai::request::validate::{count, token_ids};
use crate::pool::Purpose;

/// Fields of a request with a `prompt`; the others are for `messages`.
const OF_PROMPTS: [&str; 4] = ["model", "prompt", "add_special_tokens", "return_token_strs"];

/// What to do with other engines' models.
const ASK_A_WORKER: &str = "Send it to such a worker itself.";

#[derive(Debug, Serialize)]
pub struct Tokenized {
    count: usize,
    max_model_len: Option<u32>,
    tokens: Vec<u32>,
    /// As the vocabulary spells them.
    token_strs: Option<Vec<String>>,
}

#[derive(Debug, Serialize)]
pub struct Detokenized {
    prompt: String,
}

/// Tokens of a text, or of a conversation.
pub async fn tokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Tokenized>, ApiError> {
    work(&app, request, tokenize_body).await
}

/// Text of tokens.
pub async fn detokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Detokenized>, ApiError> {
    work(&app, request, detokenize_body).await
}

async fn work<T: Send + 'static>(
    app: &Arc<App>,
    request: Request,
    work: fn(&App, &[u8]) -> Result<T, ApiError>,
) -> Result<Json<T>, ApiError> {
    app.gate.check_open()?;
    let (parts, body) = request.into_parts();
    let caller = parts.extensions.get::<Caller>();
    let _permit = caller.map(Caller::enter).transpose()?;
    let body = app.bodies.read(&parts.headers, body).await?;
    let mut deadline = Deadline::after(Instant::now(), app.settings.request_timeout);
    let done = deadline.limit(work_up(app, Purpose::Text, body, work));
    done.await?.map(Json)
}

fn tokenize_body(app: &App, bytes: &[u8]) -> Result<Tokenized, ApiError> {
    fields::check(Endpoint::Tokenize, bytes)?;
    let fields: TokenizeFields = body::parse(bytes)?;
    let template: TemplateFields = body::parse(bytes)?;
    let model = app.find_own(fields.model.as_deref(), "/tokenize", ASK_A_WORKER)?;
    let tokens = match (fields.prompt, &template.messages) {
        (Some(prompt), None) => {
            let body: Object = body::parse(bytes)?;
            if let Some(other) = body.names().find(|name| !OF_PROMPTS.contains(name)) {
                let message = format!("{other} is for messages; leave it out beside prompt.");
                return Err(ApiError::invalid(other, message));
            }
            check_length(app, &model, "prompt", &prompt)?;
            model
                .text
                .encode(&prompt, template.add_special_tokens.unwrap_or(true))
                .map_err(|error| text_error("prompt", &error))?
        }
        (None, Some(_)) => {
            conversation::render(app, &model, template, app.max_model_len(&model))?.tokens
        }
        (None, None) => {
            return Err(ApiError::invalid("prompt", "prompt or messages is needed."));
        }
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid(
                "prompt",
                "prompt and messages are both given; give one.",
            ));
        }
    };
    let spell = |id: &u32| model.text.token_piece(*id).unwrap_or_default();
    Ok(Tokenized {
        count: tokens.len(),
        max_model_len: app.max_model_len(&model),
        token_strs: fields
            .return_token_strs
            .unwrap_or(false)
            .then(|| tokens.iter().map(spell).collect()),
        tokens,
    })
}

/// A text that no request could have as its prompt is not tokenized either.
fn check_length(app: &App, model: &Model, param: &str, text: &str) -> Result<(), ApiError> {
    match app.max_model_len(model) {
        Some(limit) => model.text_limit.check(param, text, limit),
        None => Ok(()),
    }
}

fn detokenize_body(app: &App, bytes: &[u8]) -> Result<Detokenized, ApiError> {
    fields::check(Endpoint::Detokenize, bytes)?;
    let fields: DetokenizeFields = body::parse(bytes)?;
    let model = app.find_own(fields.model.as_deref(), "/detokenize", ASK_A_WORKER)?;
    let ids = fields
        .tokens
        .ok_or_else(|| ApiError::invalid("tokens", "tokens is missing."))?;
    if let Some(limit) = app.max_model_len(&model) {
        count("tokens", ids.len(), limit as usize)?;
    }
    let tokens = token_ids("tokens", &ids, app.vocab_size(&model))?;
    let prompt = model
        .text
        .decode(&tokens, false)
        .map_err(|error| text_error("tokens", &error))?;
    Ok(Detokenized { prompt })
}
