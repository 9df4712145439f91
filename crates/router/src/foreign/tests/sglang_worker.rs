//! An SGLang server, colocated or of one half of a disaggregated pair.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::fake::{Fabric, FakeWorker, MODEL, Open, Worker, error};
use crate::foreign::object::Object;

/// What prefill gives up after; decode waits for ever.
const PREFILL_WAITS: Duration = Duration::from_secs(10);
const PREFILL_RANK: &str = "disagg_prefill_dp_rank";

pub fn start(name: &str, role: &'static str, fabric: &Arc<Fabric>) -> FakeWorker {
    FakeWorker::start(name, role, fabric, routes)
}

/// Its address as a router is given it.
pub fn url(fake: &FakeWorker) -> String {
    let worker = &fake.worker;
    match worker.role {
        "" => format!("sglang://{}", worker.address),
        "prefill" => format!(
            "sglang://{}?role=prefill&bootstrap_port={}",
            worker.address, worker.bootstrap_port
        ),
        role => format!("sglang://{}?role={role}", worker.address),
    }
}

fn routes(worker: Arc<Worker>) -> Router {
    Router::new()
        .route("/health", get(async || StatusCode::OK))
        .route("/v1/models", get(models))
        .route("/server_info", get(server_info))
        .route("/get_server_info", get(server_info))
        .route("/model_info", get(model_info))
        .route("/get_model_info", get(model_info))
        .route("/flush_cache", post(flush))
        .route("/v1/chat/completions", post(complete))
        .route("/v1/completions", post(complete))
        .route("/generate", post(complete))
        .with_state(worker)
}

async fn models(State(worker): State<Arc<Worker>>) -> axum::Json<Value> {
    let base = json!({"id": MODEL, "max_model_len": 2048});
    let adapters = worker.manner().adapters.into_iter();
    let adapters = adapters.map(|name| json!({"id": name, "parent": MODEL}));
    let data: Vec<Value> = std::iter::once(base).chain(adapters).collect();
    axum::Json(json!({"object": "list", "data": data}))
}

/// The adapters that serve a request, as 0.5.23 finds them: any other model is the base.
pub fn adapters(path: &str, body: &Object) -> Vec<String> {
    let model: Option<String> = body.read("model").filter(|_| path != "/generate");
    let named = model.and_then(|model| Some(model.split_once(':')?.1.trim().to_owned()));
    if let Some(one) = named.or(body.read("lora_path")) {
        return vec![one];
    }
    let listed: Option<Vec<Option<String>>> = body.read("lora_path");
    listed.into_iter().flatten().flatten().collect()
}

/// A version has these pages by one name.
fn named(worker: &Worker, uri: &Uri) -> Result<(), StatusCode> {
    let older = uri.path().starts_with("/get_");
    let is_there = older == worker.manner().older_names;
    is_there.then_some(()).ok_or(StatusCode::NOT_FOUND)
}

async fn server_info(State(worker): State<Arc<Worker>>, uri: Uri) -> Result<Response, StatusCode> {
    named(&worker, &uri)?;
    let mode = if worker.role.is_empty() {
        "null"
    } else {
        worker.role
    };
    let info = json!({"disaggregation_mode": mode, "name": worker.name,
        "dp_size": worker.manner().ranks,
        "enable_dp_attention": !worker.manner().ranks_are_replicas,
        "disaggregation_bootstrap_port": worker.bootstrap_port,
        "internal_states": [{"of": worker.name}]});
    Ok(axum::Json(info).into_response())
}

async fn model_info(State(worker): State<Arc<Worker>>, uri: Uri) -> Result<Response, StatusCode> {
    named(&worker, &uri)?;
    Ok(axum::Json(json!({"model_path": "m", "of": worker.name})).into_response())
}

async fn flush(State(worker): State<Arc<Worker>>) -> Response {
    worker.flushed.fetch_add(1, Ordering::SeqCst);
    match worker.manner().status {
        Some((status, text)) => (StatusCode::from_u16(status).unwrap(), text).into_response(),
        None => "Cache flushed.\n".into_response(),
    }
}

async fn complete(
    State(worker): State<Arc<Worker>>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
    bytes: Bytes,
) -> Response {
    let open = Open::new(&worker);
    let (path, fabric) = (uri.path().to_owned(), Arc::clone(&worker.fabric));
    let Ok(body) = serde_json::from_slice::<Object>(&bytes) else {
        return fabric.violation("no JSON object");
    };
    let leg = match worker.role {
        "" => "whole",
        role => role,
    };
    worker.note(&path, &headers, &bytes, leg);
    if body.has("kv_transfer_params") {
        return fabric.violation("fields of vLLM");
    }
    let missing = |adapter: &String| !worker.manner().adapters.contains(&adapter.as_str());
    if let Some(adapter) = adapters(&path, &body).into_iter().find(missing) {
        return error(
            400,
            &format!("LoRA adapter that has never been loaded: {adapter}"),
        );
    }
    let rank = match rank(&worker, &path, &headers, &body) {
        Ok(rank) => rank,
        Err(wrong) => return fabric.violation(wrong),
    };
    if let Some(answer) = worker.delayed().await {
        return answer;
    }
    let met = match worker.role {
        "" if body.has("bootstrap_room") || body.has("bootstrap_host") => {
            return fabric.violation("a meeting with a worker that is alone");
        }
        "" => Ok(()),
        "prefill" => timeout(PREFILL_WAITS, meet(&worker, "prefill", &body, rank))
            .await
            .unwrap_or_else(|_| Err(Box::new(error(500, "decode did not come")))),
        _ => meet(&worker, "decode", &body, rank).await,
    };
    if let Err(answer) = met {
        return *answer;
    }
    if worker.role == "decode" && body.read("echo") == Some(true) && body.has("logprobs") {
        return error(500, "KeyError: 'input_token_logprobs'");
    }
    if worker.role == "prefill" {
        return prefilled(&body);
    }
    match sequences(&path, &body) {
        Some(count) if path == "/generate" => batch(count),
        _ => worker.answer(&path, &body, open),
    }
}

/// Waits for the other leg in every room.
async fn meet(
    worker: &Worker,
    leg: &'static str,
    body: &Object,
    rank: Option<u64>,
) -> Result<(), Box<Response>> {
    let fabric = &worker.fabric;
    let path = worker.seen.lock().unwrap().last().unwrap().path.clone();
    if choices(body) > 1 {
        return Err(Box::new(
            fabric.violation("choices of a room wait for ever"),
        ));
    }
    let (rooms, hosts, ports): (Vec<u64>, Vec<String>, Vec<u16>) = match sequences(&path, body) {
        None => {
            let one = body.read("bootstrap_room").zip(body.read("bootstrap_host"));
            let one = one.zip(body.read("bootstrap_port"));
            let Some(((room, host), port)) = one else {
                return Err(Box::new(
                    fabric.violation("bootstrap fields of a single request"),
                ));
            };
            (vec![room], vec![host], vec![port])
        }
        Some(count) => {
            let rooms: Option<Vec<u64>> = body.read("bootstrap_room");
            let hosts: Option<Vec<String>> = body.read("bootstrap_host");
            let ports: Option<Vec<u16>> = body.read("bootstrap_port");
            let (Some(rooms), Some(hosts), Some(ports)) = (rooms, hosts, ports) else {
                let what = "bootstrap fields of a batch are lists";
                return Err(Box::new(fabric.violation(what)));
            };
            if [rooms.len(), hosts.len(), ports.len()] != [count; 3] {
                return Err(Box::new(
                    fabric.violation(format!("{count} sequences, {} rooms", rooms.len())),
                ));
            }
            (rooms, hosts, ports)
        }
    };
    let known = hosts.iter().zip(&ports).all(|(host, port)| {
        host == "127.0.0.1" && (leg != "prefill" || *port == worker.bootstrap_port)
    });
    if !known || rooms.iter().any(|room| *room >= 1 << 63) {
        return Err(Box::new(
            fabric.violation(format!("{hosts:?} {ports:?} {rooms:?}")),
        ));
    }
    // Both legs get the same, but for their ranks.
    let mut same = body.clone();
    for rank in [PREFILL_RANK, "routed_dp_rank"] {
        same.remove(rank);
    }
    let text = String::from_utf8(same.to_json()).unwrap();
    for number in rooms {
        let room = Arc::clone(fabric.rooms.lock().unwrap().entry(number).or_default());
        if leg == "prefill" {
            let ranks = worker.manner().ranks;
            let runs_on = rank.unwrap_or(number % ranks);
            *room.prefill_rank.lock().unwrap() = (ranks, runs_on);
            // As 0.5.23 compares, for which each replica is rank 0.
            let compared = match worker.manner().ranks_are_replicas {
                true => 0,
                false => runs_on,
            };
            let fault = match body.read::<u64>(PREFILL_RANK) {
                Some(told) => (told != runs_on).then_some(told),
                None => (compared != number % ranks).then_some(number % ranks),
            };
            if let Some(implied) = fault {
                let what = format!("follow_bootstrap_room conflict: {runs_on}, not {implied}");
                return Err(Box::new(fabric.violation(what)));
            }
        }
        if room
            .legs
            .lock()
            .unwrap()
            .insert(leg, text.clone())
            .is_some()
        {
            return Err(Box::new(fabric.violation("a room is used twice")));
        }
        room.changed.notify_waiters();
        let other = if leg == "prefill" {
            "decode"
        } else {
            "prefill"
        };
        loop {
            let changed = room.changed.notified();
            let theirs = room.legs.lock().unwrap().get(other).cloned();
            match theirs {
                Some(theirs) if theirs != text => {
                    return Err(Box::new(fabric.violation(format!("{theirs} and {text}"))));
                }
                Some(_) if leg == "prefill" => break,
                Some(_) => {
                    let (ranks, has_kv) = *room.prefill_rank.lock().unwrap();
                    let expected = body.read(PREFILL_RANK).unwrap_or(number % ranks);
                    if expected != has_kv {
                        let what = format!("decode waits for rank {expected}, not {has_kv}");
                        return Err(Box::new(fabric.violation(what)));
                    }
                    break;
                }
                None => {
                    let _ = timeout(Duration::from_millis(20), changed).await;
                }
            }
        }
    }
    Ok(())
}

/// The rank that a request names. `/generate` does not read the header.
fn rank(
    worker: &Worker,
    path: &str,
    headers: &HeaderMap,
    body: &Object,
) -> Result<Option<u64>, String> {
    if worker.role.is_empty() && body.has(PREFILL_RANK) {
        return Err(format!("{PREFILL_RANK} where nothing is decoded"));
    }
    let header = headers.get("x-data-parallel-rank");
    let header = header.filter(|_| path != "/generate");
    let header = header.map(|value| value.to_str().unwrap().parse().unwrap());
    let rank = header.or(body.read("routed_dp_rank"));
    let rank: Option<u64> = rank.or(body.read("data_parallel_rank"));
    match rank {
        Some(rank) if rank >= worker.manner().ranks => Err(format!("rank {rank} ends the worker")),
        rank => Ok(rank),
    }
}

/// `None`: a single sequence, else how many.
fn sequences(path: &str, body: &Object) -> Option<usize> {
    let n = choices(body);
    let prompt = if path == "/generate" {
        "text"
    } else {
        "prompt"
    };
    let listed = body.read::<Vec<String>>(prompt).map(|list| list.len());
    let ids = body
        .read::<Vec<Vec<u32>>>("input_ids")
        .map(|list| list.len());
    let listed = listed.or(ids);
    (listed.is_some() || n > 1).then(|| listed.unwrap_or(1) * n)
}

fn choices(body: &Object) -> usize {
    let native: Object = body.read("sampling_params").unwrap_or_default();
    native.read("n").or(body.read("n")).unwrap_or(1)
}

fn prefilled(body: &Object) -> Response {
    let one = json!({"text": "", "meta_info": {"input_token_logprobs": [[null, 1, null], [-2.0, 2, null]]}});
    match body.read("stream") {
        Some(true) => format!("data: {one}\n\ndata: [DONE]\n\n").into_response(),
        _ => axum::Json(one).into_response(),
    }
}

fn batch(count: usize) -> Response {
    let items: Vec<Value> = (0..count)
        .map(|at| json!({"text": format!(" t{at}")}))
        .collect();
    axum::Json(items).into_response()
}
