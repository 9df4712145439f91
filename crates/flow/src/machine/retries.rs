//! How often choices that are served together were retried, and when to give up.

use std::collections::HashMap;
use std::time::Duration;

use tasuki_core::{FailureKind, Retry};

use super::config::MachineConfig;
use super::io::RetryReason;
use crate::generation::ServeError;

/// Without its jitter.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Of a pause.
const MAX_JITTER: f64 = 0.5;

/// The retries of a group so far, by reason.
#[derive(Debug, Clone, Default)]
pub struct RetryCounts {
    /// Attempts that failed, of each kind.
    failures: HashMap<FailureKind, u32>,
    losses_in_a_row: u32,
    pub kv_losses: u32,
    /// Since the last token.
    refusals_in_a_row: u32,
    /// Attempts that a worker gave back for want of memory, whether or not they had tokens.
    returns: u32,
    /// When the first attempt since the last token found no room.
    no_room_since: Option<Duration>,
    /// Pauses since the last attempt for want of budget, and when the first one began.
    budget_pauses: u32,
    no_budget_since: Option<Duration>,
}

impl RetryCounts {
    /// A new token arrived.
    pub fn progress(&mut self) {
        self.losses_in_a_row = 0;
        self.refusals_in_a_row = 0;
        self.no_room_since = None;
    }

    /// An attempt begins, within the budget.
    pub fn has_budget(&mut self) {
        self.budget_pauses = 0;
        self.no_budget_since = None;
    }

    /// Counts one more: how long to pause before it. `jitter`, in [0, 1), lengthens pauses and
    /// makes one where there is none, so that requests that failed together do not come back
    /// together.
    ///
    /// # Errors
    ///
    /// It is one too many.
    pub fn count(
        &mut self,
        reason: RetryReason,
        now: Duration,
        config: &MachineConfig,
        jitter: f64,
    ) -> Result<Duration, ServeError> {
        let at_most = |count: u32, limit: u32, message: String| {
            if count > limit {
                let kind = reason.kind();
                return Err(ServeError::Failed { kind, message });
            }
            Ok(config.spread.mul_f64(jitter))
        };
        match reason {
            RetryReason::Failed(kind) => {
                self.count_failure(kind, config)?;
                Ok(config.spread.mul_f64(jitter))
            }
            RetryReason::WorkerLost => {
                self.losses_in_a_row += 1;
                let losses = self.losses_in_a_row;
                let message = format!("{losses} workers were lost while they ran the request");
                at_most(losses, config.max_losses_in_a_row, message)
            }
            RetryReason::KvLost => {
                self.kv_losses += 1;
                let losses = self.kv_losses;
                let message = format!("the KV cache of the request was lost {losses} times");
                at_most(losses, config.max_kv_losses, message)
            }
            RetryReason::Refused => {
                self.refusals_in_a_row += 1;
                self.wait_for_room(self.refusals_in_a_row, now, config, jitter)
            }
            // A worker gives back its youngest requests, so one that comes back at once may
            // be computed and given back without end.
            RetryReason::Returned => {
                self.returns += 1;
                self.wait_for_room(self.returns - 1, now, config, jitter)
            }
            RetryReason::Retargeted(_) => Ok(Duration::ZERO),
        }
    }

    /// As often as the kind of failure allows, and all kinds together `max_failures` times.
    fn count_failure(
        &mut self,
        kind: FailureKind,
        config: &MachineConfig,
    ) -> Result<(), ServeError> {
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

    /// The pause before the next attempt, of which `pauses` precede with it; 0: none.
    fn wait_for_room(
        &mut self,
        pauses: u32,
        now: Duration,
        config: &MachineConfig,
        jitter: f64,
    ) -> Result<Duration, ServeError> {
        let since = *self.no_room_since.get_or_insert(now);
        if now.saturating_sub(since) > config.refused_limit {
            return Err(ServeError::Unavailable {
                reason: format!(
                    "for {:.0} s workers have had no room for it, the limit is {:.0} s; send less at \
                     a time, or add workers",
                    now.saturating_sub(since).as_secs_f64(),
                    config.refused_limit.as_secs_f64(),
                ),
                retry_after_s: 10,
            });
        }
        let Some(doublings) = pauses.checked_sub(1) else {
            return Ok(config.spread.mul_f64(jitter));
        };
        Ok(growing_pause(doublings, config, jitter))
    }

    /// The pause before a retry that the budget of all requests does not allow now.
    ///
    /// # Errors
    ///
    /// It has not allowed it for too long.
    pub fn wait_for_budget(
        &mut self,
        now: Duration,
        config: &MachineConfig,
        jitter: f64,
    ) -> Result<Duration, ServeError> {
        let since = *self.no_budget_since.get_or_insert(now);
        if now.saturating_sub(since) > config.refused_limit {
            return Err(ServeError::Unavailable {
                reason: format!(
                    "attempts fail on all workers, and for {:.0} s the budget of retries has allowed \
                     no further one, the limit is {:.0} s; see the router's log for what failed",
                    now.saturating_sub(since).as_secs_f64(),
                    config.refused_limit.as_secs_f64(),
                ),
                retry_after_s: 10,
            });
        }
        let pause = growing_pause(self.budget_pauses, config, jitter);
        self.budget_pauses += 1;
        Ok(pause)
    }
}

fn growing_pause(doublings: u32, config: &MachineConfig, jitter: f64) -> Duration {
    let pause = config.refused_pause * 2u32.pow(doublings.min(8));
    pause.min(LONGEST_PAUSE).mul_f64(1.0 + jitter * MAX_JITTER)
}

impl RetryReason {
    /// Whether the budget of all requests limits the retry. The requests of a worker that is
    /// lost, or whose KV is, are placed again whatever the budget: that happens once for each.
    pub(super) fn needs_budget(self) -> bool {
        matches!(
            self,
            RetryReason::Failed(_) | RetryReason::Returned | RetryReason::Refused
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_or_an_attempt_ends_the_time_without_room_or_budget() {
        let config = MachineConfig::default();
        let mut counts = RetryCounts::default();
        let seconds = Duration::from_secs;
        let refused = |counts: &mut RetryCounts, at| {
            let pause = counts.count(RetryReason::Refused, seconds(at), &config, 0.0);
            pause.is_ok()
        };
        assert!(refused(&mut counts, 0) && refused(&mut counts, 120));
        assert!(!refused(&mut counts, 121));
        counts.progress();
        assert!(refused(&mut counts, 200) && refused(&mut counts, 320));
        let wait = |counts: &mut RetryCounts, at| {
            let pause = counts.wait_for_budget(seconds(at), &config, 0.0);
            pause.ok()
        };
        let first = wait(&mut counts, 0);
        assert!(first.is_some() && wait(&mut counts, 120) > first);
        assert_eq!(wait(&mut counts, 121), None);
        counts.has_budget();
        assert_eq!(wait(&mut counts, 200), first);
    }
}
