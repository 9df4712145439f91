use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use futures::StreamExt;
use serde_json::json;
use tokio::time::timeout;
use tower::ServiceExt;

use super::{get, post, saying};
use crate::app::{App, HttpSettings};
use crate::openai::Generator;
use crate::routes::routes;
use crate::serve::api::Event;
use crate::testing::{FakeGenerator, TestModel, app, settings, tokens_of};

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn health_is_readiness_and_live_is_not() {
    let up = app(Arc::new(FakeGenerator::saying("")));
    let down = app(Arc::new(FakeGenerator::down("no prefill worker is up")));
    for path in ["/health", "/ready"] {
        assert_eq!(get(&up, path).await.status, StatusCode::OK);
        let answer = get(&down, path).await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(answer.text.contains("no prefill worker is up"));
        assert!(answer.headers.contains_key("retry-after"));
    }
    assert_eq!(get(&down, "/live").await.status, StatusCode::OK);
    let metrics = get(&up, "/metrics").await;
    assert!(metrics.text.ends_with("# EOF\n"));
}

#[tokio::test]
async fn draining_turns_new_requests_away() {
    let (_, app) = saying("x");
    app.gate.close();
    let answer = post(&app, PATH, json!({"prompt": "x"})).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.headers.contains_key("retry-after"));
    assert_eq!(
        get(&app, "/health").await.status,
        StatusCode::SERVICE_UNAVAILABLE
    );
    assert_eq!(get(&app, "/live").await.status, StatusCode::OK);
}

/// A stream that has begun and goes on.
async fn open_stream(app: &Arc<App>) -> axum::body::BodyDataStream {
    let body = json!({"prompt": "x", "stream": true}).to_string();
    let request = Request::post(PATH).body(Body::from(body)).unwrap();
    let response = routes(Arc::clone(app)).oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let mut stream = response.into_body().into_data_stream();
    stream.next().await.unwrap().unwrap();
    stream
}

fn endless() -> Arc<FakeGenerator> {
    Arc::new(FakeGenerator::new(|_| {
        vec![Event::Tokens {
            choice: 0,
            tokens: tokens_of("a"),
            logprobs: Vec::new(),
            finish: None,
        }]
    }))
}

#[tokio::test]
async fn a_client_that_hangs_up_aborts_the_generation() {
    let generator = endless();
    let app = app(Arc::clone(&generator));
    let stream = open_stream(&app).await;
    let events = generator.started.lock().unwrap()[0].0.clone();
    assert!(!events.is_closed());
    drop(stream);
    assert!(events.is_closed());
}

#[tokio::test]
async fn a_client_that_stops_reading_loses_its_place() {
    let generator = endless();
    let model = TestModel::new();
    let patience = Duration::from_millis(50);
    let app = Arc::new(App::new(
        Arc::clone(&generator) as Arc<dyn Generator>,
        Arc::clone(&model.text),
        HttpSettings {
            client_patience: patience,
            ..settings()
        },
    ));
    let mut stream = open_stream(&app).await;
    let events = generator.started.lock().unwrap()[0].0.clone();
    // It waits for us: however long that takes, it is not slow.
    let waits = timeout(3 * patience, stream.next());
    assert!(waits.await.is_err(), "nothing more was said");
    assert!(!events.is_closed());
    let more = Event::Tokens {
        choice: 0,
        tokens: tokens_of("b"),
        logprobs: Vec::new(),
        finish: None,
    };
    events.send(more).unwrap();
    stream.next().await.unwrap().unwrap();
    // It has been served and asks for nothing more.
    let aborted = timeout(Duration::from_secs(20), events.closed());
    assert!(aborted.await.is_ok(), "the generation goes on");
    assert!(app.gate.wait_empty(Duration::from_secs(20)).await);
    let cut = stream.next().await.unwrap();
    assert!(cut.unwrap_err().to_string().contains("50ms"));
}

#[tokio::test]
async fn errors_are_counted_by_path_and_status() {
    let (generator, app) = saying("x");
    post(&app, PATH, json!({"prompt": "x", "n": 0})).await;
    post(&app, PATH, json!({"prompt": "x"})).await;
    get(&app, PATH).await;
    get(&app, "/nowhere/4711").await;
    get(&app, "/v1/models/none").await;
    app.gate.close();
    post(&app, "/v1/chat/completions", json!({})).await;
    let counted = generator.http_errors.lock().unwrap().clone();
    let expected = [
        (PATH, 400),
        (PATH, 405),
        ("other", 404),
        ("/v1/models/{*name}", 404),
        ("/v1/chat/completions", 503),
    ];
    assert_eq!(
        counted,
        expected.map(|(path, code)| (path.to_owned(), code))
    );
}

#[tokio::test]
async fn running_streams_count_against_the_limit_until_they_end() {
    let app = app(endless());
    let mut streams = Vec::new();
    for _ in 0..app.settings.max_concurrent_requests {
        streams.push(open_stream(&app).await);
    }
    let body = json!({"prompt": "x"});
    let answer = post(&app, PATH, body).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.text.contains("4 requests are running"));
    streams.pop();
    streams.push(open_stream(&app).await);
}

#[tokio::test]
async fn a_generation_that_vanishes_is_an_error() {
    let generator = endless();
    let app = app(Arc::clone(&generator));
    let mut stream = open_stream(&app).await;
    generator.started.lock().unwrap().clear();
    let event = stream.next().await.unwrap().unwrap();
    assert!(event.starts_with(b"event: error\n"));
    assert!(stream.next().await.is_none());
}
