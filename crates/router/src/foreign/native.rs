//! SGLang's own paths, for its clients and its operators.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tasuki_core::Role;

use super::object::Object;
use super::serve::{Incoming, serve};
use crate::api_keys::Caller;
use crate::app::{App, SglangModel};
use crate::error::ApiError;
use crate::openai::{Deadline, intake};
use crate::pool::Purpose;

/// `POST /generate`.
pub async fn generate(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let started = Instant::now();
    app.gate.check_open()?;
    let (parts, body) = request.into_parts();
    let caller = parts.extensions.get::<Caller>();
    let caller_permit = caller.map(Caller::enter).transpose()?;
    let body = app.bodies.read(&parts.headers, body).await?;
    let received = Instant::now();
    let deadline = Deadline::after(received, app.settings.request_timeout);
    let purpose = Purpose::Prompt {
        bytes: body.bytes.len(),
    };
    let parse = |_: &App, bytes: &[u8]| intake::parse_object(bytes);
    let body: Object = deadline
        .limit(intake::work_up(&app, purpose, body, parse))
        .await??;
    let asked: Option<String> = body.read("model");
    let SglangModel { model, identity } = app.find_sglang(asked.as_deref())?;
    let incoming = Incoming {
        path: "/generate",
        endpoint: "generate",
        caller_permit,
        parts,
        body,
        model,
        bound_to: Some(identity),
        started,
        received,
        deadline,
    };
    serve(app, incoming).await
}

/// `POST /flush_cache`: to every worker.
pub async fn flush_cache(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let answers = ask(&app, Method::POST, "/flush_cache").await?;
    let refused: Vec<String> = answers
        .iter()
        .filter(|answer| !answer.is_ok())
        .map(|answer| format!("worker {}: {}", answer.worker, answer.problem()))
        .collect();
    if refused.is_empty() {
        let text = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
        return Ok((text, "Cache flushed.\n").into_response());
    }
    let message = format!("Not all caches are flushed: {}", refused.join("; "));
    let body = json!({"error": {"message": message, "type": "server_error"}});
    Ok((StatusCode::BAD_GATEWAY, Json(body)).into_response())
}

/// `GET /get_server_info`: of all workers, as SGLang's own router has it.
pub async fn server_info(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let answers = ask(&app, Method::GET, "/get_server_info").await?;
    let of = |prefills: bool| {
        let answers = answers
            .iter()
            .filter(|a| (a.role == Role::Prefill) == prefills);
        answers.filter_map(Asked::json).collect::<Vec<Value>>()
    };
    let (prefill, decode) = (of(true), of(false));
    let states = decode.first().map(|info| info["internal_states"].clone());
    let body = json!({"internal_states": states, "prefill": prefill, "decode": decode});
    Ok(Json(body).into_response())
}

/// `GET /get_model_info`: of one worker.
pub async fn model_info(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let answers = ask(&app, Method::GET, "/get_model_info").await?;
    let info = answers.iter().find_map(Asked::json);
    let none = || ApiError::Unavailable {
        reason: "no SGLang worker answers".to_owned(),
        retry_after_s: 2,
    };
    info.map(|info| Json(info).into_response()).ok_or_else(none)
}

async fn ask(app: &App, method: Method, path: &'static str) -> Result<Vec<Asked>, ApiError> {
    let answers = app.generator.ask_sglang(method, path).await;
    if answers.is_empty() {
        return Err(ApiError::UnknownPath {
            path: format!("{path} (it is SGLang's, and no SGLang worker is up)"),
        });
    }
    Ok(answers)
}

/// What a worker answered.
#[derive(Debug)]
pub struct Asked {
    pub worker: tasuki_core::WorkerId,
    pub role: Role,
    /// Why there is no answer, without addresses.
    pub answer: Result<(StatusCode, axum::body::Bytes), String>,
}

impl Asked {
    fn is_ok(&self) -> bool {
        self.answer
            .as_ref()
            .is_ok_and(|(status, _)| status.is_success())
    }

    fn problem(&self) -> String {
        match &self.answer {
            Ok((status, _)) => format!("it answers {status}"),
            Err(error) => error.clone(),
        }
    }

    fn json(&self) -> Option<Value> {
        let (_, body) = self.answer.as_ref().ok().filter(|_| self.is_ok())?;
        serde_json::from_slice(body).ok()
    }
}
