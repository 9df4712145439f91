//! Keys, their file, and what a client meets.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, HeaderValue, Request, StatusCode, header};
use serde_json::{Value, json};
use tower::ServiceExt;

use super::{ApiKeys, digest, keep_reading};
use crate::access_log::tests::Lines;
use crate::app::App;
use crate::config::AccessLog;
use crate::error::ApiError;
use crate::routes::routes;
use crate::testing::{FakeGenerator, TestModel, settings};
use crate::workers::testing::until;

fn hex(key: &str) -> String {
    digest(key).iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").unwrap();
        hex
    })
}

fn headers(authorization: &str) -> HeaderMap {
    let value = HeaderValue::from_str(authorization).unwrap();
    HeaderMap::from_iter([(header::AUTHORIZATION, value)])
}

fn tenant(keys: &ApiKeys, authorization: &str) -> Result<String, String> {
    let caller = keys.caller(&headers(authorization));
    caller
        .map(|caller| caller.tenant().to_string())
        .map_err(|error| error.to_string())
}

#[test]
fn a_digest_is_that_of_sha_256() {
    // FIPS 180-2, appendix B.1.
    assert_eq!(
        hex("abc"),
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    );
}

#[test]
fn a_file_names_its_keys() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    let text = format!(
        "# clients\nweb {}\n\nbatch {} max-requests=2 # at night\n",
        hex("tk-1"),
        hex("tk-2").to_uppercase()
    );
    std::fs::write(&path, text).unwrap();
    let keys = ApiKeys::new(Some("CARGO_PKG_NAME")).unwrap();
    keys.read(&path).unwrap();
    assert_eq!(tenant(&keys, "Bearer tk-1").unwrap(), "web");
    assert_eq!(tenant(&keys, "bearer  tk-2").unwrap(), "batch");
    assert_eq!(
        tenant(&keys, "Bearer tasuki-router").unwrap(),
        "environment"
    );
    for wrong in ["Bearer tk-3", "Bearer", "Basic tk-1", "tk-1", "Bearer "] {
        assert!(tenant(&keys, wrong).is_err(), "{wrong}");
    }
    let batch = keys.caller(&headers("Bearer tk-2")).unwrap();
    let (one, _two) = (batch.enter().unwrap(), batch.enter().unwrap());
    let refused = batch.enter().unwrap_err();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    // The file is read again: what runs still counts.
    keys.read(&path).unwrap();
    assert!(
        keys.caller(&headers("Bearer tk-2"))
            .unwrap()
            .enter()
            .is_err()
    );
    // With another limit too.
    let more = |limit: u32| {
        std::fs::write(
            &path,
            format!("batch {} max-requests={limit}\n", hex("tk-2")),
        )
        .unwrap();
        keys.read(&path).unwrap();
        keys.caller(&headers("Bearer tk-2")).unwrap()
    };
    drop(more(3).enter().expect("a third one"));
    assert!(more(1).enter().is_err());
    drop(one);
    assert!(batch.enter().is_ok());
}

#[test]
fn a_bad_line_is_named_without_its_words() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    let good = hex("tk-1");
    for (line, wrong) in [
        ("web tk-secret", "the second word is not a SHA-256"),
        ("tk-secret", "the second word is not a SHA-256"),
        (
            &format!("web {good} 5"),
            "the third word is not max-requests=N",
        ),
        (&format!("web {good} max-requests=0"), "not a number from 1"),
        (
            &format!("web {good} max-requests=1 x"),
            "more than three words",
        ),
        (&format!("{} {good}", "x".repeat(65)), "more than 64 bytes"),
        (&format!("a {good}\nb {good}"), "twice"),
    ] {
        std::fs::write(&path, format!("# keys\n{line}\n")).unwrap();
        let keys = ApiKeys::new(None).unwrap();
        let error = keys.read(&path).unwrap_err().to_string();
        assert!(
            error.contains(wrong) && error.contains(", line "),
            "{error}"
        );
        assert!(!error.contains("tk-secret"), "{error}");
        assert!(
            tenant(&keys, "Bearer tk-1").is_err(),
            "nothing of it is taken"
        );
    }
    let unset = ApiKeys::new(Some("TASUKI_NO_SUCH_VARIABLE")).unwrap_err();
    assert!(unset.to_string().contains("is not set"));
    let missing = ApiKeys::new(None)
        .unwrap()
        .read(&folder.path().join("none"));
    assert!(missing.unwrap_err().to_string().contains("cannot be read"));
}

#[tokio::test]
async fn a_changed_file_is_read_again_and_a_broken_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    std::fs::write(&path, format!("a {}\n", hex("tk-a"))).unwrap();
    let keys = Arc::new(ApiKeys::new(None).unwrap());
    let text = keys.read(&path).unwrap();
    let reading = tokio::spawn(keep_reading(Arc::clone(&keys), path.clone(), text));
    let wait = async |key: &str, valid: bool| {
        let holds = async {
            while tenant(&keys, &format!("Bearer {key}")).is_ok() != valid {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let limit = Duration::from_secs(20);
        tokio::time::timeout(limit, holds)
            .await
            .expect("the file is read");
    };
    std::fs::write(&path, format!("b {}\n", hex("tk-b"))).unwrap();
    wait("tk-b", true).await;
    wait("tk-a", false).await;
    std::fs::write(&path, "nonsense\n").unwrap();
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    wait("tk-b", true).await;
    std::fs::write(&path, format!("c {}\n", hex("tk-c"))).unwrap();
    wait("tk-b", false).await;
    wait("tk-c", true).await;
    reading.abort();
}

#[tokio::test]
async fn a_file_that_is_being_written_is_not_taken() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    let line = format!("a {}\n", hex("tk-a"));
    std::fs::write(&path, &line).unwrap();
    let keys = Arc::new(ApiKeys::new(None).unwrap());
    let taken = keys.read(&path).unwrap();
    let reading = tokio::spawn(keep_reading(Arc::clone(&keys), path.clone(), taken));
    let mut text = String::new();
    for _ in 0..25 {
        std::fs::write(&path, &text).unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(tenant(&keys, "Bearer tk-a").unwrap(), "a");
        text += "# and more\n";
    }
    reading.abort();
}

#[tokio::test]
async fn a_file_that_stays_as_it_was_is_not_taken_again() {
    let (lines, _guard) = Lines::keep("info", AccessLog::Off);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    std::fs::write(&path, format!("a {}\n", hex("tk-a"))).unwrap();
    let keys = Arc::new(ApiKeys::new(None).unwrap());
    let text = keys.read(&path).unwrap();
    let reading = tokio::spawn(keep_reading(Arc::clone(&keys), path.clone(), text));
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    reading.abort();
    assert_eq!(lines.text(), "");
}

#[tokio::test]
async fn an_error_that_comes_again_is_logged_again() {
    let (lines, _guard) = Lines::keep("info", AccessLog::Off);
    let logged = |text: &str, times: usize| lines.text().matches(text).count() == times;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    let good = format!("a {}\n", hex("tk-a"));
    std::fs::write(&path, &good).unwrap();
    let keys = Arc::new(ApiKeys::new(None).unwrap());
    let reading = tokio::spawn(keep_reading(keys, path.clone(), String::new()));
    until("the keys", || logged("API keys read again", 1)).await;
    for times in 1..3 {
        std::fs::write(&path, "nonsense\n").unwrap();
        until("the error", || logged("the API keys stay", times)).await;
        std::fs::write(&path, &good).unwrap();
        tokio::time::sleep(Duration::from_millis(1_500)).await;
    }
    reading.abort();
}

fn guarded() -> (Arc<FakeGenerator>, Arc<App>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    std::fs::write(&path, format!("web {} max-requests=1\n", hex("tk-1"))).unwrap();
    let keys = ApiKeys::new(None).unwrap();
    keys.read(&path).unwrap();
    let generator = Arc::new(FakeGenerator::saying("Hi"));
    let models = TestModel::new().only();
    let app = App {
        keys: Some(Arc::new(keys)),
        ..App::new(Arc::clone(&generator) as _, models, settings())
    };
    (generator, Arc::new(app))
}

async fn send(app: &Arc<App>, path: &str, key: Option<&str>, body: Value) -> (StatusCode, Value) {
    let mut request = match body {
        Value::Null => Request::get(path),
        _ => Request::post(path),
    };
    if let Some(key) = key {
        request = request.header("authorization", format!("Bearer {key}"));
    }
    let request = request.body(Body::from(body.to_string())).unwrap();
    let response = routes(Arc::clone(app)).oneshot(request).await.unwrap();
    let status = response.status();
    let bytes = to_bytes(response.into_body(), 1 << 20).await.unwrap();
    (status, serde_json::from_slice(&bytes).unwrap_or_default())
}

#[tokio::test]
async fn a_refusal_whose_body_nobody_reads_ends_the_connection() {
    let (_generator, app) = guarded();
    for (method, path, key, status) in [
        ("POST", "/v1/completions", "tk-2", StatusCode::UNAUTHORIZED),
        ("POST", "/v1/embeddings", "tk-1", StatusCode::NOT_FOUND),
        (
            "PUT",
            "/v1/completions",
            "tk-1",
            StatusCode::METHOD_NOT_ALLOWED,
        ),
        ("POST", "/v1/completions", "tk-1", StatusCode::BAD_REQUEST), // it was read
    ] {
        let request = Request::builder().method(method).uri(path);
        let request = request.header("authorization", format!("Bearer {key}"));
        let request = request.body(Body::from("{}")).unwrap();
        let response = routes(Arc::clone(&app)).oneshot(request).await.unwrap();
        assert_eq!(response.status(), status);
        let said = response.headers().get(header::CONNECTION);
        let ends = said.is_some_and(|value| value == "close");
        assert_eq!(ends, status != StatusCode::BAD_REQUEST, "{path}");
    }
}

#[tokio::test]
async fn only_valid_keys_are_served() {
    let (generator, app) = guarded();
    let body = json!({"prompt": "a", "user": "somebody else"});
    for (key, path) in [
        (None, "/v1/completions"),
        (Some("tk-2"), "/v1/completions"),
        (None, "/v1/chat/completions"),
        (None, "/tokenize"),
        (None, "/detokenize"),
    ] {
        let (status, answer) = send(&app, path, key, body.clone()).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED, "{path}");
        assert_eq!(answer["error"]["code"], "invalid_api_key");
    }
    let (status, _) = send(&app, "/v1/models", None, Value::Null).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);
    assert!(generator.seen.lock().unwrap().is_empty());

    let (status, _) = send(&app, "/v1/completions", Some("tk-1"), body).await;
    assert_eq!(status, StatusCode::OK);
    // The key says whose the request is; the client's own word does not count.
    assert_eq!(&*generator.seen.lock().unwrap()[0].tenant, "web");
    for open in ["/health", "/health_generate", "/ready", "/live", "/metrics"] {
        let (status, _) = send(&app, open, None, Value::Null).await;
        assert_eq!(status, StatusCode::OK, "{open}");
    }
}

#[tokio::test]
async fn a_key_has_a_limit_of_its_own() {
    let (_generator, app) = guarded();
    let keys = app.keys.as_ref().unwrap();
    let running = keys
        .caller(&headers("Bearer tk-1"))
        .unwrap()
        .enter()
        .unwrap();
    let body = json!({"prompt": "a"});
    let limit = ApiError::KeyLimit {
        running: 1,
        limit: 1,
    };
    for path in [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/generate",
        "/tokenize",
        "/detokenize",
    ] {
        let (status, answer) = send(&app, path, Some("tk-1"), body.clone()).await;
        assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{path}");
        assert_eq!(answer["error"]["code"], "key_limit");
        assert_eq!(answer["error"]["message"], limit.to_string());
    }
    drop(running);
    for _ in 0..3 {
        let (status, _) = send(&app, "/v1/completions", Some("tk-1"), body.clone()).await;
        assert_eq!(
            status,
            StatusCode::OK,
            "a request that ended counts no more"
        );
    }
}
