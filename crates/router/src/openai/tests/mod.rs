//! The whole HTTP side against a scripted serving layer.

mod bound_calls;
mod chat;
mod completions;
mod generate;
mod health_generate;
mod models;
mod named_fields;
mod refusals;
mod responses;
mod serving;
mod structured;
mod tokenize;
mod tool_calls;
mod unseen;

use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request, StatusCode};
use serde_json::Value;
use tower::ServiceExt;

use crate::app::App;
use crate::routes::routes;
use crate::testing::{FakeGenerator, app};

/// An answer, read to its end.
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    text: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap()
    }

    /// The data of a stream's events, parsed; the last must be `[DONE]`.
    fn events(&self) -> Vec<Value> {
        let mut events = self.raw_events();
        assert_eq!(events.pop().unwrap(), "data: [DONE]");
        let parse = |event: String| {
            let data = event.strip_prefix("data: ").expect("plain event");
            serde_json::from_str(data).unwrap()
        };
        events.into_iter().map(parse).collect()
    }

    fn raw_events(&self) -> Vec<String> {
        assert_eq!(
            self.headers["content-type"],
            "text/event-stream; charset=utf-8"
        );
        let body = self.text.strip_suffix("\n\n").expect("whole events");
        body.split("\n\n").map(str::to_owned).collect()
    }
}

async fn send(app: &Arc<App>, request: Request<Body>) -> Answer {
    let response = routes(Arc::clone(app)).oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let bytes = to_bytes(body, usize::MAX).await.unwrap();
    Answer {
        status: parts.status,
        headers: parts.headers,
        text: String::from_utf8(bytes.to_vec()).unwrap(),
    }
}

async fn post_bytes(app: &Arc<App>, path: &str, body: impl Into<Body>) -> Answer {
    send(app, Request::post(path).body(body.into()).unwrap()).await
}

async fn post(app: &Arc<App>, path: &str, body: Value) -> Answer {
    post_bytes(app, path, body.to_string()).await
}

async fn get(app: &Arc<App>, path: &str) -> Answer {
    send(app, Request::get(path).body(Body::empty()).unwrap()).await
}

fn saying(text: &'static str) -> (Arc<FakeGenerator>, Arc<App>) {
    let generator = Arc::new(FakeGenerator::saying(text));
    (Arc::clone(&generator), app(generator))
}
