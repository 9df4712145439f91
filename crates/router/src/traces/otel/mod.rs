//! A build with traces, by the OpenTelemetry SDK.

mod context;
mod export;
mod legs;
mod names;
mod phases;
mod request;

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::Request;
use axum::http::Method;
use opentelemetry::KeyValue;
use opentelemetry::trace::{SpanKind, Tracer as _, TracerProvider as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};

pub use self::legs::LegTraces;
pub use self::request::Trace;

use self::export::{Exporting, Losses, Queue};
use self::request::Clock;
use super::{TraceArgs, TraceError};
use crate::metrics::Counters;

/// How long the end of the process waits for the collector.
const FLUSH_LIMIT: Duration = Duration::from_secs(3);

/// Paths of the requests that generate.
const TRACED: [&str; 4] = [
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/completions",
    "/generate",
];

/// Name of the instrumentation scope, and of the service unless OTEL_SERVICE_NAME has another.
const SERVICE: &str = "tasuki-router";

/// Makes the traces of requests, and sends them.
pub struct Traces {
    tracer: SdkTracer,
    exporting: Mutex<Option<Exporting>>,
}

impl Traces {
    /// Begins to send spans; `None` where no collector is given. Call it on a Tokio runtime.
    /// `dropped`: counts spans that the collector does not get, by reason.
    ///
    /// # Errors
    /// A variable of the environment (`OTEL_EXPORTER_OTLP_*`) has a value that cannot be used.
    pub fn start(args: &TraceArgs, dropped: &Counters) -> Result<Option<Self>, TraceError> {
        let Some(endpoint) = &args.otlp_endpoint else {
            return Ok(None);
        };
        let resource = resource();
        let exporter =
            export::exporter(endpoint, &resource).map_err(|source| TraceError::Exporter {
                endpoint: endpoint.clone(),
                source,
            })?;
        let losses = Losses::new(endpoint, dropped);
        let (queue, exporting) = Queue::start(exporter, losses);
        let ratio = args.trace_sample_ratio.unwrap_or(1.0);
        let provider = SdkTracerProvider::builder()
            .with_resource(resource)
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(
                ratio,
            ))))
            .with_span_processor(queue)
            .build();
        tracing::info!(endpoint, ratio, "traces of requests");
        Ok(Some(Self {
            tracer: provider.tracer(SERVICE),
            exporting: Mutex::new(Some(exporting)),
        }))
    }

    /// Begins the trace of a request whose headers were just received, or its part of the
    /// client's trace; `None`: it generates nothing.
    pub fn request(&self, request: &Request) -> Option<Trace> {
        let path = request.uri().path();
        let route = TRACED.into_iter().find(|route| *route == path);
        let route = route.filter(|_| request.method() == Method::POST)?;
        let clock = Clock::now();
        let operation = match route {
            "/v1/chat/completions" | "/v1/responses" => "chat",
            _ => "text_completion",
        };
        let span = self
            .tracer
            .span_builder(format!("POST {route}"))
            .with_kind(SpanKind::Server)
            .with_start_time(clock.at(Instant::now()))
            .with_attributes([
                KeyValue::new(names::HTTP_REQUEST_METHOD, "POST"),
                KeyValue::new(names::HTTP_ROUTE, route),
                KeyValue::new(names::GEN_AI_OPERATION_NAME, operation),
                KeyValue::new(names::GEN_AI_PROVIDER_NAME, "tasuki"),
            ]);
        let parent = context::parent(request.headers());
        let span = self.tracer.build_with_context(span, &parent);
        Some(Trace::new(self.tracer.clone(), span, clock))
    }

    /// Sends the spans that wait, for at most [`FLUSH_LIMIT`]. Later ones are lost.
    pub async fn end(&self) {
        let exporting = self.exporting.lock();
        let exporting = exporting.unwrap_or_else(PoisonError::into_inner).take();
        let Some(exporting) = exporting else {
            return;
        };
        if !exporting.end(FLUSH_LIMIT).await {
            tracing::warn!(
                limit = ?FLUSH_LIMIT,
                "the collector did not take all spans in time: the rest is lost"
            );
        }
    }
}

/// Who we are, as OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have it if they are set.
fn resource() -> Resource {
    let version = KeyValue::new(names::SERVICE_VERSION, env!("CARGO_PKG_VERSION"));
    let resource = Resource::builder().with_attribute(version);
    match std::env::var_os("OTEL_SERVICE_NAME") {
        Some(name) if !name.is_empty() => resource.build(),
        _ => resource.with_service_name(SERVICE).build(),
    }
}
