//! One log line per request, at its end, however it ended. Never its text.

use std::time::Instant;

use super::usage::Usage;

/// What the line says but for the usage.
pub struct RequestLog {
    request_id: String,
    endpoint: &'static str,
    started: Instant,
    /// How it ended; until that is known, the client hung up.
    pub outcome: &'static str,
}

impl RequestLog {
    pub fn new(request_id: String, endpoint: &'static str, started: Instant) -> Self {
        Self {
            request_id,
            endpoint,
            started,
            outcome: "disconnected",
        }
    }

    /// Writes the line.
    pub fn write(&self, usage: Usage) {
        tracing::info!(
            request_id = self.request_id,
            endpoint = self.endpoint,
            outcome = self.outcome,
            prompt_tokens = usage.prompt_tokens,
            output_tokens = usage.completion_tokens,
            cached_tokens = usage.prompt_tokens_details.cached_tokens,
            elapsed_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            "request ended"
        );
    }
}
