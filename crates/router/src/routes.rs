//! Every path that is served, and the answers that need no model.

use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use crate::app::{App, MAX_QUOTED_CHARS};
use crate::error::ApiError;
use crate::openai;

/// Everything that is served.
pub fn routes(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(openai::chat_completions))
        .route("/v1/completions", post(openai::completions))
        .route("/v1/models", get(openai::list_models))
        .route("/v1/models/{*name}", get(openai::retrieve_model))
        .route("/tokenize", post(openai::tokenize))
        .route("/detokenize", post(openai::detokenize))
        .route("/health", get(ready))
        .route("/ready", get(ready))
        .route("/live", get(live))
        .route("/metrics", get(metrics))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(&app), count_errors))
        .with_state(app)
}

/// Most refusals come before there is a generation to count.
async fn count_errors(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().cloned();
    let response = next.run(request).await;
    let status = response.status();
    if status.is_client_error() || status.is_server_error() {
        let path = path.as_ref().map_or("other", MatchedPath::as_str);
        app.generator.count_http_error(path, status.as_u16());
    }
    response
}

async fn ready(State(app): State<Arc<App>>) -> Result<impl IntoResponse, ApiError> {
    if app.gate.is_draining() {
        return Err(ApiError::Draining);
    }
    app.generator.readiness().map_err(|_| app.no_worker())?;
    Ok(Json(serde_json::json!({"status": "ok"})))
}

async fn live() -> impl IntoResponse {
    Json(serde_json::json!({"status": "ok"}))
}

async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], app.generator.metrics_text())
}

async fn unknown_path(request: Request) -> ApiError {
    ApiError::UnknownPath {
        path: quoted_path(&request),
    }
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::Method {
        method: request.method().to_string(),
        path: quoted_path(&request),
    }
}

fn quoted_path(request: &Request) -> String {
    request
        .uri()
        .path()
        .chars()
        .take(MAX_QUOTED_CHARS)
        .collect()
}
