//! `POST /tokenize` and `POST /detokenize`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use serde::Serialize;

use super::body;
use super::conversation::{self, text_error};
use super::intake::off_loop;
use super::types::{DetokenizeFields, TemplateFields, TokenizeFields};
use super::validate::token_ids;
use crate::app::App;
use crate::error::ApiError;

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
    let (parts, body) = request.into_parts();
    let bytes = body::read(&parts.headers, body, app.settings.max_body_bytes).await?;
    off_loop(&app, bytes, tokenize_body).await.map(Json)
}

/// Text of tokens.
pub async fn detokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Detokenized>, ApiError> {
    let (parts, body) = request.into_parts();
    let bytes = body::read(&parts.headers, body, app.settings.max_body_bytes).await?;
    off_loop(&app, bytes, detokenize_body).await.map(Json)
}

fn tokenize_body(app: &App, bytes: &[u8]) -> Result<Tokenized, ApiError> {
    let fields: TokenizeFields = body::parse(bytes)?;
    let template: TemplateFields = body::parse(bytes)?;
    app.model_name(fields.model.as_deref())?;
    let tokens = match (fields.prompt, &template.messages) {
        (Some(prompt), None) => app
            .text
            .encode(&prompt, template.add_special_tokens.unwrap_or(true))
            .map_err(|error| text_error("prompt", &error))?,
        (None, Some(_)) => conversation::tokens(app, template, None)?,
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
    let spell = |id: &u32| app.text.token_piece(*id).unwrap_or_default();
    Ok(Tokenized {
        count: tokens.len(),
        max_model_len: app.max_model_len(),
        token_strs: fields
            .return_token_strs
            .unwrap_or(false)
            .then(|| tokens.iter().map(spell).collect()),
        tokens,
    })
}

fn detokenize_body(app: &App, bytes: &[u8]) -> Result<Detokenized, ApiError> {
    let fields: DetokenizeFields = body::parse(bytes)?;
    app.model_name(fields.model.as_deref())?;
    let ids = fields
        .tokens
        .ok_or_else(|| ApiError::invalid("tokens", "tokens is missing."))?;
    let tokens = token_ids("tokens", &ids, app.vocab_size())?;
    let prompt = app
        .text
        .decode(&tokens, false)
        .map_err(|error| text_error("tokens", &error))?;
    Ok(Detokenized { prompt })
}
