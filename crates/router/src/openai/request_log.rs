//! One log line per request, at its end, however it ended. Never its text.

use std::time::Instant;

use super::outputs::Summary;
use super::usage::Usage;

/// Writes its line when dropped.
pub struct RequestLog {
    request_id: String,
    endpoint: &'static str,
    started: Instant,
    outcome: &'static str,
    usage: Usage,
}

impl RequestLog {
    pub fn new(request_id: String, endpoint: &'static str, started: Instant) -> Self {
        Self {
            request_id,
            endpoint,
            started,
            outcome: "disconnected",
            usage: Usage::default(),
        }
    }

    /// How it ended; without this the client hung up.
    pub fn outcome(&mut self, outcome: &'static str, summary: &Summary) {
        self.outcome = outcome;
        self.usage = summary.usage;
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        tracing::info!(
            request_id = self.request_id,
            endpoint = self.endpoint,
            outcome = self.outcome,
            prompt_tokens = self.usage.prompt_tokens,
            output_tokens = self.usage.completion_tokens,
            cached_tokens = self.usage.prompt_tokens_details.cached_tokens,
            elapsed_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            "request ended"
        );
    }
}
