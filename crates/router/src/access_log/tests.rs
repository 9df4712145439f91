//! The lines of requests that end in different ways.

use std::io::Write;
use std::sync::{Arc, Mutex, Once};

use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use serde_json::{Value, json};
use tasuki_policy::NoPlacement;
use tower::ServiceExt;
use tracing::dispatcher::{DefaultGuard, set_default};

use super::is_on;
use crate::api_keys::ApiKeys;
use crate::app::App;
use crate::config::AccessLog;
use crate::log;
use crate::routes::routes;
use crate::serve::api::{Event, ServeError};
use crate::testing::{FakeGenerator, MODEL, TestModel, app, settings};

const PATH: &str = "/v1/completions";

/// What was logged.
#[derive(Clone, Default)]
pub struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Lines {
    /// Keeps what this thread logs, until the guard is dropped.
    pub fn keep(filter: &str, access: AccessLog) -> (Self, DefaultGuard) {
        // With one subscriber alone, `tracing` asks that of the thread that first comes to an
        // event whether anybody wants it, and other tests' threads have none.
        static OTHER: Once = Once::new();
        OTHER.call_once(|| {
            let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry());
        });
        let lines = Self::default();
        let kept = lines.clone();
        let lines_to = log::lines(filter, access, move || kept.clone()).unwrap();
        (lines, set_default(&lines_to))
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// The access log's lines, as objects.
    pub fn objects(&self) -> Vec<Value> {
        let text = self.text();
        let lines = text.lines().filter(|line| line.starts_with('{'));
        lines
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

pub async fn send(app: &Arc<App>, path: &str, body: Value) -> StatusCode {
    let request = Request::post(path)
        .body(Body::from(body.to_string()))
        .unwrap();
    let response = routes(Arc::clone(app)).oneshot(request).await.unwrap();
    let (head, body) = response.into_parts();
    to_bytes(body, usize::MAX).await.unwrap();
    head.status
}

#[tokio::test]
async fn a_request_has_one_line_whether_streamed_or_not() {
    let (lines, _guard) = Lines::keep("info", AccessLog::Json);
    let app = app(Arc::new(FakeGenerator::saying("abc")));
    for stream in [false, true] {
        let body = json!({"prompt": "private", "user": "team", "stream": stream});
        assert_eq!(send(&app, PATH, body).await, 200);
    }
    let objects = lines.objects();
    assert_eq!(objects.len(), 2, "{}", lines.text());
    for object in objects {
        let names = [
            "message",
            "model",
            "endpoint",
            "tenant",
            "outcome",
            "prefill_worker",
        ];
        let values = names.map(|name| object[name].as_str().unwrap());
        let expected = ["request ended", MODEL, PATH, "team", "finished", "p0"];
        assert_eq!(values, expected);
        let numbers = ["status", "prompt_tokens", "cached_tokens", "output_tokens"];
        assert_eq!(
            numbers.map(|name| object[name].as_u64()),
            [200, 7, 3, 4].map(Some)
        );
        assert!(object["elapsed_ms"].as_f64().unwrap() > 0.0);
        assert!(object["time"].as_str().unwrap().ends_with('Z'));
        assert!(object["request_id"].as_str().unwrap().starts_with("cmpl-"));
        assert!(object.get("reason").is_none() && object.get("queue_ms").is_none());
    }
    assert!(!lines.text().contains("private"));
}

#[tokio::test]
async fn a_refusal_has_one_line_with_its_status_and_reason() {
    let (lines, _guard) = Lines::keep("info", AccessLog::Json);
    let overloaded = FakeGenerator::new(|_| {
        vec![Event::Failed(ServeError::Overloaded {
            reason: "its first token would come in 9 s".to_owned(),
            retry_after_s: 9,
            over_share: false,
        })]
    });
    let prompt = || json!({"prompt": "x"});
    let down = app(Arc::new(FakeGenerator::down(NoPlacement::NoWorker)));
    let healthy = app(Arc::new(FakeGenerator::saying("abc")));
    for (app, path, body, status, reason) in [
        (
            &app(Arc::new(overloaded)),
            PATH,
            prompt(),
            503,
            "its first token would come in 9 s",
        ),
        (&down, PATH, prompt(), 503, "no worker is up"),
        (
            &healthy,
            PATH,
            json!({"prompt": "x", "model": "s3cret"}),
            404,
            "model_not_found",
        ),
        (
            &healthy,
            PATH,
            json!({"prompt": "x", "s3cret": 1}),
            400,
            "unsupported_parameter",
        ),
        (&healthy, "/s3cret", json!({}), 404, "unknown_path"),
    ] {
        let before = lines.objects().len();
        assert_eq!(send(app, path, body).await, status);
        let objects = lines.objects();
        assert_eq!(objects.len(), before + 1, "{}", lines.text());
        let object = &objects[before];
        assert_eq!(object["outcome"], "refused", "{object}");
        assert_eq!(object["status"], status);
        let said = object["reason"].as_str().unwrap();
        assert!(said.contains(reason), "{said}");
    }
    assert!(!lines.text().contains("s3cret"));
    let probe = Request::get("/ready").body(Body::empty()).unwrap();
    assert_eq!(routes(down).oneshot(probe).await.unwrap().status(), 503);
    assert_eq!(lines.objects().len(), 5, "probes have no line");
}

#[tokio::test]
async fn a_wrong_key_is_refused_and_not_logged() {
    let (lines, _guard) = Lines::keep("info", AccessLog::Text);
    let keys = ApiKeys::new(Some("CARGO_PKG_NAME")).unwrap();
    let generator = Arc::new(FakeGenerator::saying("abc"));
    let app = Arc::new(App {
        keys: Some(Arc::new(keys)),
        ..App::new(generator, TestModel::new().only(), settings())
    });
    for (key, body) in [
        ("s3cret", "{}"),
        (env!("CARGO_PKG_NAME"), r#"{"prompt": 1.5}"#),
    ] {
        let request = Request::post(PATH).header("authorization", format!("Bearer {key}"));
        let request = request.body(Body::from(body)).unwrap();
        routes(Arc::clone(&app)).oneshot(request).await.unwrap();
    }
    let text = lines.text();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(
        lines[0].contains(" INFO access: request refused "),
        "{text}"
    );
    assert!(lines[0].contains("status=401") && lines[0].contains("The API key is not valid."));
    assert!(lines[1].contains(r#"tenant="environment""#) && lines[1].contains("status=400"));
    assert!(!text.contains("s3cret"));
    assert!(!text.contains(env!("CARGO_PKG_NAME")));
}

#[tokio::test]
async fn a_client_that_hangs_up_has_a_line_without_a_status() {
    let (lines, _guard) = Lines::keep("info", AccessLog::Json);
    let generator = Arc::new(FakeGenerator::new(|_| Vec::new()));
    let app = app(Arc::clone(&generator));
    let sent = send(&app, PATH, json!({"prompt": "x"}));
    tokio::select! {
        biased;
        _ = sent => panic!("nothing was generated"),
        () = crate::workers::testing::until("a generation", || {
            !generator.started.lock().unwrap().is_empty()
        }) => {}
    }
    let objects = lines.objects();
    assert_eq!(objects.len(), 1, "{}", lines.text());
    assert_eq!(objects[0]["outcome"], "disconnected");
    assert!(objects[0].get("status").is_none());
}

#[tokio::test]
async fn off_and_a_filter_write_none() {
    for (filter, access) in [
        ("trace", AccessLog::Off),
        ("info,access=info", AccessLog::Off),
        ("warn", AccessLog::Json),
    ] {
        let (lines, _guard) = Lines::keep(filter, access);
        assert!(!is_on(), "{filter}");
        let app = app(Arc::new(FakeGenerator::saying("abc")));
        assert_eq!(send(&app, PATH, json!({"prompt": "x"})).await, 200);
        assert_eq!(send(&app, "/nowhere", json!({})).await, 404);
        let text = lines.text();
        assert!(
            !text.contains("request ended") && !text.contains("refused"),
            "{text}"
        );
    }
    let (_lines, _guard) = Lines::keep("info", AccessLog::Text);
    assert!(is_on());
}
