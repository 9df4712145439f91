//! Every path that is served, and the answers that need no model.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, Method, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures::FutureExt;

use crate::access_log;
use crate::api_keys::Caller;
use crate::app::{App, MAX_QUOTED_CHARS};
use crate::error::ApiError;
use crate::foreign::native;
use crate::health_generate::health_generate;
use crate::openai;

/// Paths of other servers that are not here, by how they begin, and what to do instead.
const NOT_SERVED: &[(&str, &str)] = &[
    (
        "/v1/responses",
        " Nothing is stored here: POST /v1/responses takes the whole conversation.",
    ),
    (
        "/v1/conversations",
        " Nothing is stored here: POST /v1/responses takes the whole conversation.",
    ),
    ("/v1/embeddings", TEXT_ALONE),
    ("/v1/rerank", TEXT_ALONE),
    ("/v1/score", TEXT_ALONE),
    ("/v1/audio", TEXT_ALONE),
    ("/v1/images", TEXT_ALONE),
    ("/v1/moderations", TEXT_ALONE),
    ("/pooling", TEXT_ALONE),
    ("/v1/files", " Nothing is stored here."),
    (
        "/v1/batches",
        " Nothing is stored here: send the requests themselves.",
    ),
];
const NO_PROXY: &str = " CONNECT asks for a proxy, and this server is none: take it out of the client's proxy \
     settings (HTTPS_PROXY, HTTP_PROXY).";
const TEXT_ALONE: &str = " The workers generate text alone; ask a server of such models directly.";

/// Everything that clients are served.
pub fn routes(app: Arc<App>) -> Router {
    let routes = observed(paths(&app), Arc::clone(&app));
    match app.traces {
        Some(_) => routes.layer(from_fn_with_state(app, trace)),
        None => routes,
    }
}

/// What `--metrics-listen` serves.
pub fn metrics_alone(app: Arc<App>) -> Router {
    Router::new()
        .route(
            "/metrics",
            get(async |State(app): State<Arc<App>>| metrics_page(&app)),
        )
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .with_state(app)
}

/// What a connection beyond the limit of `max_connections` gets: one answer, a refusal
/// unless it is a GET. Health and metrics stay visible that way.
pub fn routes_beyond_the_limit(app: Arc<App>, max_connections: usize) -> Router {
    let refuse = move |request: Request, next: Next| async move {
        let mut response = if request.method() == Method::GET {
            next.run(request).await
        } else {
            let limit = max_connections;
            ApiError::Connections { limit }.into_response()
        };
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
        response
    };
    observed(paths(&app).layer(from_fn(refuse)), app)
}

/// Counts errors and logs refusals, those of panics too.
fn observed(paths: Router<Arc<App>>, app: Arc<App>) -> Router {
    paths
        .layer(from_fn(catch_panic))
        .layer(from_fn_with_state(Arc::clone(&app), observe_errors))
        .with_state(app)
}

fn paths(app: &Arc<App>) -> Router<Arc<App>> {
    let for_clients = Router::new()
        .route("/v1/chat/completions", post(openai::chat_completions))
        .route("/v1/responses", post(openai::responses))
        .route("/v1/completions", post(openai::completions))
        .route("/v1/models", get(openai::list_models))
        .route("/v1/models/{*name}", get(openai::retrieve_model))
        .route("/generate", post(openai::generate))
        .route("/flush_cache", post(native::flush_cache_for_clients))
        .route("/server_info", get(native::server_info_for_clients))
        .route("/get_server_info", get(native::server_info_for_clients))
        .route("/model_info", get(native::model_info))
        .route("/get_model_info", get(native::model_info))
        .route("/tokenize", post(openai::tokenize))
        .route("/detokenize", post(openai::detokenize))
        .route_layer(from_fn_with_state(Arc::clone(app), authenticate));
    for_clients
        .route("/health", get(ready))
        .route("/health_generate", get(health_generate))
        .route("/ready", get(ready))
        .route("/live", get(live))
        .route("/metrics", get(metrics))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
}

/// Where there are API keys, lets in who has one; the handlers learn who it is.
async fn authenticate(
    State(app): State<Arc<App>>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    if let Some(keys) = &app.keys {
        let caller = keys.caller(request.headers())?;
        request.extensions_mut().insert(caller);
    }
    let caller = request.extensions().get::<Caller>().cloned();
    let mut response = next.run(request).await;
    if let Some(caller) = caller {
        response.extensions_mut().insert(caller);
    }
    Ok(response)
}

/// A handler's panic is an answer with status 500; other requests do not notice it. The
/// panic's message and place are on stderr.
async fn catch_panic(request: Request, next: Next) -> Response {
    let answer = AssertUnwindSafe(next.run(request)).catch_unwind().await;
    answer.unwrap_or_else(|_| {
        tracing::error!("a handler panicked");
        ApiError::Failed("The server failed on this request.".into()).into_response()
    })
}

/// Probes repeat a refusal often; the metrics count it.
const PROBES: [&str; 4] = ["/health", "/health_generate", "/ready", "/live"];

/// Most refusals come before there is a generation to count, or to log.
async fn observe_errors(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().cloned();
    let started = Instant::now();
    let response = next.run(request).await;
    let status = response.status();
    if status.is_client_error() || status.is_server_error() {
        let path = path.as_ref().map_or("other", MatchedPath::as_str);
        let error = response.extensions().get::<ApiError>().map(ApiError::body);
        let reason = error.and_then(|body| body.error.code).unwrap_or_default();
        app.generator
            .count_http_error(path, status.as_u16(), reason);
        if !PROBES.contains(&path) {
            access_log::refused(&response, path, started);
        }
    }
    response
}

/// The handlers find the request's trace among its extensions.
async fn trace(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let traces = app.traces.as_ref();
    let trace = traces.and_then(|traces| traces.request(&request));
    if let Some(trace) = &trace {
        request.extensions_mut().insert(trace.clone());
    }
    let response = next.run(request).await;
    if let Some(trace) = trace.filter(|_| !access_log::is_logged(&response)) {
        trace.answered(&response);
    }
    response
}

async fn ready(State(app): State<Arc<App>>) -> Result<impl IntoResponse, ApiError> {
    app.gate.check_ready()?;
    app.generator
        .readiness(None)
        .map_err(|_| app.no_worker(None))?;
    Ok(Json(serde_json::json!({"status": "ok"})))
}

async fn live() -> impl IntoResponse {
    Json(serde_json::json!({"status": "ok"}))
}

async fn metrics(State(app): State<Arc<App>>) -> Result<impl IntoResponse, ApiError> {
    if !app.is_local {
        return Err(ApiError::MetricsElsewhere);
    }
    Ok(metrics_page(&app))
}

fn metrics_page(app: &App) -> impl IntoResponse + use<> {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], app.generator.metrics_text())
}

async fn unknown_path(request: Request) -> ApiError {
    let path = quoted_path(&request);
    let known = NOT_SERVED.iter().find(|(start, _)| path.starts_with(start));
    let instead = match request.method() {
        &Method::CONNECT => NO_PROXY,
        _ => known.map_or("", |(_, instead)| instead),
    };
    ApiError::UnknownPath { path, instead }
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::Method {
        method: request.method().to_string(),
        path: quoted_path(&request),
    }
}

fn quoted_path(request: &Request) -> String {
    let uri = request.uri();
    // The target of CONNECT is a host and a port.
    let path = match uri.path() {
        "" => uri.authority().map_or("", |authority| authority.as_str()),
        path => path,
    };
    path.chars().take(MAX_QUOTED_CHARS).collect()
}
