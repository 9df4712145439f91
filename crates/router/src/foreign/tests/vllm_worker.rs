//! A vLLM server with NixlConnector, as captured of version 0.32.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};

use super::fake::{Fabric, FakeWorker, MODEL, Open, Ticket, Worker, error, most_tokens};
use crate::foreign::object::Object;

const CONTEXT: usize = 8192;
/// Of every text.
const PROMPT_TOKENS: usize = 7;

pub fn start(name: &str, role: &'static str, fabric: &Arc<Fabric>) -> FakeWorker {
    FakeWorker::start(name, role, fabric, routes)
}

/// Its address as a router is given it.
pub fn url(fake: &FakeWorker) -> String {
    match fake.worker.role {
        "" => format!("vllm://{}", fake.worker.address),
        role => format!("vllm://{}?role={role}", fake.worker.address),
    }
}

pub fn routes(worker: Arc<Worker>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/v1/models", get(models))
        .route("/metrics", get(metrics))
        .route("/v1/chat/completions", post(complete))
        .route("/v1/completions", post(complete))
        .with_state(worker)
}

async fn health(State(worker): State<Arc<Worker>>) -> StatusCode {
    StatusCode::from_u16(worker.manner().health).unwrap()
}

async fn models(State(worker): State<Arc<Worker>>) -> Response {
    worker.lists.fetch_add(1, Ordering::Relaxed);
    let manner = worker.manner();
    if manner.models_fail {
        return error(500, "no list");
    }
    let adapters = manner.adapters.iter();
    let adapter = |id| json!({"id": id, "parent": MODEL, "max_model_len": null});
    let mut data: Vec<Value> = adapters.map(adapter).collect();
    data.push(json!({"id": MODEL, "parent": null, "max_model_len": CONTEXT}));
    axum::Json(json!({"object": "list", "data": data})).into_response()
}

async fn metrics(State(worker): State<Arc<Worker>>) -> String {
    while worker.manner().metrics_hang {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let by_source = "vllm:prompt_tokens_by_source_total";
    format!(
        "vllm:num_requests_running{{engine=\"0\"}} {}\n\
         vllm:num_requests_waiting{{engine=\"0\"}} 0.0\n\
         vllm:kv_cache_usage_perc{{engine=\"0\"}} 0.0\n\
         vllm:cache_config_info{{block_size=\"16\",num_gpu_blocks=\"1000\"}} 1.0\n\
         {by_source}{{source=\"external_kv_transfer\"}} {}\n\
         {by_source}{{source=\"local_compute\"}} {}\n",
        worker.open.load(Ordering::SeqCst),
        worker.pulled.load(Ordering::SeqCst),
        worker.computed.load(Ordering::SeqCst),
    )
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
    let params: Option<Object> = body.read("kv_transfer_params");
    let decodes = params
        .as_ref()
        .is_some_and(|p| p.read("do_remote_prefill") == Some(true));
    let leg = match (&params, decodes) {
        (None, _) => "whole",
        (Some(_), true) => "decode",
        (Some(_), false) => "prefill",
    };
    worker.note(&path, &headers, &bytes, leg);
    if body.has("lora_path") {
        return fabric.violation("vLLM ignores lora_path, and answers by the base");
    }
    let Some(request_id) = headers.get("x-request-id").and_then(|id| id.to_str().ok()) else {
        return fabric.violation("no X-Request-Id");
    };
    if let Some(answer) = worker.delayed().await {
        return answer;
    }
    let model: Option<String> = body.read("model");
    let known = |name: &str| name == MODEL || worker.manner().adapters.contains(&name);
    if !model.as_deref().is_some_and(known) {
        return error(404, &format!("The model `{model:?}` does not exist."));
    }
    // As of 0.32, which shortens a limit that the prompt leaves no room for.
    let output = most_tokens(&path, &body);
    if output != usize::MAX && output > CONTEXT {
        return error(
            400,
            "max_tokens is beyond the maximum context length, 8192 tokens.",
        );
    }
    if body
        .read("min_tokens")
        .is_some_and(|least: usize| least > output)
    {
        return error(400, "min_tokens must be less than or equal to max_tokens");
    }
    if leg == "prefill" {
        return prefill(&worker, &path, &body, request_id);
    }
    if decodes {
        if body.has("prompt_logprobs") || body.read("echo") == Some(true) {
            // It has no logits of a prompt that it did not compute, which ends its engine.
            return fabric.violation("log probabilities of a prompt that was pulled");
        }
        let raw = body.get("kv_transfer_params").expect("it is there").get();
        if let Err(answer) = pull(&worker, raw, request_id) {
            return *answer;
        }
    } else {
        worker.computed.fetch_add(PROMPT_TOKENS, Ordering::SeqCst);
    }
    worker.answer(&path, &body, open)
}

fn prefill(worker: &Worker, path: &str, body: &Object, request_id: &str) -> Response {
    let fabric = &worker.fabric;
    let asked: Value = body.read("kv_transfer_params").unwrap();
    let expected = json!({"do_remote_decode": true, "do_remote_prefill": false,
        "remote_engine_id": null, "remote_block_ids": null, "remote_host": null,
        "remote_port": null});
    if asked != expected {
        return fabric.violation(format!("prefill asked with {asked}"));
    }
    if !matches!(body.read("tool_choice"), None | Some("auto" | "none")) {
        // It parses its one token as a call.
        return error(400, "Invalid JSON: EOF while parsing a list");
    }
    let chat = path.ends_with("/chat/completions");
    for (name, expected) in [
        ("stream", Some(json!(false))),
        ("max_tokens", Some(json!(1))),
        ("max_completion_tokens", chat.then(|| json!(1))),
        ("stream_options", None),
        ("min_tokens", None),
        // Ended by its first token it would hand nothing over.
        ("ignore_eos", Some(json!(true))),
        ("stop_token_ids", None),
    ] {
        let found: Option<Value> = body.read(name);
        if found != expected {
            return fabric.violation(format!("prefill with {name} {found:?}"));
        }
    }
    if body.read::<i64>("truncate_prompt_tokens") == Some(-1) {
        return fabric.violation("the prompt is cut by the output, which is one token here");
    }
    if body.read::<u32>("n").is_some_and(|n| n != 1) {
        return fabric.violation("prefill with n");
    }
    worker.computed.fetch_add(PROMPT_TOKENS, Ordering::SeqCst);
    let number = fabric.next.fetch_add(1, Ordering::Relaxed);
    // Oddly written, and with a field of a later version: it is to be passed on as it is.
    let mut raw = format!(
        "{{\"do_remote_prefill\":true, \"do_remote_decode\":false,\"remote_block_ids\":[[1,2]],\
         \"remote_engine_id\":\"{}\",\"remote_request_id\":\"chatcmpl-{number}\",\
         \"remote_host\":\"127.0.0.1\",\"remote_port\":5600,\"tp_size\":1,\"later\":[1.50, null]}}",
        worker.name
    );
    match worker.manner().lacks {
        Some("all") => raw = "null".to_owned(),
        Some(name) => {
            let mut object: Object = serde_json::from_str(&raw).unwrap();
            object.remove(name);
            raw = String::from_utf8(object.to_json()).unwrap();
        }
        None => {
            let ticket = Ticket {
                engine: worker.name.clone(),
                request_id: request_id.to_owned(),
                used: false,
            };
            fabric.tickets.lock().unwrap().insert(raw.clone(), ticket);
        }
    }
    let body = format!("{{\"choices\":[],\"kv_transfer_params\":{raw},\"metrics\":null}}");
    ([("content-type", "application/json")], body).into_response()
}

/// Pulls the KV of a ticket. It works once, while the prefill worker lives.
fn pull(worker: &Worker, raw: &str, request_id: &str) -> Result<(), Box<Response>> {
    let fabric = &worker.fabric;
    let mut tickets = fabric.tickets.lock().unwrap();
    let Some(ticket) = tickets.get_mut(raw) else {
        drop(tickets);
        return Err(Box::new(
            fabric.violation(format!("a ticket that was never issued: {raw}")),
        ));
    };
    if ticket.used || ticket.request_id != request_id || ticket.engine == worker.name {
        let what = format!(
            "used {}, id {request_id}: {}",
            ticket.used, ticket.request_id
        );
        drop(tickets);
        return Err(Box::new(fabric.violation(what)));
    }
    ticket.used = true;
    if fabric.dead.lock().unwrap().contains(&ticket.engine) {
        return Err(Box::new(error(500, "KV load failure")));
    }
    let to = match worker.manner().recomputes {
        true => &worker.computed,
        false => &worker.pulled,
    };
    to.fetch_add(PROMPT_TOKENS, Ordering::SeqCst);
    Ok(())
}
