//! SGLang's own paths that do not generate, for its clients and its operators. They speak of
//! our workers too.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tasuki_core::Role;

use crate::app::App;
use crate::discovery::Engine;
use crate::error::ApiError;
use crate::workers::foreign::{MODEL_INFO, SERVER_INFO};

/// What the port of operators has of them.
pub fn for_operators(app: Arc<App>) -> Router {
    Router::new()
        .route("/flush_cache", post(flush_cache))
        .route("/server_info", get(server_info))
        .route("/get_server_info", get(server_info))
        .with_state(app)
}

/// `POST /flush_cache` of clients. Whoever may send it makes every other client's prompts slow, so
/// clients of a network may not.
pub async fn flush_cache_for_clients(app: State<Arc<App>>) -> Result<Response, ApiError> {
    match app.is_local {
        true => flush_cache(app).await,
        false => Err(ApiError::ForOperators {
            path: "/flush_cache",
        }),
    }
}

/// `GET /server_info` of clients. What SGLang workers tell has their hosts, ports and folders,
/// so clients of a network only get our models.
pub async fn server_info_for_clients(app: State<Arc<App>>) -> Response {
    match app.is_local {
        true => server_info(app).await,
        false => described(&app, &[]),
    }
}

/// `POST /flush_cache`: to every worker.
async fn flush_cache(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let own = app.generator.flush_caches();
    let answers = app
        .generator
        .ask_sglang(Method::POST, &["/flush_cache"])
        .await;
    if own == 0 && answers.is_empty() {
        return Err(app.no_worker(None));
    }
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

/// `GET /server_info`: of SGLang's workers as SGLang's own router has it, and our models.
async fn server_info(State(app): State<Arc<App>>) -> Response {
    let answers = app.generator.ask_sglang(Method::GET, &SERVER_INFO).await;
    described(&app, &answers)
}

fn described(app: &App, answers: &[Asked]) -> Response {
    let own: Vec<Value> = app
        .models
        .named()
        .map(|(name, _)| own_model(app, name))
        .collect();
    let version = env!("CARGO_PKG_VERSION");
    if answers.is_empty() {
        let states: [Value; 0] = [];
        let body = json!({"internal_states": states, "models": own, "version": version});
        return Json(body).into_response();
    }
    let of = |prefills: bool| {
        let answers = answers
            .iter()
            .filter(|a| (a.role == Role::Prefill) == prefills);
        answers.filter_map(Asked::json).collect::<Vec<Value>>()
    };
    let (prefill, decode) = (of(true), of(false));
    let states = decode.first().map(|info| info["internal_states"].clone());
    let mut body = json!({"internal_states": states, "prefill": prefill, "decode": decode});
    if !own.is_empty() {
        body["models"] = own.into();
    }
    Json(body).into_response()
}

/// `GET /model_info`: of our first model, else of one SGLang worker, which clients of a network
/// are told the name of alone: it tells its folders.
pub async fn model_info(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    if let Some((name, _)) = app.models.named().next() {
        return Ok(Json(own_model(&app, name)).into_response());
    }
    let info = match app.is_local {
        true => {
            let asked = app.generator.ask_sglang(Method::GET, &MODEL_INFO);
            asked.await.iter().find_map(Asked::json)
        }
        false => {
            let catalog = app.generator.catalog();
            let models = app.foreign_models();
            let mut models = models.iter();
            let model = models.find(|model| catalog.identity(model.id, Engine::Sglang).is_some());
            model.map(|model| by_name(&model.names[0], model.max_model_len))
        }
    };
    let none = || ApiError::Unavailable {
        reason: "no SGLang worker answers".to_owned(),
        retry_after_s: 2,
    };
    info.map(|info| Json(info).into_response()).ok_or_else(none)
}

fn own_model(app: &App, name: &str) -> Value {
    let model = app.models.find(Some(name)).ok();
    by_name(name, model.and_then(|(_, model)| app.max_model_len(&model)))
}

/// Folders are not for clients: the path of a model is its name.
fn by_name(name: &str, context_length: Option<u32>) -> Value {
    json!({
        "model_path": name,
        "served_model_name": name,
        "tokenizer_path": name,
        "is_generation": true,
        "context_length": context_length,
    })
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
