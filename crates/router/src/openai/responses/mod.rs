//! `POST /v1/responses`: a chat in the form of OpenAI's Responses API. Nothing is stored.
//!
//! [`request`] makes a chat of the fields, with [`input`] for the conversation and [`tools`]. The
//! answer's text becomes [`items`], which [`wording`] sends as [`events`] or as one [`object`].

mod check;
mod events;
mod input;
mod items;
mod object;
mod reasoning;
mod request;
#[cfg(test)]
mod tests;
mod tools;
mod types;
mod wording;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

#[cfg(test)]
pub use self::types::ResponseFields;
use crate::app::App;
use crate::error::ApiError;
use crate::openai::fields;
use crate::openai::request::intake::{self, ForForeign, Prepared};

/// The handler.
pub async fn responses(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let endpoint = intake::Endpoint {
        path: "/v1/responses",
        find_foreign: refuse_foreign,
        prepare,
    };
    intake::serve(app, request, endpoint).await
}

fn prepare(app: &App, bytes: &[u8]) -> Result<Prepared<wording::ResponseWording>, ApiError> {
    fields::check(fields::Endpoint::Responses, bytes)?;
    let (chat, echoed) = request::read(bytes)?;
    chat.prepare(app, |common, parsers| {
        wording::ResponseWording::new(common, parsers, echoed)
    })
}

/// Workers of other engines store responses, and a split request of theirs is a chat or a
/// completion.
fn refuse_foreign(app: &App, bytes: &[u8]) -> Result<Option<ForForeign>, ApiError> {
    let (_, name) = intake::named(bytes)?;
    app.find_own(
        name.as_deref(),
        "/v1/responses",
        "Use /v1/chat/completions.",
    )?;
    Ok(None)
}
