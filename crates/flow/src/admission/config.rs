//! What an operator may say about admission.

use std::time::Duration;

/// Objectives and limits of the queue before the workers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdmissionConfig {
    /// Place requests at once, whatever the load: no queue, no refusal.
    pub off: bool,
    /// A request whose first token would come later is refused. `None`: no objective.
    pub ttft: Option<Duration>,
    /// Mean time per token after the first; a request that would exceed it waits.
    pub tpot: Option<Duration>,
    /// Prompt work that may wait in a worker: enough that it never idles, little enough that the
    /// order counts in which requests are let in.
    pub ahead: Duration,
    /// Sequences that may wait.
    pub max_sequences: u64,
    /// Prompt tokens that may wait.
    pub max_tokens: u64,
    /// How long a request may wait.
    pub max_wait: Duration,
    /// How long requests wait for a worker when none is left that could take them.
    pub recover: Duration,
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        Self {
            off: false,
            ttft: None,
            tpot: None,
            ahead: Duration::from_millis(500),
            max_sequences: 1024,
            max_tokens: 4_000_000,
            max_wait: Duration::from_secs(1800),
            recover: Duration::from_secs(10),
        }
    }
}
