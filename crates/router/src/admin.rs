//! The admin API: what the workers are and do, and orders to them. `operators` has its port.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use tasuki_core::{Health, Role, WorkerId};
use tasuki_flow::fleet::DrainReason;

use crate::discovery::Address;
use crate::workers::{Known, Registry};

/// Every path of the admin API.
pub fn routes(registry: Arc<Registry>) -> Router {
    Router::new()
        .route("/workers", get(list))
        .route("/workers/{id}/drain", post(drain))
        .route("/workers/{id}/undrain", post(undrain))
        .route("/workers/{id}/role", post(set_role))
        .fallback(async || AdminError::UnknownPath)
        .with_state(registry)
}

/// Why an order is not carried out.
#[derive(Debug, thiserror::Error)]
enum AdminError {
    #[error("worker {given:?} does not exist; the workers are {known:?} (GET /workers)")]
    NoWorker { given: String, known: Vec<u32> },
    #[error(
        "worker {worker} at {address} is not connected, so its role cannot be set: try again when \
         its state is ready"
    )]
    NotConnected { worker: WorkerId, address: String },
    #[error(
        "worker {worker} at {address} is of another engine and keeps the role in its address \
         (?role=): start it for the other role and list it with that"
    )]
    OtherEngine { worker: WorkerId, address: String },
    #[error(
        "worker {worker} drains because no source of addresses has {address} any more: list it \
         again"
    )]
    Unlisted { worker: WorkerId, address: String },
    #[error(
        "worker {worker} at {address} drains because it was told to end (SIGTERM): start it again"
    )]
    Ending { worker: WorkerId, address: String },
    #[error(
        "the body is no role ({0}): send {{\"role\": \"prefill\"}}, {{\"role\": \"decode\"}} or \
         {{\"role\": \"mixed\"}}"
    )]
    NoRole(#[from] serde_json::Error),
    #[error(
        "there is GET /workers, /dashboard and /server_info, and POST /workers/ID/drain, \
         /workers/ID/undrain, /workers/ID/role and /flush_cache"
    )]
    UnknownPath,
}

impl IntoResponse for AdminError {
    fn into_response(self) -> Response {
        let status = match self {
            Self::NoWorker { .. } | Self::UnknownPath => StatusCode::NOT_FOUND,
            Self::NotConnected { .. }
            | Self::OtherEngine { .. }
            | Self::Unlisted { .. }
            | Self::Ending { .. } => StatusCode::CONFLICT,
            Self::NoRole(_) => StatusCode::BAD_REQUEST,
        };
        let body = serde_json::json!({"error": {"message": self.to_string()}});
        (status, Json(body)).into_response()
    }
}

#[derive(Debug, Serialize)]
struct Workers {
    workers: Vec<Worker>,
}

/// A worker, as the router sees it.
#[derive(Debug, Serialize)]
pub struct Worker {
    id: u32,
    address: String,
    /// connecting, ready, suspect, draining, failing or down.
    state: &'static str,
    /// Kinds of failure that it had in a row: of those, one request at a time is tried there.
    fails_by: Vec<&'static str>,
    /// Why it gets no new requests; empty: it does.
    drains_because: Vec<&'static str>,
    /// As of its last connection, as all that follows; null before the first one.
    engine_id: Option<String>,
    model: Option<String>,
    /// Workers of equal identity exchange KV.
    identity: Option<String>,
    role: Option<&'static str>,
    /// Parts of requests that this router has there.
    legs: usize,
    load: Option<Load>,
}

/// A worker's last report, of all routers' requests.
#[derive(Debug, Serialize)]
struct Load {
    waiting_requests: u32,
    running_requests: u32,
    waiting_prefill_tokens: u64,
    free_blocks: u32,
    total_blocks: u32,
}

impl Worker {
    pub fn new(known: &Known<'_>) -> Self {
        let (state, info) = (known.state, known.state.info.as_ref());
        let reasons = [
            (DrainReason::Asked, "asked"),
            (DrainReason::Unlisted, "unlisted"),
            (DrainReason::Ending, "ending"),
        ];
        let drains = |(reason, _): &(DrainReason, _)| state.drains_because(*reason);
        let identity = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Self {
            id: state.view.id.0,
            address: known.address.to_owned(),
            state: match state.view.health {
                Health::Ready => "ready",
                Health::Suspect => "suspect",
                Health::Draining => "draining",
                Health::Failing => "failing",
                Health::Down if info.is_none() => "connecting",
                Health::Down => "down",
            },
            fails_by: state
                .breakers()
                .read()
                .filter_map(|(kind, open, _)| open.then_some(kind.as_str()))
                .collect(),
            drains_because: reasons
                .into_iter()
                .filter(drains)
                .map(|(_, is)| is)
                .collect(),
            engine_id: info.map(|info| info.peer.engine_id.clone()),
            model: info.map(|info| info.model.clone()),
            identity: info.map(|info| identity(&info.domain.identity.0)),
            role: info.map(|_| state.view.role.as_str()),
            legs: state.running_legs(),
            load: known.exported.map(|load| Load {
                waiting_requests: load.waiting_requests,
                running_requests: load.running_requests,
                waiting_prefill_tokens: load.waiting_prefill_tokens,
                free_blocks: load.free_blocks,
                total_blocks: load.total_blocks,
            }),
        }
    }
}

type Answer = Result<Json<Worker>, AdminError>;

async fn list(State(registry): State<Arc<Registry>>) -> Json<Workers> {
    let workers = registry.read(|known| Worker::new(&known));
    Json(Workers { workers })
}

async fn drain(State(registry): State<Arc<Registry>>, Path(id): Path<String>) -> Answer {
    let worker = find(&registry, &id)?;
    registry.drain(WorkerId(worker.id), DrainReason::Asked);
    tracing::info!(
        worker = worker.id,
        address = worker.address,
        "drains: an operator asked"
    );
    find(&registry, &id).map(Json)
}

async fn undrain(State(registry): State<Arc<Registry>>, Path(id): Path<String>) -> Answer {
    let worker = find(&registry, &id)?;
    registry.undrain(WorkerId(worker.id), DrainReason::Asked);
    let worker = find(&registry, &id)?;
    if worker.drains_because.is_empty() {
        tracing::info!(
            worker = worker.id,
            address = worker.address,
            "drains no more"
        );
        return Ok(Json(worker));
    }
    let unlisted = worker.drains_because.contains(&"unlisted");
    let (worker, address) = (WorkerId(worker.id), worker.address);
    Err(if unlisted {
        AdminError::Unlisted { worker, address }
    } else {
        AdminError::Ending { worker, address }
    })
}

#[derive(Debug, Deserialize)]
struct RoleOrder {
    role: RoleWord,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RoleWord {
    Prefill,
    Decode,
    Mixed,
}

/// The worker answers with its new role on its stream, so that this answer may still have the
/// old one.
async fn set_role(
    State(registry): State<Arc<Registry>>,
    Path(id): Path<String>,
    body: Bytes,
) -> Result<(StatusCode, Json<Worker>), AdminError> {
    let worker = find(&registry, &id)?;
    let RoleOrder { role } = serde_json::from_slice(&body)?;
    let role = match role {
        RoleWord::Prefill => Role::Prefill,
        RoleWord::Decode => Role::Decode,
        RoleWord::Mixed => Role::Mixed,
    };
    let (id, address) = (WorkerId(worker.id), worker.address.clone());
    if let Ok(Address::Foreign(_)) = Address::parse(&address) {
        return Err(AdminError::OtherEngine {
            worker: id,
            address,
        });
    }
    if !registry.set_role(id, role) {
        return Err(AdminError::NotConnected {
            worker: id,
            address,
        });
    }
    tracing::info!(worker = worker.id, address = worker.address, %role, "role sent");
    Ok((StatusCode::ACCEPTED, Json(worker)))
}

fn find(registry: &Registry, id: &str) -> Result<Worker, AdminError> {
    let mut workers = registry.read(|known| Worker::new(&known));
    let at = workers
        .iter()
        .position(|worker| worker.id.to_string() == id);
    match at {
        Some(at) => Ok(workers.swap_remove(at)),
        None => Err(AdminError::NoWorker {
            given: id.chars().take(20).collect(),
            known: workers.iter().map(|worker| worker.id).collect(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use axum::body::{Body, to_bytes};
    use axum::extract::Request;
    use serde_json::{Value, json};
    use tasuki_core::ModelId;
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
        joined.expect("joined");
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

        let (status, _) = order(&registry, "/workers/0/role", "{\"role\": \"decode\"}").await;
        assert_eq!(status, 202);
        assert_eq!(local.received(), Some(ToWorker::SetRole(Role::Decode, 1)));
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
}
