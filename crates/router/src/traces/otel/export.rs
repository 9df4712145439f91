//! Spans on their way to the collector: a bounded queue, and one task that sends them in batches.
//!
//! Ending a span never waits. Spans that the collector does not get are counted, and logged by the
//! task.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use axum::body::{Body, Bytes};
use axum::http::{Request, Response};
use opentelemetry::Context;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{ExporterBuildError, Protocol, SpanExporter};
use opentelemetry_otlp::{WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter as _, SpanProcessor};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::metrics::Counters;
use crate::workers::foreign::{Client, collect};

/// That wait: some kilobytes each.
const QUEUE_SPANS: usize = 8_192;
const BATCH_SPANS: usize = 512;

/// How long the first span of a batch waits for others.
const LINGER: Duration = Duration::from_secs(1);

/// Of one batch, with its retries.
const EXPORT_LIMIT: Duration = Duration::from_secs(10);

const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// What a collector answers is read up to here.
const MOST_ANSWER_BYTES: usize = 1 << 20;

/// Losses that go on are logged so often.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// What posts spans to a collector.
///
/// # Errors
/// A variable of the environment has a value that cannot be used.
pub fn exporter(endpoint: &str, resource: &Resource) -> Result<SpanExporter, ExporterBuildError> {
    let mut exporter = SpanExporter::builder()
        .with_http()
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(format!("{endpoint}/v1/traces"))
        .with_timeout(EXPORT_LIMIT)
        .with_http_client(Collector(Client::new(CONNECT_LIMIT)))
        .build()?;
    exporter.set_resource(resource);
    Ok(exporter)
}

/// By the router's own HTTP client.
#[derive(Debug)]
struct Collector(Client);

#[async_trait]
impl HttpClient for Collector {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let response = self.0.send(request.map(Body::from)).await?;
        let (head, body) = response.into_parts();
        let body = collect(body, MOST_ANSWER_BYTES).await?;
        Ok(Response::from_parts(head, body))
    }
}

/// Takes the spans that have ended.
#[derive(Debug)]
pub struct Queue {
    sender: mpsc::Sender<SpanData>,
    losses: Losses,
}

/// The task that sends them.
pub struct Exporting {
    closing: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Queue {
    /// Starts the task.
    pub fn start(exporter: SpanExporter, losses: Losses) -> (Self, Exporting) {
        let (sender, receiver) = mpsc::channel(QUEUE_SPANS);
        let (closing, closed) = watch::channel(false);
        let export = Export {
            receiver,
            closed,
            exporter,
            losses: losses.clone(),
        };
        let task = tokio::spawn(export.run());
        (Self { sender, losses }, Exporting { closing, task })
    }
}

impl SpanProcessor for Queue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if self.sender.try_send(span).is_err() {
            self.losses.count("queue_full", 1);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

impl Exporting {
    /// Takes no more spans, and sends those that wait. Whether that was done within `limit`.
    pub async fn end(mut self, limit: Duration) -> bool {
        self.closing.send_replace(true);
        let done = timeout(limit, &mut self.task).await.is_ok();
        self.task.abort();
        done
    }
}

struct Export {
    receiver: mpsc::Receiver<SpanData>,
    /// Turns true when no more spans are taken.
    closed: watch::Receiver<bool>,
    exporter: SpanExporter,
    losses: Losses,
}

impl Export {
    async fn run(mut self) {
        let mut log = LossLog::default();
        loop {
            let batch = self.batch().await;
            if batch.is_empty() {
                break;
            }
            let spans = batch.len() as u64;
            let sent = timeout(EXPORT_LIMIT, self.exporter.export(batch)).await;
            let error = match sent {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("no answer for {EXPORT_LIMIT:?}")),
            };
            if error.is_some() {
                self.losses.count("export_failed", spans);
            }
            log.write(&self.losses, error);
        }
        log.last = None;
        log.write(&self.losses, None);
    }

    /// The next spans; none when there will be no more.
    async fn batch(&mut self) -> Vec<SpanData> {
        let mut batch = Vec::new();
        let mut linger = pin!(sleep(LINGER));
        loop {
            let missing = BATCH_SPANS - batch.len();
            let was_empty = batch.is_empty();
            tokio::select! {
                biased;
                got = self.receiver.recv_many(&mut batch, missing) => {
                    if got == 0 || got == missing {
                        return batch;
                    }
                    if was_empty {
                        linger.as_mut().reset(tokio::time::Instant::now() + LINGER);
                    }
                }
                () = &mut linger, if !was_empty => return batch,
                // Also when its sender is gone.
                _ = self.closed.wait_for(|&closed| closed), if !self.receiver.is_closed() => {
                    self.receiver.close();
                }
            }
        }
    }
}

/// Counts what the collector does not get.
#[derive(Debug, Clone)]
pub struct Losses {
    endpoint: Arc<str>,
    dropped: Counters,
    all: Arc<AtomicU64>,
}

impl Losses {
    pub fn new(endpoint: &str, dropped: &Counters) -> Self {
        Self {
            endpoint: endpoint.into(),
            dropped: dropped.clone(),
            all: Arc::default(),
        }
    }

    fn count(&self, reason: &'static str, spans: u64) {
        self.dropped
            .get_or_create(&[("reason", reason)])
            .inc_by(spans);
        self.all.fetch_add(spans, Ordering::Relaxed);
    }
}

/// What was logged of them.
#[derive(Default)]
struct LossLog {
    logged: u64,
    last: Option<Instant>,
    error: Option<String>,
}

impl LossLog {
    fn write(&mut self, losses: &Losses, error: Option<String>) {
        self.error = error.or(self.error.take());
        let all = losses.all.load(Ordering::Relaxed);
        let is_quiet = self.last.is_some_and(|last| last.elapsed() < LOG_INTERVAL);
        if all == self.logged || is_quiet {
            return;
        }
        tracing::warn!(
            endpoint = &*losses.endpoint,
            spans = all - self.logged,
            error = self.error.take(),
            "spans were dropped: the collector does not take them, or not as fast as they come"
        );
        self.logged = all;
        self.last = Some(Instant::now());
    }
}
