//! The fake server's HTTP: over TCP, or over any pair of streams.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use futures::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use super::script::{Asked, Reply, Step};

/// What a server does for each request.
#[derive(Clone)]
pub struct Play {
    script: Arc<dyn Fn(&Asked) -> Reply + Send + Sync>,
    requests: Arc<AtomicUsize>,
}

impl Play {
    pub fn new(script: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
        Self {
            script: Arc::new(script),
            requests: Arc::new(AtomicUsize::new(0)),
        }
    }

    /// Generating requests so far.
    pub fn requests(&self) -> usize {
        self.requests.load(Relaxed)
    }

    fn reply(&self, chat: bool, body: &[u8]) -> Reply {
        match Asked::read(self.requests.fetch_add(1, Relaxed), chat, body) {
            Ok(asked) => (self.script)(&asked),
            Err(error) => Reply::json(400, &json!({"error": {"message": error.to_string()}})),
        }
    }
}

/// A server that listens on TCP until it is dropped.
pub struct FakeServer {
    pub address: SocketAddr,
    task: JoinHandle<()>,
}

impl FakeServer {
    /// # Errors
    /// Why it cannot listen.
    pub async fn start(address: (&str, u16), play: Play) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let task = tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else {
                    continue;
                };
                let _ = stream.set_nodelay(true);
                tokio::spawn(play_connection(stream, play.clone()));
            }
        });
        Ok(Self { address, task })
    }
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Answers the requests of one connection.
pub async fn play_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    play: Play,
) {
    let service = service_fn(move |request| answer(request, play.clone()));
    let connection =
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    // A connection that breaks, by script or by the client, is no news.
    let _ = connection.await;
}

type Body = http_body_util::combinators::UnsyncBoxBody<Bytes, io::Error>;

async fn answer(request: Request<Incoming>, play: Play) -> Result<Response<Body>, Infallible> {
    let path = request.uri().path().to_owned();
    let reply = match (request.method(), path.as_str()) {
        (&Method::POST, "/v1/completions" | "/v1/chat/completions") => {
            let chat = path.contains("chat");
            let body = request.into_body().collect().await;
            play.reply(chat, &body.map(|body| body.to_bytes()).unwrap_or_default())
        }
        (&Method::GET, "/v1/models") => {
            let models = json!([{"id": "fake", "object": "model", "created": 0,
                                 "owned_by": "fake", "max_model_len": 1 << 20}]);
            Reply::json(200, &json!({"object": "list", "data": models}))
        }
        (&Method::GET, "/health") => Reply::json(200, &json!({"status": "ok"})),
        _ => Reply::json(
            404,
            &json!({"error": {"message": format!("no {path} here")}}),
        ),
    };
    if !reply.delay.is_zero() {
        tokio::time::sleep(reply.delay).await;
    }
    let mut response = Response::new(body(reply.steps));
    *response.status_mut() = reply.status.try_into().expect("scripts have real statuses");
    let kind = hyper::header::HeaderValue::from_static(reply.content_type);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}

/// Waits are counted from the body's beginning, so that they do not drift.
fn body(steps: Vec<Step>) -> Body {
    let state = (steps.into_iter(), None, Duration::ZERO);
    let frames = stream::unfold(state, |(mut steps, begun, mut waited)| async move {
        let begun = begun.unwrap_or_else(Instant::now);
        loop {
            match steps.next()? {
                Step::Wait(time) => {
                    waited += time;
                    sleep_until(begun + waited).await;
                }
                Step::Send(bytes) => {
                    return Some((Ok(Frame::data(bytes)), (steps, Some(begun), waited)));
                }
                Step::Break => {
                    let broken = io::Error::other("by script");
                    return Some((Err(broken), (steps, Some(begun), waited)));
                }
                Step::Hang => std::future::pending().await,
            }
        }
    });
    StreamBody::new(frames).boxed_unsync()
}
