//! A page for people, beside the admin API: the workers and their load, the links between them,
//! latencies of the last minutes and the last requests. The page asks for `/dashboard/state`
//! once a second; nothing of it comes from elsewhere.

mod histogram;
mod recorder;

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderValue;
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::http::header::{REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Serialize;

pub use recorder::{Objectives, Phases, Recorder, Request};

use crate::admin::Worker;
use crate::metrics::Metrics;
use crate::workers::Registry;

/// The page may use our own files and nothing else, and no other page may frame it.
const CONTENT_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
                              img-src 'self'; connect-src 'self'; base-uri 'none'; \
                              form-action 'none'; frame-ancestors 'none'";

/// Path, type and content of each file of the page.
const FILES: [(&str, &str, &str); 5] = [
    (
        "/dashboard",
        "text/html; charset=utf-8",
        include_str!("page/dashboard.html"),
    ),
    (
        "/dashboard/dashboard.css",
        "text/css; charset=utf-8",
        include_str!("page/dashboard.css"),
    ),
    (
        "/dashboard/charts.js",
        "text/javascript; charset=utf-8",
        include_str!("page/charts.js"),
    ),
    (
        "/dashboard/dashboard.js",
        "text/javascript; charset=utf-8",
        include_str!("page/dashboard.js"),
    ),
    (
        "/dashboard/icon.svg",
        "image/svg+xml",
        include_str!("page/icon.svg"),
    ),
];

/// Everything that the dashboard needs to know.
#[derive(Clone)]
pub struct Source {
    pub registry: Arc<Registry>,
    pub metrics: Arc<Metrics>,
}

/// The page and its state.
pub fn routes(source: Source) -> Router {
    let mut routes = Router::new().route("/dashboard/state", get(state));
    for (path, kind, content) in FILES {
        routes = routes.route(path, get(async move || file(kind, content)));
    }
    routes.with_state(source)
}

fn file(kind: &'static str, content: &'static str) -> Response {
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static(kind)),
        (
            CONTENT_SECURITY_POLICY,
            HeaderValue::from_static(CONTENT_POLICY),
        ),
        (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, content).into_response()
}

#[derive(Serialize)]
struct Snapshot {
    /// Of Tasuki.
    version: &'static str,
    workers: Vec<Worker>,
    requests_in_flight: i64,
    /// Those of them that wait to be placed.
    requests_waiting: usize,
    #[serde(flatten)]
    past: recorder::Past,
}

async fn state(State(source): State<Source>) -> impl IntoResponse {
    let (requests_waiting, ..) = source.registry.waiting();
    let snapshot = Snapshot {
        version: env!("CARGO_PKG_VERSION"),
        workers: source.registry.read(|known| Worker::new(&known)),
        requests_in_flight: source.metrics.in_flight.get(),
        requests_waiting,
        past: source.metrics.recorder.past(),
    };
    ([(CACHE_CONTROL, "no-store")], Json(snapshot))
}
