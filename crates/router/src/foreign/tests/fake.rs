//! Workers of other engines for tests, as strict as the real ones were seen to be: a request
//! with a wrong field, too many of them or too few is a violation, and fails the test.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::Notify;

use super::fake_answer::Shape;
use crate::foreign::object::Object;

pub const MODEL: &str = "theirs";

/// Every answer says the words of this text, one a token, from where the prompt left off.
pub fn truth(position: usize) -> String {
    match position {
        0 => "t0".to_owned(),
        _ => format!(" t{position}"),
    }
}

/// What the workers of a fleet share outside of HTTP, and what they saw.
#[derive(Default)]
pub struct Fabric {
    pub tickets: Mutex<HashMap<String, Ticket>>,
    pub rooms: Mutex<HashMap<u64, Arc<Room>>>,
    /// Workers that were killed.
    pub dead: Mutex<HashSet<String>>,
    pub violations: Mutex<Vec<String>>,
    pub next: AtomicUsize,
}

/// KV that waits to be pulled.
pub struct Ticket {
    pub engine: String,
    pub request_id: String,
    pub used: bool,
}

/// Where two of SGLang's legs meet.
#[derive(Default)]
pub struct Room {
    pub legs: Mutex<HashMap<&'static str, String>>,
    /// Data-parallel ranks of prefill, and the one that has the KV.
    pub prefill_rank: Mutex<(u64, u64)>,
    pub changed: Notify,
}

impl Fabric {
    pub fn violation(&self, what: impl Into<String>) -> Response {
        let what = what.into();
        self.violations.lock().unwrap().push(what.clone());
        error(500, &what)
    }

    pub fn check(&self) {
        let violations = self.violations.lock().unwrap();
        assert!(violations.is_empty(), "{violations:#?}");
    }
}

/// How a worker is to behave.
#[derive(Clone)]
pub struct Manner {
    /// Of each answer, unless the request wants fewer.
    pub tokens: usize,
    /// Streams stop there, until it is raised.
    pub pause_after: Option<usize>,
    /// An error event in its place.
    pub error_after: Option<(usize, u16)>,
    /// For every request.
    pub status: Option<(u16, &'static str)>,
    /// Requests wait before they are answered.
    pub hangs: bool,
    /// Of prefill's answer; "all": no ticket at all.
    pub lacks: Option<&'static str>,
    /// Decode computes prompts itself and says nothing.
    pub recomputes: bool,
    /// That it has loaded.
    pub adapters: Vec<&'static str>,
    /// Of SGLang's pages about itself.
    pub older_names: bool,
    /// Nobody gets the list of its models.
    pub models_fail: bool,
    pub health: u16,
    /// Characters of padding in each chunk.
    pub padding: usize,
    pub pad: &'static str,
    /// Streams break behind their last event.
    pub breaks: bool,
    /// Nobody gets its metrics.
    pub metrics_hang: bool,
    /// Of data parallelism, where a worker reports them.
    pub ranks: u64,
    /// Each with all of the model, where else they divide attention alone.
    pub ranks_are_replicas: bool,
}

impl Default for Manner {
    fn default() -> Self {
        Self {
            tokens: 4,
            pause_after: None,
            error_after: None,
            status: None,
            hangs: false,
            lacks: None,
            recomputes: false,
            adapters: vec!["lora"],
            older_names: false,
            models_fail: false,
            health: 200,
            padding: 0,
            pad: ".",
            breaks: false,
            metrics_hang: false,
            ranks: 1,
            ranks_are_replicas: false,
        }
    }
}

/// A request that a worker got.
#[derive(Debug, Clone)]
pub struct Seen {
    pub path: String,
    pub headers: HeaderMap,
    pub body: String,
    /// whole, prefill or decode.
    pub leg: &'static str,
}

/// One worker's state.
pub struct Worker {
    pub name: String,
    pub address: SocketAddr,
    pub role: &'static str,
    pub bootstrap_port: u16,
    pub fabric: Arc<Fabric>,
    pub manner: Mutex<Manner>,
    pub seen: Mutex<Vec<Seen>>,
    /// Requests whose connection is open.
    pub open: Arc<AtomicUsize>,
    /// Chunks that were written.
    pub written: AtomicUsize,
    /// Prompt tokens, pulled and computed.
    pub pulled: AtomicUsize,
    pub computed: AtomicUsize,
    pub flushed: AtomicUsize,
    /// How often its models were asked for.
    pub lists: AtomicUsize,
}

/// A listening worker. Dropped or killed: every connection breaks.
pub struct FakeWorker {
    pub worker: Arc<Worker>,
    runtime: Option<Runtime>,
}

impl FakeWorker {
    /// `serve`: the engine's router.
    pub fn start(
        name: &str,
        role: &'static str,
        fabric: &Arc<Fabric>,
        serve: fn(Arc<Worker>) -> axum::Router,
    ) -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap(), name, role, fabric, serve)
    }

    pub fn start_at(
        address: SocketAddr,
        name: &str,
        role: &'static str,
        fabric: &Arc<Fabric>,
        serve: fn(Arc<Worker>) -> axum::Router,
    ) -> Self {
        let listener = std::net::TcpListener::bind(address).expect("a free port");
        listener.set_nonblocking(true).expect("a socket");
        let address = listener.local_addr().expect("a bound address");
        let worker = Arc::new(Worker {
            name: name.to_owned(),
            address,
            role,
            bootstrap_port: 9_000 + fabric.next.fetch_add(1, Ordering::Relaxed) as u16,
            fabric: Arc::clone(fabric),
            manner: Mutex::default(),
            seen: Mutex::default(),
            open: Arc::default(),
            written: AtomicUsize::new(0),
            pulled: AtomicUsize::new(0),
            computed: AtomicUsize::new(0),
            flushed: AtomicUsize::new(0),
            lists: AtomicUsize::new(0),
        });
        let runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = { runtime }.worker_threads(1).enable_all().build().unwrap();
        let routes = serve(Arc::clone(&worker));
        runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).expect("a listener");
            axum::serve(listener, routes).await
        });
        Self {
            worker,
            runtime: Some(runtime),
        }
    }

    pub fn set(&self, change: impl FnOnce(&mut Manner)) {
        change(&mut self.worker.manner.lock().unwrap());
    }

    /// Ends the process, as far as its peers can tell.
    pub fn kill(&mut self) {
        let name = self.worker.name.clone();
        self.worker.fabric.dead.lock().unwrap().insert(name);
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    pub fn legs(&self) -> Vec<&'static str> {
        self.worker
            .seen
            .lock()
            .unwrap()
            .iter()
            .map(|seen| seen.leg)
            .collect()
    }

    pub fn bodies(&self) -> Vec<String> {
        let seen = self.worker.seen.lock().unwrap();
        seen.iter().map(|seen| seen.body.clone()).collect()
    }

    pub fn open(&self) -> usize {
        self.worker.open.load(Ordering::SeqCst)
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Counts a request while its connection is open.
pub struct Open(Arc<AtomicUsize>);

impl Open {
    pub fn new(worker: &Worker) -> Self {
        worker.open.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(&worker.open))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Worker {
    pub fn manner(&self) -> Manner {
        self.manner.lock().unwrap().clone()
    }

    pub fn note(&self, path: &str, headers: &HeaderMap, body: &Bytes, leg: &'static str) {
        self.seen.lock().unwrap().push(Seen {
            path: path.to_owned(),
            headers: headers.clone(),
            body: String::from_utf8(body.to_vec()).expect("UTF-8"),
            leg,
        });
    }

    /// Waits if requests are to hang, and answers if all are to be refused.
    pub async fn delayed(&self) -> Option<Response> {
        while self.manner().hangs {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let (status, body) = self.manner().status?;
        let status = StatusCode::from_u16(status).unwrap();
        Some(
            (
                status,
                [(header::CONTENT_TYPE, "application/json; x=1")],
                body,
            )
                .into_response(),
        )
    }

    /// The answer to a request for text.
    pub fn answer(self: &Arc<Self>, path: &str, body: &Object, open: Open) -> Response {
        let manner = self.manner();
        let (start, most) = (said_before(path, body), most_tokens(path, body));
        let tokens = manner.tokens.saturating_sub(start).min(most).max(1);
        let id = format!(
            "{}-{}",
            self.name,
            self.fabric.next.fetch_add(1, Ordering::Relaxed)
        );
        let shape = Shape {
            chat: path.ends_with("/chat/completions"),
            native: path == "/generate",
            id,
            prompt_tokens: 7 + start,
        };
        if body.read("stream") != Some(true) {
            return shape.whole(start, tokens);
        }
        let options: Object = body.read("stream_options").unwrap_or_default();
        let usage = options.read("include_usage") == Some(true);
        let opening = shape.opening();
        let first = opening.len();
        let end = match manner.error_after {
            Some((_, code)) => Some(format!("data: {}\n\n", shape.error(code))),
            None => usage.then(|| shape.usage(tokens)),
        };
        let told = manner
            .error_after
            .map_or(tokens, |(after, _)| after.min(tokens));
        let pad = manner.pad.repeat(manner.padding);
        // Made one by one: thousands take a busy machine longer than a worker may be silent.
        let chunks = (0..told).map(move |at| shape.chunk(start + at, at + 1 == tokens, &pad));
        let chunks = opening.into_iter().chain(chunks).chain(end);
        let chunks = chunks.chain(["data: [DONE]\n\n".to_owned()]).map(Some);
        let worker = Arc::clone(self);
        let broken = manner.breaks.then_some(None);
        let stream = futures::stream::iter(chunks.chain(broken).enumerate());
        let stream = stream.then(move |(at, chunk)| {
            let (worker, _open) = (Arc::clone(&worker), &open);
            async move {
                let stops = || worker.manner().pause_after.map(|after| first + after);
                while stops().is_some_and(|stops| at >= stops) {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                worker.written.fetch_add(1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                chunk.ok_or(std::io::Error::other("broken"))
            }
        });
        let kind = [(
            header::CONTENT_TYPE,
            "text/event-stream; charset=utf-8; x=1",
        )];
        (kind, Body::from_stream(stream)).into_response()
    }
}

/// Tokens of the answer that are in the prompt already.
fn said_before(path: &str, body: &Object) -> usize {
    let text = match path {
        "/v1/chat/completions" => {
            let messages: Vec<Value> = body.read("messages").unwrap_or_default();
            let last = messages.last().filter(|last| last["role"] == "assistant");
            assert_eq!(
                last.is_some(),
                body.read("continue_final_message") == Some(true)
                    && body.read("add_generation_prompt") == Some(false)
            );
            last.map_or(String::new(), |last| {
                last["content"].as_str().unwrap().to_owned()
            })
        }
        _ => body.read::<String>("prompt").unwrap_or_default(),
    };
    text.matches(" t").count() + text.matches("t0").count()
}

pub fn most_tokens(path: &str, body: &Object) -> usize {
    let native: Object = body.read("sampling_params").unwrap_or_default();
    let most = match path {
        "/generate" => native.read("max_new_tokens"),
        _ => body
            .read("max_completion_tokens")
            .or(body.read("max_tokens")),
    };
    most.unwrap_or(usize::MAX)
}

pub fn error(status: u16, message: &str) -> Response {
    let body = json!({"error": {"message": message, "type": "x", "code": status}});
    let status = StatusCode::from_u16(status).unwrap();
    (status, axum::Json(body)).into_response()
}
