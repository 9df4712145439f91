//! What went wrong for choices that travel together, and how patient to be.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tasuki_core::{FailureKind, Retry};

use super::config::MachineConfig;
use crate::serve::api::ServeError;

const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What a group of choices has been through.
#[derive(Debug, Clone, Default)]
pub struct Setbacks {
    /// Attempts that failed, of each kind.
    pub failures: HashMap<FailureKind, u32>,
    pub losses_in_a_row: u32,
    pub kv_losses: u32,
    refusals_in_a_row: u32,
    refused_since: Option<Instant>,
}

impl Setbacks {
    /// A new token arrived.
    pub fn progress(&mut self) {
        self.losses_in_a_row = 0;
        self.refusals_in_a_row = 0;
        self.refused_since = None;
    }

    /// An attempt failed; an error when a retry cannot help, or no longer.
    pub fn fail(&mut self, kind: FailureKind, config: &MachineConfig) -> Result<(), ServeError> {
        let of_kind = self.failures.entry(kind).or_default();
        *of_kind += 1;
        let limit = match kind.retry() {
            Retry::Never => 0,
            Retry::Once => 1,
            Retry::Again => config.max_failures,
        };
        let too_many = *of_kind > limit;
        let attempts: u32 = self.failures.values().sum();
        if too_many || attempts > config.max_failures {
            return Err(ServeError::Failed {
                kind,
                message: format!(
                    "{attempts} attempts to run the request failed; the last one by a {kind} \
                     failure"
                ),
            });
        }
        Ok(())
    }

    /// How long to wait after a refusal; an error once they have gone on for too long.
    pub fn pause_after_refusal(
        &mut self,
        now: Instant,
        config: &MachineConfig,
    ) -> Result<Duration, ServeError> {
        let since = *self.refused_since.get_or_insert(now);
        if now - since > config.refused_limit {
            return Err(ServeError::Unavailable {
                reason: "the workers have had no room for the request for too long".to_owned(),
                retry_after_s: 10,
            });
        }
        let doublings = self.refusals_in_a_row.min(8);
        self.refusals_in_a_row += 1;
        Ok((config.refused_pause * 2u32.pow(doublings)).min(LONGEST_PAUSE))
    }
}
