//! Real connections to a scripted serving layer.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::*;
use crate::metrics::Metrics;
use crate::serve::api::Event;
use crate::testing::{FakeGenerator, app, tokens_of};
use crate::workers::testing::registry;
use crate::{dashboard, operators};

const LONG: Duration = Duration::from_secs(20);

struct Server {
    address: SocketAddr,
    generator: Arc<FakeGenerator>,
    close: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

/// A server whose answers never end.
async fn start(change: impl FnOnce(&mut ConnectionLimits)) -> Server {
    start_on(TcpListener::bind("127.0.0.1:0").await.unwrap(), change)
}

fn start_on(listener: TcpListener, change: impl FnOnce(&mut ConnectionLimits)) -> Server {
    let generator = Arc::new(FakeGenerator::new(|_| {
        let endless = (0..10_000).map(|_| Event::Tokens {
            choice: 0,
            tokens: tokens_of("a token"),
            logprobs: Vec::new(),
            finish: None,
        });
        endless.collect()
    }));
    let address = listener.local_addr().unwrap();
    let mut limits = ConnectionLimits {
        max_connections: 8,
        idle: LONG,
        client_stall: LONG,
    };
    change(&mut limits);
    let (close, closed) = oneshot::channel();
    let served = serve(listener, app(Arc::clone(&generator)), limits, None, async {
        let _ = closed.await;
    });
    Server {
        address,
        generator,
        close,
        task: tokio::spawn(served),
    }
}

impl Server {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// What comes until the server closes the connection.
    async fn exchange(&self, request: &str) -> String {
        let mut stream = self.connect().await;
        stream.write_all(request.as_bytes()).await.unwrap();
        read_all(&mut stream).await
    }
}

async fn read_all(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let read = timeout(LONG, stream.read_to_end(&mut answer)).await;
    read.expect("the server closes the connection").unwrap();
    String::from_utf8(answer).unwrap()
}

fn post(body: &str, more: &str) -> String {
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\n{more}content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

const GET_LIVE: &str = "GET /live HTTP/1.1\r\nhost: x\r\n\r\n";

#[tokio::test]
async fn slow_headers_and_idle_connections_are_closed() {
    let server = start(|limits| limits.idle = Duration::from_millis(100)).await;
    let mut idle = server.connect().await;
    assert_eq!(read_all(&mut idle).await, "");
    let (mut reader, mut writer) = server.connect().await.into_split();
    let trickle = tokio::spawn(async move {
        // Each byte comes long before the limit.
        while writer.write_all(b"G").await.is_ok() {
            sleep(Duration::from_millis(10)).await;
        }
    });
    let mut answer = Vec::new();
    let read = timeout(LONG, reader.read_to_end(&mut answer));
    // A reset is an end too: bytes were still coming.
    let _ = read.await.expect("the server closes the connection");
    timeout(LONG, trickle).await.unwrap().unwrap();
    // After an answer the connection may be idle for as long.
    let answer = server.exchange(GET_LIVE).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn connections_beyond_the_limit_are_answered_once() {
    let server = start(|limits| limits.max_connections = 2).await;
    let held = [server.connect().await, server.connect().await];
    let refused = server.exchange(&post("{}", "")).await;
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    for part in [
        "retry-after: 1",
        "connection: close",
        "2 connections are open",
    ] {
        assert!(refused.contains(part), "{part:?} is not in {refused}");
    }
    let live = server.exchange(GET_LIVE).await;
    assert!(live.starts_with("HTTP/1.1 200"), "{live}");
    let silent = server.exchange("").await;
    assert_eq!(silent, "", "it does not wait for the idle limit");
    drop(held);
    let served = async {
        while !server
            .exchange(&post("{}", "connection: close\r\n"))
            .await
            .contains("400")
        {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, served).await.expect("places are free again");
    let errors = server.generator.http_errors.lock().unwrap();
    assert_eq!(errors[0].1, 503);
}

#[tokio::test]
async fn a_client_that_stops_reading_loses_its_connection_and_its_place() {
    // With buffers of the system's own sizes a busy machine takes long to fill them.
    let [listening, socket] = [(); 2].map(|()| TcpSocket::new_v4().unwrap());
    listening.set_send_buffer_size(1 << 14).unwrap();
    socket.set_recv_buffer_size(1 << 14).unwrap();
    listening.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let stall = |limits: &mut ConnectionLimits| limits.client_stall = Duration::from_millis(100);
    let server = start_on(listening.listen(8).unwrap(), stall);
    let mut stream = socket.connect(server.address).await.unwrap();
    let request = post("{\"prompt\": \"x\", \"stream\": true}", "");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut first = [0; 12];
    stream.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");
    let events = server.generator.started.lock().unwrap()[0].0.clone();
    let more = async {
        // The socket's buffers fill up before the server notices.
        while !events.is_closed() {
            events.send(Event::Tokens {
                choice: 0,
                tokens: tokens_of(&"more ".repeat(1000)),
                logprobs: Vec::new(),
                finish: None,
            });
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, more)
        .await
        .expect("the generation is aborted");
}

#[tokio::test]
async fn a_client_that_waits_for_tokens_is_not_slow() {
    let server = start(|limits| {
        limits.client_stall = Duration::from_millis(50);
        limits.idle = Duration::from_millis(50);
    })
    .await;
    let mut stream = server.connect().await;
    let request = post("{\"prompt\": \"x\", \"stream\": true}", "");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut buffer = vec![0; 1 << 20];
    // Everything there is, and then nothing for several times the limits.
    let mut wait = LONG;
    while let Ok(read) = timeout(wait, stream.read(&mut buffer)).await {
        assert_ne!(read.unwrap(), 0, "the connection was closed");
        wait = Duration::from_millis(300);
    }
    assert!(!server.generator.started.lock().unwrap()[0].0.is_closed());
}

#[tokio::test]
async fn closing_lets_answers_end_and_idle_connections_not_wait() {
    let server = start(|_| {}).await;
    let _idle = server.connect().await;
    let mut stream = server.connect().await;
    let request = post("{\"prompt\": \"x\", \"stream\": true}", "");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut first = [0; 12];
    stream.read_exact(&mut first).await.unwrap();
    server.close.send(()).unwrap();
    sleep(Duration::from_millis(50)).await;
    assert!(!server.task.is_finished());
    server.generator.started.lock().unwrap().clear();
    assert!(read_all(&mut stream).await.contains("event: error"));
    timeout(LONG, server.task).await.unwrap().unwrap();
}

/// A port that is not for clients, and a page that it has.
async fn few(is_metrics: bool, idle: Duration) -> (SocketAddr, &'static str) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let limits = ConnectionLimits {
        max_connections: 8,
        idle,
        client_stall: LONG,
    };
    let app = app(Arc::new(FakeGenerator::saying("")));
    if is_metrics {
        tokio::spawn(serve_metrics(listener, app, limits));
        return (address, "/metrics");
    }
    let registry = registry(1);
    let metrics = Arc::new(Metrics::new(&registry));
    let routes = operators::routes(dashboard::Source { registry, metrics }, app);
    tokio::spawn(serve_operators(listener, routes, limits));
    (address, "/workers")
}

#[tokio::test]
async fn connections_for_metrics_and_operators_are_few_and_closed_when_idle() {
    for is_metrics in [true, false] {
        let (address, _) = few(is_metrics, Duration::from_millis(100)).await;
        let mut idle = TcpStream::connect(address).await.unwrap();
        assert_eq!(read_all(&mut idle).await, "");

        let (address, path) = few(is_metrics, LONG).await;
        let mut held = Vec::new();
        for _ in 0..FEW_CONNECTIONS {
            held.push(TcpStream::connect(address).await.unwrap());
        }
        let mut beyond = TcpStream::connect(address).await.unwrap();
        let ask = format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n");
        beyond.write_all(ask.as_bytes()).await.unwrap();
        let page = timeout(LONG / 2, read_all(&mut beyond)).await;
        let page = page.expect("it is not held as long as the others");
        assert!(page.starts_with("HTTP/1.1 200"), "{page}");
    }
}
