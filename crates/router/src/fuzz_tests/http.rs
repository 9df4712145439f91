//! Whole requests of clients: parsing, the table of fields, templates, tokenizing, the answer.

use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use tasuki_searches::{corpus, fuzz};
use tower::ServiceExt;

use crate::app::{App, HttpSettings};
use crate::routes::routes;
use crate::testing::{FakeGenerator, TestModel, settings};

const CORPUS: &str = include_str!("../../fuzz/http.txt");
const PATHS: [&str; 6] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/generate",
    "/v1/responses",
];
const ANSWER: &str = "<think>no</think>Hi <tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>";

/// A case is a path, a line's end and a body.
#[test]
fn fuzzed_bodies_are_answered_or_refused() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let generator = Arc::new(FakeGenerator::saying(ANSWER));
    let model = TestModel::new();
    let settings = HttpSettings {
        allow_chat_template: true,
        max_concurrent_requests: 1 << 20,
        max_body_bytes: 1 << 15,
        ..settings()
    };
    let app = Arc::new(App::new(
        Arc::clone(&generator) as _,
        model.only(),
        settings,
    ));
    let service = routes(app);
    fuzz("http", &corpus(CORPUS), 2_000, |bytes, _| {
        let end = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(0);
        let (head, body) = bytes.split_at(end);
        let known = PATHS.iter().position(|path| path.as_bytes() == head);
        let path = PATHS[known.unwrap_or(head.len() % PATHS.len())];
        let request = Request::post(path).body(Body::from(body.to_vec())).unwrap();
        let (status, answer) = runtime.block_on(async {
            let response = service.clone().oneshot(request).await.unwrap();
            let status = response.status();
            (
                status,
                to_bytes(response.into_body(), 1 << 24).await.unwrap(),
            )
        });
        let answer = String::from_utf8(answer.to_vec()).expect("UTF-8");
        assert!(
            status == StatusCode::OK || status.is_client_error(),
            "{status}: {answer}"
        );
        assert!(!answer.contains("The server failed"), "{answer}");
        generator.seen.lock().unwrap().clear();
        generator.started.lock().unwrap().clear();
        generator.http_errors.lock().unwrap().clear();
    });
}
