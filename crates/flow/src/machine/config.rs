//! Limits of retries and waits.

use std::time::Duration;

/// What to do when the KV of a request is lost on its way to the decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnKvLoss {
    /// Prefill again.
    #[default]
    Recompute,
    /// Fail the request.
    Fail,
}

/// Limits of the state machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MachineConfig {
    pub on_kv_loss: OnKvLoss,
    /// How long an accepted request waits for a worker when nobody is left.
    pub recover: Duration,
    /// After the last token: how long to wait for the legs' own ends, which bring timings.
    pub settle: Duration,
    /// A leg that decodes and has no token for so long has failed, though its worker reports. Not
    /// one of an opaque request, whose link knows whether the worker or the client is slow.
    pub stalled: Option<Duration>,
    /// Attempts that may end in a worker's failure before the request fails.
    pub max_failures: u32,
    /// Workers that may be lost in a row without a new token: a request that
    /// kills its workers must not kill all of them.
    pub max_losses_in_a_row: u32,
    /// Lost handoffs after which the request is no longer split, roles permitting.
    pub whole_after_kv_losses: u32,
    pub max_kv_losses: u32,
    /// First pause after a refusal with nobody else to ask; doubles up to a second.
    pub refused_pause: Duration,
    /// How long refusals may go on, and waits for the budget of retries.
    pub refused_limit: Duration,
    /// A retry that needs no pause waits a random part of this, so that the requests of a lost
    /// worker do not all come back in one instant.
    pub spread: Duration,
}

impl Default for MachineConfig {
    fn default() -> Self {
        Self {
            on_kv_loss: OnKvLoss::default(),
            recover: Duration::from_secs(10),
            settle: Duration::from_millis(250),
            stalled: Some(Duration::from_secs(30)),
            max_failures: 3,
            max_losses_in_a_row: 4,
            whole_after_kv_losses: 2,
            max_kv_losses: 6,
            refused_pause: Duration::from_millis(50),
            refused_limit: Duration::from_secs(120),
            spread: Duration::from_millis(20),
        }
    }
}
