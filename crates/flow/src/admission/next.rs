//! Which one of those that wait is next, and whether there is room for it.

use std::collections::BTreeSet;
use std::time::Duration;

use tasuki_core::{Forecast, WorkerId};
use tasuki_policy::NoPlacement;

use super::{AdmissionConfig, EntrantId, Line};
use crate::FleetState;

impl Line {
    /// The first one that a worker could take, with its forecast. Without a forecast: no worker
    /// will take it, or none could for so long that it is let in and its machine says why.
    ///
    /// One that is too large for the workers that are up waits for the others, and holds up no
    /// smaller one meanwhile. Nor does one that only `awaited` workers may serve: others before it
    /// wait for room there. `since`: of `nowhere_since`, before the first call of a turn.
    pub(super) fn next(
        &mut self,
        config: &AdmissionConfig,
        now: Duration,
        fleet: &FleetState,
        awaited: &BTreeSet<WorkerId>,
        since: Option<Duration>,
    ) -> Option<(EntrantId, Option<Forecast>)> {
        self.nowhere_since = None;
        let mut too_large: Option<(u64, u32)> = None;
        for waiting in self.queue.iter() {
            if !awaited.is_empty()
                && let Some(only) = fleet.only(&waiting.entrant.view)
                && !only.is_empty()
                && only.is_subset(awaited)
            {
                continue;
            }
            let view = waiting.view(config, now, awaited);
            let size = (view.total_tokens(), view.choices);
            if too_large.is_some_and(|(tokens, choices)| size.0 >= tokens && size.1 >= choices) {
                continue;
            }
            match fleet.forecast(&view) {
                Ok(forecast) => return Some((waiting.id, Some(forecast))),
                Err(reason) if !reason.may_pass() => return Some((waiting.id, None)),
                Err(reason) => {
                    let since = *self.nowhere_since.get_or_insert(since.unwrap_or(now));
                    if now.saturating_sub(since) >= config.recover {
                        return Some((waiting.id, None));
                    }
                    match reason {
                        // It concerns this request: others have workers.
                        NoPlacement::NoHandoff { .. }
                        | NoPlacement::NoAdapter
                        | NoPlacement::OtherIdentity => {}
                        reason if reason.is_limit() => too_large = Some(size),
                        _ => return None,
                    }
                }
            }
        }
        None
    }

    /// Whether the placement that a request would get now has room for it.
    pub(super) fn has_room(&self, config: &AdmissionConfig, forecast: &Forecast) -> bool {
        let token_s = self.tpot.p95_of(forecast.split, forecast.step_s);
        let too_slow = config.tpot.is_some_and(|tpot| token_s > tpot.as_secs_f64());
        let ahead = config
            .ttft
            .map_or(config.ahead, |ttft| config.ahead.min(ttft / 4));
        forecast.idle
            || forecast.missing_tokens == 0.0
                && !too_slow
                && self.ttft.of(forecast.split, forecast.wait_s) <= ahead.as_secs_f64()
    }
}
