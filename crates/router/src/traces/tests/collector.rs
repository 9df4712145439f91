//! A collector: a real OTLP/HTTP server that keeps the spans that it gets.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode as SpanStatus;
use prost::Message;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// Dropped, it takes no more connections.
pub struct Collector {
    address: SocketAddr,
    kept: Arc<Kept>,
    server: JoinHandle<()>,
}

#[derive(Default)]
struct Kept {
    manner: Mutex<Manner>,
    posts: Mutex<usize>,
    spans: Mutex<Vec<Span>>,
    resource: Mutex<Vec<KeyValue>>,
}

/// How it answers.
#[derive(Debug, Clone, Copy, Default)]
pub enum Manner {
    #[default]
    Takes,
    Refuses(StatusCode),
    /// Never.
    Hangs,
}

impl Collector {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound address");
        let kept = Arc::<Kept>::default();
        let routes = Router::new()
            .route("/v1/traces", post(take))
            .with_state(Arc::clone(&kept));
        let server = tokio::spawn(async move {
            let _ = axum::serve(listener, routes).await;
        });
        Self {
            address,
            kept,
            server,
        }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn set(&self, manner: Manner) {
        *self.kept.manner.lock().unwrap() = manner;
    }

    /// Messages that came, taken or not.
    pub fn posts(&self) -> usize {
        *self.kept.posts.lock().unwrap()
    }

    /// The attributes of the one that sent last.
    pub fn resource(&self) -> Vec<KeyValue> {
        self.kept.resource.lock().unwrap().clone()
    }

    pub fn spans(&self) -> Vec<Span> {
        self.kept.spans.lock().unwrap().clone()
    }

    /// The span of that name, of which there is one.
    pub fn span(&self, name: &str) -> Span {
        let mut named = self.spans_of(name);
        assert_eq!(named.len(), 1, "{name}: {:?}", self.names());
        named.remove(0)
    }

    /// In the order in which they began.
    pub fn spans_of(&self, name: &str) -> Vec<Span> {
        let mut named = self.spans();
        named.retain(|span| span.name == name);
        named.sort_by_key(|span| span.start_time_unix_nano);
        named
    }

    /// Sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.spans().into_iter().map(|span| span.name).collect();
        names.sort();
        names
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn take(
    State(kept): State<Arc<Kept>>,
    headers: HeaderMap,
    body: Bytes,
) -> (StatusCode, Vec<u8>) {
    *kept.posts.lock().unwrap() += 1;
    let manner = *kept.manner.lock().unwrap();
    match manner {
        Manner::Takes => {}
        Manner::Refuses(status) => return (status, Vec::new()),
        Manner::Hangs => std::future::pending().await,
    }
    assert_eq!(headers["content-type"], "application/x-protobuf");
    let message = ExportTraceServiceRequest::decode(body).expect("a message");
    for of_resource in message.resource_spans {
        let resource = of_resource.resource.expect("a resource");
        *kept.resource.lock().unwrap() = resource.attributes;
        let scopes = of_resource.scope_spans.into_iter();
        let spans = scopes.flat_map(|scope| scope.spans);
        kept.spans.lock().unwrap().extend(spans);
    }
    let answer = ExportTraceServiceResponse::default();
    (StatusCode::OK, answer.encode_to_vec())
}

/// An attribute's value; `None`: it has none of that name.
pub fn value(attributes: &[KeyValue], name: &str) -> Option<Value> {
    let mut named = attributes.iter().filter(|pair| pair.key == name);
    let found = named.next()?.value.clone()?.value;
    assert!(named.next().is_none(), "{name} is there twice");
    found
}

pub fn text(span: &Span, name: &str) -> String {
    match value(&span.attributes, name) {
        Some(Value::StringValue(text)) => text,
        other => panic!("{name} of {}: {other:?}", span.name),
    }
}

pub fn number(span: &Span, name: &str) -> i64 {
    match value(&span.attributes, name) {
        Some(Value::IntValue(number)) => number,
        other => panic!("{name} of {}: {other:?}", span.name),
    }
}

/// In seconds, or of a ratio.
pub fn float(span: &Span, name: &str) -> f64 {
    match value(&span.attributes, name) {
        Some(Value::DoubleValue(number)) => number,
        other => panic!("{name} of {}: {other:?}", span.name),
    }
}

pub fn texts(span: &Span, name: &str) -> Vec<String> {
    let Some(Value::ArrayValue(array)) = value(&span.attributes, name) else {
        panic!("{name} of {}", span.name);
    };
    let texts = array.values.into_iter().map(|item| match item.value {
        Some(Value::StringValue(text)) => text,
        other => panic!("{name} of {}: {other:?}", span.name),
    });
    texts.collect()
}

/// The message of a span that has an error.
pub fn error(span: &Span) -> Option<String> {
    let status = span.status.clone().unwrap_or_default();
    (status.code() == SpanStatus::Error).then_some(status.message)
}

/// Whether a span lies within another in time.
pub fn is_within(inner: &Span, outer: &Span) -> bool {
    let times = [
        outer.start_time_unix_nano,
        inner.start_time_unix_nano,
        inner.end_time_unix_nano,
        outer.end_time_unix_nano,
    ];
    times.is_sorted()
}
