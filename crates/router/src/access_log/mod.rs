//! The access log: one line per request, at its end, however it ended. It never has a prompt,
//! an answer, or an API key.
//!
//! Its lines are events of one tracing target. Where the filter lets none of them through and the
//! request is not traced, nothing is computed for them.

mod json;
#[cfg(test)]
pub mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use tracing::Level;

pub use self::json::JsonLines;

use crate::api_keys::Caller;
use crate::error::ApiError;
use crate::openai::{Usage, milliseconds};
use crate::serve::api::{Finish, Timings};
use crate::traces::Trace;

/// The tracing target of the access log's lines.
pub const TARGET: &str = "access";

/// Whether a line would be written.
pub fn is_on() -> bool {
    tracing::enabled!(target: TARGET, Level::INFO)
}

/// What a request's line has that its usage and timings do not.
pub struct RequestLog {
    pub request_id: String,
    pub model: String,
    pub endpoint: &'static str,
    pub tenant: Arc<str>,
    pub started: Instant,
    pub end: End,
    /// It ends with the line.
    pub trace: Option<Trace>,
}

/// What is known of a request at its end.
pub struct Ended {
    pub usage: Usage,
    pub timings: Timings,
    /// Of the choices that ended, as far as the router reads the answer.
    #[cfg_attr(not(feature = "otel"), expect(dead_code, reason = "of traces alone"))]
    pub finishes: Vec<Finish>,
}

/// How a request ended.
pub struct End {
    pub outcome: &'static str,
    /// Of the answer, once its headers were made.
    pub status: Option<StatusCode>,
    pub reason: Option<String>,
}

impl Default for End {
    /// Until more is known, the client hung up.
    fn default() -> Self {
        Self {
            outcome: "disconnected",
            status: None,
            reason: None,
        }
    }
}

impl End {
    /// The headers of the answer are made.
    pub fn begin(&mut self, status: StatusCode) {
        self.status = Some(status);
    }

    pub fn finish(&mut self) {
        self.outcome = "finished";
        self.status.get_or_insert(StatusCode::OK);
    }

    pub fn fail(&mut self, error: &ApiError) {
        self.fail_with(error.status(), error.log_reason());
    }

    pub fn fail_with(&mut self, status: StatusCode, reason: String) {
        let refusals = [
            StatusCode::SERVICE_UNAVAILABLE,
            StatusCode::TOO_MANY_REQUESTS,
        ];
        let is_refusal = self.status.is_none() && refusals.contains(&status);
        self.outcome = if is_refusal { "refused" } else { "failed" };
        self.status.get_or_insert(status);
        self.reason = Some(reason);
    }
}

impl RequestLog {
    /// Writes the line and ends the trace. `ended`: only asked for if there is either.
    pub fn write(&self, ended: impl FnOnce() -> Ended) {
        let trace = self.trace.as_ref().filter(|trace| trace.is_sampled());
        if !is_on() && trace.is_none() {
            return;
        }
        let ended = ended();
        if let Some(trace) = trace {
            trace.end(self, &ended);
        }
        let Ended { usage, timings, .. } = ended;
        let named = |name: &'_ str| (!name.is_empty()).then(|| name.to_owned());
        tracing::info!(
            target: TARGET,
            request_id = self.request_id,
            model = self.model,
            endpoint = self.endpoint,
            tenant = named(&self.tenant),
            outcome = self.end.outcome,
            status = self.end.status.map(|status| status.as_u16()),
            reason = self.end.reason,
            prompt_tokens = usage.prompt_tokens,
            cached_tokens = usage.prompt_tokens_details.cached_tokens,
            output_tokens = usage.completion_tokens,
            elapsed_ms = milliseconds(self.started.elapsed()),
            queue_ms = phase(timings.queue),
            prefill_ms = phase(timings.prefill),
            first_token_ms = phase(timings.first_token),
            transfer_exposed_ms = phase(timings.transfer_exposed),
            transfer_bytes = (timings.transfer_bytes > 0).then_some(timings.transfer_bytes),
            transport = named(&timings.transport),
            first_decode_ms = phase(timings.first_decode),
            messages_ms = phase(timings.messages),
            decode_ms = phase(timings.decode),
            recovery_ms = phase(timings.recovery),
            prefill_worker = named(&timings.prefill_worker),
            decode_worker = named(&timings.decode_worker),
            replacements = timings.replacements,
            why = timings.why.map(|why| why.to_string()),
            "request ended"
        );
    }
}

/// A phase that occurred.
fn phase(duration: Duration) -> Option<f64> {
    (!duration.is_zero()).then(|| milliseconds(duration))
}

/// Marks a response whose request has a line of its own.
#[derive(Clone)]
struct Logged;

/// The response to a request that has a [`RequestLog`].
pub fn logged(answer: Result<Response, ApiError>) -> Response {
    let mut response = answer.into_response();
    response.extensions_mut().insert(Logged);
    response
}

/// Whether the response's request has a [`RequestLog`].
pub fn is_logged(response: &Response) -> bool {
    response.extensions().get::<Logged>().is_some()
}

/// Writes the line of a request that ended before there was a [`RequestLog`] for it.
pub fn refused(response: &Response, endpoint: &str, started: Instant) {
    if is_logged(response) || !is_on() {
        return;
    }
    let caller = response.extensions().get::<Caller>();
    tracing::info!(
        target: TARGET,
        endpoint,
        tenant = caller.map(|caller| caller.tenant().to_string()),
        outcome = "refused",
        status = response.status().as_u16(),
        reason = response.extensions().get::<ApiError>().map(ApiError::log_reason),
        elapsed_ms = milliseconds(started.elapsed()),
        "request refused"
    );
}
