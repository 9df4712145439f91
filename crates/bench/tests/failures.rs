//! Every way in which a request can fail, and that it is counted by its name.

mod support;

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use serde_json::{Map, json};
use support::*;
use tasuki_bench::arrivals::{Arrival, Process};
use tasuki_bench::client::{
    Client, ClientOptions, Failure, Io, Network, RequestOptions, Target, Transport, UsageStats,
    served_model, wait_ready,
};
use tasuki_bench::fake::{Asked, FakeServer, Play, Reply, Step, Wording};
use tasuki_bench::live::Counters;
use tasuki_bench::load::Load;
use tasuki_bench::pacer::Pacer;
use tasuki_bench::plan::Api;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

const ONE_A_SECOND: Process = Process::Constant { rate: 1.0 };

/// Two tokens, and then `after`.
fn broken_off(asked: &Asked, after: Vec<Step>) -> Reply {
    let mut wording = Wording::new(asked);
    let mut steps = vec![
        wait(10),
        wording.chunk(" a", 1),
        wait(10),
        wording.chunk(" b", 1),
    ];
    steps.push(wait(10));
    steps.extend(after);
    Reply::stream(steps)
}

#[tokio::test(start_paused = true)]
async fn every_kind_is_counted_with_its_first_example() {
    let script = |asked: &Asked| match asked.number {
        0 => steady(asked, 10, 10),
        1 => Reply::json(429, &json!({"error": {"message": "too many"}})),
        2 => Reply::json(500, &json!("first")),
        3 => Reply::json(500, &json!("second")),
        4 => broken_off(asked, vec![Wording::error("no KV left"), Wording::done()]),
        5 => broken_off(asked, vec![]),
        6 => broken_off(asked, vec![Step::Break]),
        7 => broken_off(asked, vec![Step::Hang]),
        8 => broken_off(asked, vec![Step::Send("data: <html>\n\n".into())]),
        9 => Reply::json(200, &json!({"choices": []})),
        10 => Reply::stream(vec![Wording::new(asked).finish(), Wording::done()]),
        _ => steady(asked, 10, 10),
    };
    let mut setting = Setting::new(ONE_A_SECOND);
    setting.timeout = Duration::from_secs(5);
    let run = run(setting, requests(12, 4), script).await;
    let summary = run.summary();
    let counted: Vec<(&str, usize)> = summary
        .failures
        .iter()
        .map(|failure| (failure.kind.as_str(), failure.count))
        .collect();
    assert_eq!(
        counted,
        [
            ("HTTP 500", 2),
            ("HTTP 429", 1),
            ("bad event", 1),
            ("disconnected", 1),
            ("empty answer", 1),
            ("error event", 1),
            ("not a stream", 1),
            ("timeout", 1),
            ("truncated stream", 1),
        ]
    );
    let first = |kind: &str| {
        let found = summary.failures.iter().find(|failure| failure.kind == kind);
        found.unwrap().first.as_str()
    };
    assert!(first("HTTP 500").contains("first"));
    assert!(first("error event").contains("no KV left"));
    assert!(first("truncated stream").contains("after 2 tokens"));
    assert!(first("timeout").contains("5 s"));
    let metrics = &summary.metrics;
    assert_eq!(
        (metrics.sent, metrics.completed, metrics.failed),
        (12, 2, 10)
    );
    // Tokens of failed requests are of no use to anybody.
    assert_eq!(metrics.output_tokens, 8);
    assert_eq!(metrics.e2e_ms.unwrap().max.round(), 40.0);
}

#[tokio::test(start_paused = true)]
async fn an_end_without_done_or_without_finish_reason_is_an_end() {
    let script = |asked: &Asked| {
        let mut wording = Wording::new(asked);
        let mut steps = vec![wait(10), wording.chunk(" a", 1)];
        match asked.number {
            0 => steps.push(wording.finish()), // no [DONE]
            1 => steps.push(Wording::done()),  // no finish reason
            _ => steps.extend([wording.finish(), wait(10), Step::Break]),
        }
        Reply::stream(steps)
    };
    let run = run(Setting::new(ONE_A_SECOND), requests(3, 1), script).await;
    assert_eq!(run.summary().failures, []);
    assert_eq!(run.summary().metrics.completed, 3);
}

#[tokio::test(start_paused = true)]
async fn a_failed_turn_is_followed_by_none() {
    let script = |_: &Asked| Reply::json(500, &json!("no"));
    let workload = requests(2, 2).followed(ms(10));
    let run = run(Setting::new(Process::Closed).at_most(1), workload, script).await;
    assert_eq!(run.records.len(), 2);
}

fn options() -> ClientOptions {
    ClientOptions {
        request: RequestOptions {
            api: Api::Completions,
            model: "fake".to_owned(),
            usage: UsageStats::Chunks,
            temperature: None,
            extra: Map::new(),
        },
        api_key: Some("key".to_owned()),
        headers: Vec::new(),
        timeout: Duration::from_secs(30),
    }
}

fn network_client(url: &str) -> (Client, Target) {
    let target = Target::parse(url).unwrap();
    let transport = Arc::new(Network::new(target.clone()));
    let counters = Arc::new(Counters::default());
    let client = Client::new(&target, transport, options(), counters).unwrap();
    (client, target)
}

#[tokio::test]
async fn nobody_listening_is_a_refused_connection() {
    let port = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap().port()
    };
    let (client, target) = network_client(&format!("http://127.0.0.1:{port}"));
    let (_sender, stop) = watch::channel(false);
    let answer = client.ask(&planned(0, 2), Instant::now(), stop).await;
    let address = format!("127.0.0.1:{port}");
    assert_eq!(answer.failure, Some(Failure::Refused { address }));
    let error = wait_ready(&client, &target, Duration::from_millis(1)).await;
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("nobody listens") && error.contains("--ready-timeout-s"),
        "{error}"
    );
}

/// Connections on which the first request is answered, and the second one is not: the server closes
/// the connection so long after it came.
struct Drops(Duration);

impl Transport for Drops {
    fn connect(&self) -> BoxFuture<'static, std::io::Result<Box<dyn Io>>> {
        const EVENTS: &str = "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: [DONE]\n\n";
        let head = "HTTP/1.1 200 x\r\ncontent-type: text/event-stream\r\ncontent-length";
        let answer = format!("{head}: {}\r\n\r\n{EVENTS}", EVENTS.len());
        let (ours, mut theirs) = tokio::io::duplex(1 << 20);
        let after = self.0;
        tokio::spawn(async move {
            let mut request = [0; 4096];
            let _ = theirs.read(&mut request).await;
            let _ = theirs.write_all(answer.as_bytes()).await;
            let _ = theirs.read(&mut request).await;
            sleep(after).await;
        });
        Box::pin(async { Ok(Box::new(ours) as Box<dyn Io>) })
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_the_server_dropped_has_failed_and_is_not_sent_again() {
    for (after, dropped) in [
        (Duration::ZERO, false), // closed while it was idle, as far as can be told
        (Duration::from_secs(2), true),
    ] {
        let (_, target) = network_client("http://127.0.0.1:1");
        let transport = Arc::new(Drops(after));
        let counters = Arc::new(Counters::default());
        let client = Client::new(&target, transport, options(), counters).unwrap();
        let (_sender, stop) = watch::channel(false);
        for (index, fails) in [(0, false), (1, dropped)] {
            let answer = client
                .ask(&planned(index, 1), Instant::now(), stop.clone())
                .await;
            let failed = matches!(answer.failure, Some(Failure::Disconnected { .. }));
            assert_eq!(failed, fails, "{index} {after:?} {:?}", answer.failure);
        }
    }
}

/// Where no server is.
struct Nobody;

impl Transport for Nobody {
    fn connect(&self) -> BoxFuture<'static, std::io::Result<Box<dyn Io>>> {
        Box::pin(async { Err(std::io::ErrorKind::ConnectionRefused.into()) })
    }
}

#[tokio::test(start_paused = true)]
async fn users_of_a_server_that_is_gone_do_not_ask_without_a_pause() {
    let (_, target) = network_client("http://127.0.0.1:1");
    let counters = Arc::new(Counters::default());
    let client = Client::new(&target, Arc::new(Nobody), options(), counters).unwrap();
    let (_sender, stop) = watch::channel(false);
    let load = Load {
        client: Arc::new(client),
        workload: Box::new(requests(20, 2)),
        arrival: Arrival {
            process: Process::Closed,
            max_concurrency: Some(2),
            ramp_s: 0.0,
        },
        seed: 0,
        duration: None,
        pacer: Pacer::Tokio,
        stop,
    };
    let sent = load.ready().run().await;
    assert_eq!(sent.answers.len(), 20);
    // Ten requests of each user, and a pause between each two.
    assert_eq!(sent.last_due - sent.start, ms(900));
}

/// A server that sends this to whoever connects, and nothing more.
async fn says(answer: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(answer).await.unwrap();
        std::future::pending::<()>().await;
    });
    url
}

#[tokio::test]
async fn a_server_that_does_not_say_what_it_serves_keeps_nobody_waiting() {
    for (answer, wanted) in [
        (&b""[..], "(not answered after 0.2 s); name the model"),
        (
            b"HTTP/1.1 401 x\r\ncontent-length: 2\r\n\r\nno",
            "(HTTP 401: no); give its key with --api-key",
        ),
    ] {
        let (client, target) = network_client(&says(answer).await);
        let limit = Duration::from_millis(200);
        let asked = timeout(
            Duration::from_secs(20),
            served_model(&client, &target, limit),
        );
        let error = asked.await.expect("it waits on").unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

#[tokio::test]
async fn an_answer_that_is_compressed_unasked_is_refused_by_name() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (client, _) = network_client(&format!("http://{}", listener.local_addr().unwrap()));
    let served = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = vec![0; 4096];
        let length = stream.read(&mut request).await.unwrap();
        let answer = b"HTTP/1.1 200 x\r\ncontent-type: text/event-stream\r\n\
                       content-encoding: gzip\r\ncontent-length: 2\r\n\r\n\x1f\x8b";
        stream.write_all(answer).await.unwrap();
        String::from_utf8(request[..length].to_vec()).unwrap()
    });
    let (_sender, stop) = watch::channel(false);
    let answer = client.ask(&planned(0, 20), Instant::now(), stop).await;
    assert!(
        served
            .await
            .unwrap()
            .contains("\r\naccept-encoding: identity\r\n")
    );
    let failure = answer.failure.unwrap();
    assert_eq!(failure.kind(), "compressed answer");
    assert!(failure.to_string().contains("Content-Encoding gzip"));
}

#[tokio::test]
async fn over_the_network_a_connection_is_kept_and_replaced_when_the_server_closed_it() {
    let play = Play::new(|asked| steady(asked, 0, 0));
    let server = FakeServer::start(("127.0.0.1", 0), play.clone())
        .await
        .unwrap();
    let (client, target) = network_client(&format!("http://{}/v1", server.address));
    let limit = Duration::from_secs(30);
    wait_ready(&client, &target, limit).await.unwrap();
    assert_eq!(served_model(&client, &target, limit).await.unwrap(), "fake");
    let (_sender, stop) = watch::channel(false);
    for index in 0..3 {
        let answer = client
            .ask(&planned(index, 20), Instant::now(), stop.clone())
            .await;
        assert_eq!((answer.failure, answer.chunks.len()), (None, 20));
        assert_eq!(answer.usage.unwrap().completion_tokens, 20);
    }
    assert_eq!(play.requests(), 3);
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn https_to_a_server_without_it_fails_by_name() {
    let play = Play::new(|asked| steady(asked, 0, 0));
    let server = FakeServer::start(("127.0.0.1", 0), play).await.unwrap();
    let (client, target) = network_client(&format!("https://{}", server.address));
    let (_sender, stop) = watch::channel(false);
    let answer = client.ask(&planned(0, 2), Instant::now(), stop).await;
    assert!(
        matches!(answer.failure, Some(Failure::Tls { .. })),
        "{:?}",
        answer.failure
    );
    // Waiting would not help.
    let waits = wait_ready(&client, &target, Duration::from_secs(3600));
    let waited = tokio::time::timeout(Duration::from_secs(10), waits).await;
    let error = waited.unwrap().unwrap_err().to_string();
    assert!(
        error.contains("http://") && error.contains("SSL_CERT_FILE"),
        "{error}"
    );
}
