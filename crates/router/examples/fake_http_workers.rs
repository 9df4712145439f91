//! HTTP workers without an engine, to measure routers: a pair of prefill and decode, and one that
//! serves alone, as vLLM and as SGLang have them.
//!
//! A prefill leg is answered after `--prefill-ms`, any other request by `--chunks` events, each
//! written by itself and `--step-ms` after the one before; the one that serves alone waits for
//! the prefill time first. What a request asks for is not looked at. Prints `prefill`, `decode` and
//! `whole`, each with HOST:PORT; ends with its standard input.

use std::convert::Infallible;
use std::io::Read;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use clap::{Parser, ValueEnum};
use futures::Stream;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::sleep;

const MODEL: &str = "fake";
const CONTEXT: u32 = 32_768;
const BOOTSTRAP_PORT: u16 = 8998;

#[derive(Parser, Clone, Copy)]
struct Args {
    #[arg(long)]
    engine: Engine,
    /// Events of an answer
    #[arg(long, default_value_t = 64)]
    chunks: u32,
    /// Milliseconds of a prefill
    #[arg(long, default_value_t = 1.0)]
    prefill_ms: f64,
    /// Milliseconds from an event to the next; 0: the next is written as soon as the last is
    #[arg(long, default_value_t = 0.0)]
    step_ms: f64,
}

#[derive(Clone, Copy, ValueEnum, PartialEq)]
enum Engine {
    Vllm,
    Sglang,
}

#[derive(Clone, Copy, PartialEq)]
enum Part {
    Prefill,
    Decode,
    Whole,
}

#[derive(Clone, Copy)]
struct Fake {
    args: Args,
    part: Part,
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let args = Args::parse();
    for (name, part) in [
        ("prefill", Part::Prefill),
        ("decode", Part::Decode),
        ("whole", Part::Whole),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        println!("{name} {}", listener.local_addr()?);
        let listener = axum::serve::ListenerExt::tap_io(listener, |stream| {
            let _ = stream.set_nodelay(true);
        });
        let server = axum::serve(listener, routes(Fake { args, part }));
        tokio::spawn(server.into_future());
    }
    tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await??;
    Ok(())
}

fn routes(fake: Fake) -> Router {
    Router::new()
        .route("/health", get(async || StatusCode::OK))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/server_info", get(info))
        .route("/get_server_info", get(info))
        .route("/model_info", get(info))
        .route("/get_model_info", get(info))
        .route("/v1/chat/completions", post(complete))
        .route("/v1/completions", post(complete))
        .with_state(fake)
}

async fn models() -> Json<Value> {
    Json(json!({"object": "list", "data": [
        {"id": MODEL, "object": "model", "max_model_len": CONTEXT}
    ]}))
}

async fn metrics() -> &'static str {
    "# TYPE fake gauge\nfake 1\n"
}

async fn info(State(fake): State<Fake>) -> Json<Value> {
    let mode = match fake.part {
        Part::Prefill => "prefill",
        Part::Decode => "decode",
        Part::Whole => "null",
    };
    Json(json!({
        "model_path": MODEL, "served_model_name": MODEL, "tokenizer_path": MODEL,
        "is_generation": true, "disaggregation_mode": mode, "version": "0.5.0",
        "disaggregation_bootstrap_port": BOOTSTRAP_PORT, "tp_size": 1, "dp_size": 1,
        "internal_states": [{}],
    }))
}

async fn complete(State(fake): State<Fake>, body: Bytes) -> Response {
    drop(body);
    let args = fake.args;
    if fake.part != Part::Decode {
        sleep(Duration::from_secs_f64(args.prefill_ms / 1e3)).await;
    }
    if fake.part == Part::Prefill {
        return Json(prefilled(args.engine)).into_response();
    }
    let kind = [(header::CONTENT_TYPE, "text/event-stream")];
    (kind, Body::from_stream(events(args))).into_response()
}

/// A prefill leg's answer; vLLM's has what decode is to be given.
fn prefilled(engine: Engine) -> Value {
    let choice = json!({"index": 0, "message": {"role": "assistant", "content": "a"},
        "text": "a", "finish_reason": "length", "logprobs": null});
    let usage = json!({"prompt_tokens": 300, "completion_tokens": 1, "total_tokens": 301});
    let mut answer = json!({"id": "x", "object": "chat.completion", "created": 1,
        "model": MODEL, "choices": [choice], "usage": usage});
    if engine == Engine::Vllm {
        answer["kv_transfer_params"] = json!({
            "do_remote_prefill": true, "do_remote_decode": false,
            "remote_engine_id": "e-prefill", "remote_block_ids": [[1, 2, 3, 4]],
            "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 5600,
            "tp_size": 1,
        });
    }
    answer
}

fn events(args: Args) -> impl Stream<Item = Result<Bytes, Infallible>> {
    // They are written once: the workers share cores with the load generator.
    let [word, last] = [Value::Null, json!("length")].map(|finish| event(&finish));
    futures::stream::unfold(0, move |at| {
        let event = match args.chunks.saturating_sub(at) {
            0 => Bytes::from_static(b"data: [DONE]\n\n"),
            1 => last.clone(),
            _ => word.clone(),
        };
        async move {
            if at > args.chunks {
                return None;
            }
            if args.step_ms > 0.0 && at < args.chunks {
                sleep(Duration::from_secs_f64(args.step_ms / 1e3)).await;
            } else {
                // What was written is sent before there is more.
                tokio::task::yield_now().await;
            }
            Some((Ok(event), at + 1))
        }
    })
}

fn event(finish: &Value) -> Bytes {
    let choice = json!({"index": 0, "delta": {"content": "word "}, "finish_reason": finish});
    let chunk = json!({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1,
        "model": MODEL, "choices": [choice]});
    Bytes::from(format!("data: {chunk}\n\n"))
}
