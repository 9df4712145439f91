//! The admin API: what the workers are and do, and orders to them. `operators` has its port.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use tasuki_core::{Health, Role, WorkerId};
use tasuki_flow::fleet::DrainReason;
use tokio::time::timeout;

use crate::discovery::Address;
use crate::workers::{Known, Registry};

/// A worker says at once that it has taken a role, unless its machine is very busy.
const ROLE_LIMIT: Duration = Duration::from_secs(1);

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

/// 200 once the worker has said on its stream that it took the role; 202, with the role that it has
/// so far, where it does not say so in time.
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
    let mut changes = registry.changes();
    if !registry.set_role(id, role) {
        return Err(AdminError::NotConnected {
            worker: id,
            address,
        });
    }
    tracing::info!(worker = worker.id, address = worker.address, %role, "role sent");
    let id = worker.id.to_string();
    let is_taken = |worker: &Worker| worker.role == Some(role.as_str());
    let taken = async {
        while !find(&registry, &id).is_ok_and(|worker| is_taken(&worker)) {
            if changes.changed().await.is_err() {
                break;
            }
        }
    };
    let _ = timeout(ROLE_LIMIT, taken).await;
    let worker = find(&registry, &id)?;
    let status = match is_taken(&worker) {
        true => StatusCode::OK,
        false => StatusCode::ACCEPTED,
    };
    Ok((status, Json(worker)))
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
