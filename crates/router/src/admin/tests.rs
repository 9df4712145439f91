use std::time::Instant;

use axum::body::{Body, to_bytes};
use axum::extract::Request;
use serde_json::{Value, json};
use tasuki_core::ModelId;
use tasuki_flow::fleet::WorkerInfo;
use tower::ServiceExt;

use super::*;
use crate::workers::testing::{LocalWorker, ToWorker, local_info, registry};

async fn send(registry: &Arc<Registry>, request: Request) -> (u16, Value) {
    let response = routes(Arc::clone(registry)).oneshot(request);
    let (parts, body) = response.await.expect("an answer").into_parts();
    let bytes = to_bytes(body, usize::MAX).await.expect("a body");
    let body = serde_json::from_slice(&bytes).expect("JSON");
    (parts.status.as_u16(), body)
}

async fn order(registry: &Arc<Registry>, path: &str, body: &'static str) -> (u16, Value) {
    let request = Request::post(path).body(Body::from(body));
    send(registry, request.expect("a request")).await
}

async fn workers(registry: &Arc<Registry>) -> Value {
    let request = Request::get("/workers").body(Body::empty());
    let (status, body) = send(registry, request.expect("a request")).await;
    assert_eq!(status, 200, "{body}");
    body["workers"].clone()
}

fn message(body: &Value) -> &str {
    body["error"]["message"].as_str().expect("a message")
}

#[tokio::test]
async fn workers_are_listed_drained_and_given_roles() {
    let registry = registry(0);
    assert_eq!(workers(&registry).await, json!([]));
    let worker = registry.add("a:1");
    let (status, body) = order(&registry, "/workers/0/role", "{\"role\": \"decode\"}").await;
    assert_eq!(status, 409);
    assert!(
        message(&body).contains("worker 0 at a:1 is not connected"),
        "{body}"
    );
    let (link, mut local) = LocalWorker::new();
    let joined = registry.join(worker, local_info("e"), Arc::new(link), Instant::now());
    let key = joined.expect("joined").key;
    let listed = &workers(&registry).await[0];
    let shown = |body: &Value| {
        let fields = [
            "id",
            "address",
            "state",
            "engine_id",
            "model",
            "role",
            "legs",
        ];
        fields.map(|field| body[field].clone())
    };
    let expected = json!([0, "a:1", "ready", "e", "tiny", "mixed", 0]);
    assert_eq!(json!(shown(listed)), expected);
    assert_eq!(listed["identity"], "00000000000000000000000000000000");
    assert_eq!(listed["fails_by"], json!([]));

    let (status, body) = order(&registry, "/workers/0/drain", "").await;
    assert_eq!((status, &body["state"]), (200, &json!("draining")));
    assert_eq!(body["drains_because"], json!(["asked"]));
    assert!(registry.readiness(ModelId(0), Instant::now()).is_err());
    let (status, body) = order(&registry, "/workers/0/undrain", "").await;
    assert_eq!((status, &body["state"]), (200, &json!("ready")));
    registry.drain(worker, DrainReason::Unlisted);
    let (status, body) = order(&registry, "/workers/0/undrain", "").await;
    assert_eq!(status, 409);
    assert!(
        message(&body).contains("a:1 any more: list it again"),
        "{body}"
    );

    registry.undrain(worker, DrainReason::Unlisted);
    registry.drain(worker, DrainReason::Ending);
    let (status, body) = order(&registry, "/workers/0/undrain", "").await;
    assert_eq!(status, 409);
    assert!(message(&body).contains("told to end"), "{body}");

    let takes = async {
        let told = loop {
            match local.received() {
                Some(told) => break told,
                None => tokio::task::yield_now().await,
            }
        };
        assert_eq!(told, ToWorker::SetRole(Role::Decode, 1));
        let info = WorkerInfo {
            role: Role::Decode,
            role_epoch: 1,
            ..local_info("e")
        };
        assert!(registry.on_info(key, info));
    };
    let body = "{\"role\": \"decode\"}";
    let ((status, answer), ()) = tokio::join!(order(&registry, "/workers/0/role", body), takes);
    assert_eq!((status, &answer["role"]), (200, &json!("decode")));
}

#[tokio::test]
async fn a_worker_that_does_not_take_a_role_is_told_with_its_old_one() {
    let registry = registry(0);
    let worker = registry.add("a:1");
    let (link, _local) = LocalWorker::new();
    let joined = registry.join(worker, local_info("e"), Arc::new(link), Instant::now());
    joined.expect("joined");
    let (status, body) = order(&registry, "/workers/0/role", "{\"role\": \"decode\"}").await;
    assert_eq!((status, &body["role"]), (202, &json!("mixed")));
}

#[tokio::test]
async fn a_worker_of_another_engine_keeps_its_role() {
    let registry = registry(0);
    let worker = registry.add("vllm://a:1?role=prefill");
    let (link, mut local) = LocalWorker::new();
    let joined = registry.join(worker, local_info("e"), Arc::new(link), Instant::now());
    joined.expect("joined");
    let (status, body) = order(&registry, "/workers/0/role", "{\"role\": \"decode\"}").await;
    assert_eq!(status, 409, "{body}");
    assert!(message(&body).contains("in its address"), "{body}");
    assert_eq!(local.received(), None);
}

#[tokio::test]
async fn wrong_orders_are_refused_by_name() {
    let registry = registry(0);
    registry.add("a:1");
    for (path, body, status, says) in [
        (
            "/workers/7/drain",
            "",
            404,
            "worker \"7\" does not exist; the workers are [0]",
        ),
        ("/workers/x/undrain", "", 404, "worker \"x\""),
        (
            "/workers/0/role",
            "{\"role\": \"chief\"}",
            400,
            "unknown variant `chief`",
        ),
        ("/workers/0/role", "", 400, "send {\"role\": \"prefill\"}"),
        ("/workers/0", "", 404, "GET /workers"),
    ] {
        let (answered, body) = order(&registry, path, body).await;
        assert_eq!(answered, status, "{path} {body}");
        assert!(message(&body).contains(says), "{body}");
    }
    assert_eq!(workers(&registry).await[0]["state"], "connecting");
}
