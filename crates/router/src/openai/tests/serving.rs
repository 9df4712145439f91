use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use futures::StreamExt;
use serde_json::json;
use tasuki_core::{FailureKind, Role};
use tasuki_policy::NoPlacement;
use tower::ServiceExt;

use super::{get, post, saying};
use crate::app::{App, HttpSettings};
use crate::openai::Generator;
use crate::routes::{metrics_alone, routes};
use crate::serve::api::{Event, ServeError};
use crate::testing::{FakeGenerator, TestModel, app, settings, tokens_of};

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn health_is_readiness_and_live_is_not() {
    let up = app(Arc::new(FakeGenerator::saying("")));
    let no_prefill = NoPlacement::NoRole {
        role: Role::Prefill,
    };
    let down = app(Arc::new(FakeGenerator::down(no_prefill)));
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
async fn metrics_are_elsewhere_where_clients_come_from_a_network() {
    let generator = Arc::new(FakeGenerator::saying(""));
    let mut open = Arc::into_inner(app(generator)).expect("no other owner");
    open.is_local = false;
    let open = Arc::new(open);
    let answer = get(&open, "/metrics").await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    assert!(answer.text.contains("--metrics-listen"), "{}", answer.text);
    let request = |path: &str| Request::get(path).body(Body::empty()).unwrap();
    let alone = metrics_alone(open);
    for (path, status) in [
        ("/metrics", StatusCode::OK),
        ("/v1/models", StatusCode::NOT_FOUND),
        ("/ready", StatusCode::NOT_FOUND),
    ] {
        let answer = alone.clone().oneshot(request(path)).await.unwrap();
        assert_eq!(answer.status(), status, "{path}");
    }
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

/// An endless generation behind settings of the test's own.
fn endless_with(change: impl FnOnce(&mut HttpSettings)) -> (Arc<FakeGenerator>, Arc<App>) {
    let generator = endless();
    let mut settings = settings();
    change(&mut settings);
    let model = TestModel::new();
    let fake = Arc::clone(&generator) as Arc<dyn Generator>;
    let app = App::new(fake, model.only(), settings);
    (generator, Arc::new(app))
}

#[tokio::test]
async fn a_stream_that_waits_sends_its_headers_and_comments() {
    let generator = Arc::new(FakeGenerator::new(|_| Vec::new()));
    let model = TestModel::new();
    let settings = HttpSettings {
        heartbeat: Duration::from_millis(20),
        ..settings()
    };
    let fake = Arc::clone(&generator) as Arc<dyn Generator>;
    let app = Arc::new(App::new(fake, model.only(), settings));
    let body = json!({"messages": [{"role": "user", "content": "x"}], "stream": true});
    let request = Request::post("/v1/chat/completions").body(Body::from(body.to_string()));
    let response = routes(Arc::clone(&app))
        .oneshot(request.unwrap())
        .await
        .unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let mut stream = response.into_body().into_data_stream();
    for _ in 0..2 {
        let comment = stream.next().await.unwrap().unwrap();
        assert!(
            comment.starts_with(b": ") && comment.ends_with(b"\n\n"),
            "{comment:?}"
        );
    }
    let events = generator.started.lock().unwrap()[0].0.clone();
    let tokens = |text| Event::Tokens {
        choice: 0,
        tokens: tokens_of(text),
        logprobs: Vec::new(),
        finish: None,
    };
    events.send(tokens("a"));
    let mut text = String::new();
    while !text.contains("\"content\":\"a\"") {
        let frame = stream.next().await.unwrap().unwrap();
        text.push_str(std::str::from_utf8(&frame).unwrap());
    }
    assert_eq!(text.matches("\"role\":\"assistant\"").count(), 1, "{text}");
    let comment = stream.next().await.unwrap().unwrap();
    assert!(comment.starts_with(b": "), "{comment:?}");
}

#[tokio::test]
async fn an_error_before_the_first_heartbeat_has_its_status() {
    let generator = FakeGenerator::new(|_| {
        let (message, param) = ("no".to_owned(), None);
        vec![Event::Failed(ServeError::Rejected { message, param })]
    });
    let app = app(Arc::new(generator));
    let answer = post(&app, PATH, json!({"prompt": "x", "stream": true})).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_client_sees_the_kind_of_a_failure_and_whether_to_retry() {
    for kind in FailureKind::ALL {
        let generator = FakeGenerator::new(move |_| {
            let message = "no".to_owned();
            vec![Event::Failed(ServeError::Failed { kind, message })]
        });
        let answer = post(&app(Arc::new(generator)), PATH, json!({"prompt": "x"})).await;
        assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(answer.json()["error"]["code"], format!("{kind}_failure"));
        let told = answer.headers.get("x-should-retry");
        let helps = !matches!(kind, FailureKind::Client | FailureKind::Model);
        assert_eq!(told.is_none(), helps, "{kind}: {told:?}");
    }
}

#[tokio::test]
async fn a_request_that_takes_too_long_is_ended() {
    let limit = Duration::from_millis(50);
    let (generator, app) = endless_with(|settings| settings.request_timeout = limit);
    let whole = post(&app, PATH, json!({"prompt": "x"})).await;
    assert_eq!(whole.status, StatusCode::GATEWAY_TIMEOUT, "{}", whole.text);
    assert!(whole.text.contains("--request-timeout-s"), "{}", whole.text);
    let stream = post(&app, PATH, json!({"prompt": "x", "stream": true})).await;
    assert_eq!(stream.status, StatusCode::OK);
    let last = stream.raw_events().pop().unwrap();
    assert!(
        last.starts_with("event: error\n") && last.contains("50ms"),
        "{last}"
    );
    let started = generator.started.lock().unwrap();
    assert!(started.iter().all(|(events, _)| events.is_closed()));
}

#[tokio::test]
async fn a_handlers_panic_is_an_answer() {
    let generator = FakeGenerator::new(|_| panic!("planted"));
    let (generator, app) = {
        let generator = Arc::new(generator);
        (Arc::clone(&generator), app(generator))
    };
    let answer = post(&app, PATH, json!({"prompt": "x"})).await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(answer.json()["error"]["type"], "server_error");
    assert_eq!(
        generator.http_errors.lock().unwrap()[0],
        (PATH.to_owned(), 500, String::new())
    );
    assert!(app.gate.wait_empty(Duration::from_secs(20)).await);
}

#[tokio::test]
async fn errors_are_counted_by_path_status_and_reason() {
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
        (PATH, 400, ""),
        (PATH, 405, ""),
        ("other", 404, ""),
        ("/v1/models/{*name}", 404, "model_not_found"),
        ("/v1/chat/completions", 503, "shutting_down"),
    ];
    assert_eq!(
        counted,
        expected.map(|(path, code, reason)| (path.to_owned(), code, reason.to_owned()))
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
    assert!(
        answer.text.contains("4 sequences are running"),
        "{}",
        answer.text
    );
    streams.pop();
    streams.push(open_stream(&app).await);
}

#[tokio::test]
async fn sequences_count_and_bodies_do_not() {
    let (_, app) = endless_with(|_| {});
    // Bodies that never end hold no place.
    let slow: Vec<_> = (0..64)
        .map(|_| {
            let body = Body::from_stream(futures::stream::pending::<Result<Vec<u8>, Infallible>>());
            let request = Request::post(PATH).body(body).unwrap();
            tokio::spawn(routes(Arc::clone(&app)).oneshot(request))
        })
        .collect();
    let three = json!({"prompt": ["x", "y", "z"], "stream": true});
    let request = Request::post(PATH)
        .body(Body::from(three.to_string()))
        .unwrap();
    let stream = routes(Arc::clone(&app)).oneshot(request).await.unwrap();
    assert_eq!(stream.status(), StatusCode::OK);
    let answer = post(&app, PATH, json!({"prompt": "x", "n": 2})).await;
    assert_eq!(
        answer.status,
        StatusCode::SERVICE_UNAVAILABLE,
        "{}",
        answer.text
    );
    assert!(
        answer
            .text
            .contains("3 sequences are running and this request has 2")
    );
    let never = post(&app, PATH, json!({"prompt": "x", "n": 5})).await;
    assert_eq!(never.status, StatusCode::BAD_REQUEST, "{}", never.text);
    let _fourth = open_stream(&app).await;
    slow.iter().for_each(|request| request.abort());
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
