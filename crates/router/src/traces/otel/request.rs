//! The span of a request, which all others of it are children of.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use opentelemetry::trace::{
    Span as _, SpanContext, SpanKind, SpanRef, Status, TraceContextExt, Tracer as _,
};
use opentelemetry::{Array, Context, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::{SdkTracer, Span};

use super::legs::LegTraces;
use super::{context, names};
use crate::access_log::{Ended, RequestLog};
use crate::error::ApiError;
use crate::serve::api::Finish;
use crate::traces::PhaseName;

/// Of one request, sampled or not. Cheap to clone. Dropped by all without an end, because the
/// client hung up early, it ends then.
#[derive(Debug, Clone)]
pub struct Trace(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    tracer: SdkTracer,
    /// Has the request's span.
    context: Context,
    clock: Clock,
}

/// The wall clock at one moment: the times of a trace keep their distances, whatever happens to
/// the wall clock meanwhile.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    instant: Instant,
    wall: SystemTime,
}

impl Clock {
    pub fn now() -> Self {
        Self {
            instant: Instant::now(),
            wall: SystemTime::now(),
        }
    }

    pub fn at(&self, instant: Instant) -> SystemTime {
        let after = instant.checked_duration_since(self.instant);
        after.map_or_else(
            || self.wall - (self.instant - instant),
            |after| self.wall + after,
        )
    }
}

/// A part of the request's time; at the latest it ends when it is dropped.
pub struct Phase {
    trace: Trace,
    span: Span,
}

impl Phase {
    pub fn end(self) {}
}

impl Drop for Phase {
    fn drop(&mut self) {
        self.span.end_with_timestamp(self.trace.now());
    }
}

impl Trace {
    pub fn new(tracer: SdkTracer, span: Span, clock: Clock) -> Self {
        Self(Arc::new(Inner {
            tracer,
            context: Context::new().with_span(span),
            clock,
        }))
    }

    /// Whether its spans are sent.
    pub fn is_sampled(&self) -> bool {
        self.span().span_context().is_sampled()
    }

    pub fn begin(&self, name: PhaseName, since: Instant) -> Phase {
        let since = self.0.clock.at(since);
        Phase {
            trace: self.clone(),
            span: self.child(name.span(), SpanKind::Internal, since, Vec::new()),
        }
    }

    /// Of a generation of the request, which is sampled.
    pub fn legs(&self, request_id: &str) -> LegTraces {
        LegTraces::new(self.clone(), request_id)
    }

    /// Makes the request's span the parent of spans that a worker makes, in place of the
    /// client's.
    pub fn hand_on(&self, headers: &mut HeaderMap) {
        context::inject(self.span().span_context(), headers);
    }

    /// Ends the span of a request that has no [`RequestLog`]: it was refused.
    pub fn answered(&self, response: &Response) {
        let error = response.extensions().get::<ApiError>();
        let reason = error.map_or_else(String::new, ApiError::log_reason);
        self.set_answer("refused", Some(response.status()), &reason);
        self.span().end_with_timestamp(self.now());
    }

    /// Ends the span.
    pub fn end(&self, log: &RequestLog, ended: &Ended) {
        let span = self.span();
        if !span.is_recording() {
            return;
        }
        let Ended {
            usage,
            timings,
            finishes,
        } = ended;
        let count = |tokens: u64| i64::try_from(tokens).unwrap_or(i64::MAX);
        span.set_attributes([
            KeyValue::new(names::GEN_AI_REQUEST_MODEL, log.model.clone()),
            KeyValue::new(names::GEN_AI_RESPONSE_ID, log.request_id.clone()),
            KeyValue::new(names::GEN_AI_USAGE_INPUT_TOKENS, count(usage.prompt_tokens)),
            KeyValue::new(
                names::GEN_AI_USAGE_OUTPUT_TOKENS,
                count(usage.completion_tokens),
            ),
            KeyValue::new(
                names::GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS,
                count(usage.prompt_tokens_details.cached_tokens),
            ),
            KeyValue::new(names::REPLACEMENTS, i64::from(timings.replacements)),
        ]);
        if !log.tenant.is_empty() {
            span.set_attribute(KeyValue::new(names::TENANT, log.tenant.to_string()));
        }
        if !finishes.is_empty() {
            let reasons = finishes.iter().map(|finish| match finish {
                Finish::Stop => "stop".into(),
                Finish::Length => "length".into(),
            });
            let reasons: Vec<StringValue> = reasons.collect();
            let reasons = Value::Array(Array::String(reasons));
            span.set_attribute(KeyValue::new(
                names::GEN_AI_RESPONSE_FINISH_REASONS,
                reasons,
            ));
        }
        if !timings.first_token.is_zero() {
            span.set_attribute(KeyValue::new(
                names::GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK,
                timings.first_token.as_secs_f64(),
            ));
        }
        let reason = log.end.reason.as_deref().unwrap_or_default();
        self.set_answer(log.end.outcome, log.end.status, reason);
        span.end_with_timestamp(self.now());
    }

    /// A client's own error is no error of the server, by the semantic conventions.
    fn set_answer(&self, outcome: &'static str, status: Option<StatusCode>, reason: &str) {
        let span = self.span();
        span.set_attribute(KeyValue::new(names::OUTCOME, outcome));
        if let Some(status) = status {
            let code = i64::from(status.as_u16());
            span.set_attribute(KeyValue::new(names::HTTP_RESPONSE_STATUS_CODE, code));
        }
        let status = status.unwrap_or_default();
        let error = match outcome {
            _ if status.is_server_error() => status.as_u16().to_string(),
            // The status of a stream was sent before.
            "failed" if status.is_success() => outcome.to_owned(),
            _ => return,
        };
        span.set_attribute(KeyValue::new(names::ERROR_TYPE, error));
        span.set_status(Status::error(reason.to_owned()));
    }

    fn span(&self) -> SpanRef<'_> {
        self.0.context.span()
    }

    pub fn now(&self) -> SystemTime {
        self.0.clock.at(Instant::now())
    }

    /// A span of the request, which has begun.
    pub fn child(
        &self,
        name: &'static str,
        kind: SpanKind,
        since: SystemTime,
        attributes: Vec<KeyValue>,
    ) -> Span {
        self.span_in(&self.0.context, name, kind, since, attributes)
    }

    /// A span below another one of the request.
    pub fn child_of(
        &self,
        parent: SpanContext,
        name: &'static str,
        kind: SpanKind,
        since: SystemTime,
        attributes: Vec<KeyValue>,
    ) -> Span {
        let context = Context::new().with_remote_span_context(parent);
        self.span_in(&context, name, kind, since, attributes)
    }

    fn span_in(
        &self,
        context: &Context,
        name: &'static str,
        kind: SpanKind,
        since: SystemTime,
        attributes: Vec<KeyValue>,
    ) -> Span {
        let span = self.0.tracer.span_builder(name).with_kind(kind);
        let span = span.with_start_time(since).with_attributes(attributes);
        self.0.tracer.build_with_context(span, context)
    }
}
