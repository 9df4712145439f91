//! Where a server's time went, as Tasuki's router tells it with an answer.

use serde::{Deserialize, Serialize};

/// The phases of one request, in milliseconds; None where the server does not tell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Phases {
    pub queue_ms: Option<f64>,
    pub prefill_ms: Option<f64>,
    pub first_token_ms: Option<f64>,
    pub handshake_ms: Option<f64>,
    pub transfer_ms: Option<f64>,
    pub transfer_exposed_ms: Option<f64>,
    pub first_decode_ms: Option<f64>,
    pub messages_ms: Option<f64>,
    pub decode_ms: Option<f64>,
    pub total_ms: Option<f64>,
}

/// How many phases there are.
pub const PHASES: usize = 10;

impl Phases {
    /// Every phase: its name in results, its name in the report, its time.
    pub fn named(&self) -> [(&'static str, &'static str, Option<f64>); PHASES] {
        [
            ("queue_ms", "Queue", self.queue_ms),
            ("prefill_ms", "Prefill", self.prefill_ms),
            (
                "first_token_ms",
                "First token (server)",
                self.first_token_ms,
            ),
            ("handshake_ms", "Handshake", self.handshake_ms),
            ("transfer_ms", "KV transfer", self.transfer_ms),
            (
                "transfer_exposed_ms",
                "KV transfer not hidden",
                self.transfer_exposed_ms,
            ),
            ("first_decode_ms", "First decode", self.first_decode_ms),
            ("messages_ms", "Messages", self.messages_ms),
            ("decode_ms", "Decode", self.decode_ms),
            ("total_ms", "Total (server)", self.total_ms),
        ]
    }
}
