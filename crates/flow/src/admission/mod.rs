//! Which requests are placed now, which wait, and which are turned away.
//!
//! ```text
//!           enter                 there is room             passed
//!  shell ─────────▶ queue of its ───────────────▶ doorway ─────────▶ placed
//!                   model  │                     (one at a time)
//!                          └──▶ refused: too late, too many
//! ```
//!
//! A request is let in when the placement that it would get now has room for it: memory for
//! its prompt and first growth, where it prefills and where it decodes; little prompt work
//! before it; a decode step within the objective. An idle worker always has room. So decode
//! memory is promised before prefill begins, and the order of the queue decides, not that in
//! which requests reached a worker.
//!
//! A request that only some workers may serve, those that have its adapter or those of one engine,
//! keeps its place while it waits for room there. Those behind it are placed on other workers, if these
//! have room.
//!
//! A request is refused when it comes, if its first token is expected later than the
//! objective, and while it waits, once that is certain. Requests that were let in are never
//! refused: what follows is their [`crate::Machine`]'s.
//!
//! Owned by the shell. Times are durations since the shell started.

mod config;
mod corrections;
mod next;
mod pace;
mod prompt_load;
mod queue;
mod refusal;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tasuki_core::{Forecast, ModelId, WorkerId};

pub use self::config::AdmissionConfig;
pub(crate) use self::corrections::P95;
use self::corrections::{Corrections, TPOT_KEPT, TTFT_KEPT};
use self::pace::Pace;
use self::prompt_load::PromptLoad;
pub use self::queue::{Entrant, EntrantId};
use self::queue::{Queue, Waiting};
pub use self::refusal::{Refusal, RefusalReason};
use crate::FleetState;

/// Of an objective, what forecasts may use up.
const SHARE: f64 = 0.9;
/// The same for one that comes and has others before it. How long they take is less certain, and
/// to be refused after a wait is worse than at once.
const QUEUED_SHARE: f64 = 0.6;
/// The first token of a prompt that itself takes long may come after so many times as long,
/// whatever the objective: it could never be served otherwise.
const LONG_PROMPT: f64 = 2.0;
/// How often those that wait are looked at for being too late.
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// Clients are not told to come back later than that.
const LATEST_RETRY: Duration = Duration::from_secs(60);

/// What becomes of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// Place it now, on other workers than these where that is possible: requests before it wait
    /// for room there. The next one follows when [`Admission::passed`] says that it is placed.
    Admitted(Forecast, Vec<WorkerId>),
    Refused(Refusal),
}

/// The queues of a shell, one for each model.
#[derive(Debug, Default)]
pub struct Admission {
    config: AdmissionConfig,
    next: u64,
    lines: BTreeMap<ModelId, Line>,
    /// That no worker could take: waiting for others would not change that.
    hopeless: Vec<EntrantId>,
}

/// The requests of one model.
#[derive(Debug)]
struct Line {
    queue: Queue,
    /// Let in, and not placed yet: the fleet does not count it.
    doorway: Option<EntrantId>,
    /// Since when no worker could take the first one, or those that others pass.
    nowhere_since: Option<Duration>,
    /// When all that wait were looked at last.
    looked: Duration,
    pace: Pace,
    prompts: PromptLoad,
    ttft: Corrections,
    tpot: Corrections,
}

impl Default for Line {
    fn default() -> Self {
        Self {
            queue: Queue::default(),
            doorway: None,
            nowhere_since: None,
            looked: Duration::ZERO,
            pace: Pace::default(),
            prompts: PromptLoad::default(),
            ttft: Corrections::new(TTFT_KEPT),
            tpot: Corrections::new(TPOT_KEPT),
        }
    }
}

impl Admission {
    pub fn new(config: AdmissionConfig) -> Self {
        Self {
            config,
            ..Self::default()
        }
    }

    /// A request arrives. [`Admission::settle`] has its verdict, now or later. One that no
    /// worker could take is let in: its machine says why.
    pub fn enter(&mut self, entrant: Entrant, fleet: &FleetState) -> EntrantId {
        self.next += 1;
        let id = EntrantId(self.next);
        let Ok(forecast) = fleet.forecast(&entrant.view) else {
            self.hopeless.push(id);
            return id;
        };
        let line = self.lines.entry(entrant.view.model).or_default();
        if line.queue.is_empty() {
            let workers = || fleet.ready_workers(entrant.view.model);
            line.pace.begin(workers, entrant.arrived);
        }
        line.queue.push(Waiting {
            id,
            entrant,
            forecast,
            is_new: true,
        });
        id
    }

    /// A request does not wait any more: its client left.
    pub fn withdraw(&mut self, id: EntrantId) {
        for line in self.lines.values_mut() {
            line.queue.remove(id);
        }
    }

    /// A request that was let in is placed, or needs no place any more.
    pub fn passed(&mut self, id: EntrantId) {
        for line in self.lines.values_mut() {
            line.doorway = line.doorway.filter(|&there| there != id);
        }
    }

    /// A request that was let in has had its tokens: times from its entrance to the first
    /// token, and per token after it.
    pub fn learn(
        &mut self,
        model: ModelId,
        forecast: &Forecast,
        ttft: Option<Duration>,
        tpot: Option<Duration>,
        now: Duration,
    ) {
        let Some(line) = self.lines.get_mut(&model) else {
            return;
        };
        let split = forecast.split;
        if let Some(ttft) = ttft {
            let forecast_s = forecast.ttft_s();
            line.ttft.learn(split, forecast_s, ttft.as_secs_f64(), now);
        }
        if let Some(tpot) = tpot {
            line.tpot
                .learn(split, forecast.step_s, tpot.as_secs_f64(), now);
        }
    }

    /// Requests for a model that wait.
    pub fn waiting_for(&self, model: ModelId) -> usize {
        self.lines.get(&model).map_or(0, |line| line.queue.len())
    }

    /// The same of all models, their sequences and their prompt tokens.
    pub fn waiting(&self) -> (usize, u64, u64) {
        let mut sums = (0, 0, 0);
        for Line { queue, .. } in self.lines.values() {
            sums.0 += queue.len();
            sums.1 += queue.sequences;
            sums.2 += queue.tokens;
        }
        sums
    }

    /// Lets in and refuses what can be now. To be called after every change of the queue and
    /// of the fleet, and now and then while requests wait.
    pub fn settle(&mut self, now: Duration, fleet: &FleetState) -> Vec<(EntrantId, Verdict)> {
        let config = self.config;
        let hopeless = self.hopeless.drain(..);
        let mut verdicts: Vec<_> = hopeless
            .map(|id| (id, Verdict::Admitted(Forecast::default(), Vec::new())))
            .collect();
        for line in self.lines.values_mut() {
            if !line.queue.is_empty() {
                line.let_in(&config, now, fleet, &mut verdicts);
                line.refuse(&config, now, &mut verdicts);
            }
        }
        verdicts
    }
}

impl Line {
    fn let_in(
        &mut self,
        config: &AdmissionConfig,
        now: Duration,
        fleet: &FleetState,
        verdicts: &mut Vec<(EntrantId, Verdict)>,
    ) {
        let since = self.nowhere_since;
        // Requests that no others may serve wait for room on these: none behind them takes it.
        let mut awaited = BTreeSet::new();
        while self.doorway.is_none() || config.off {
            let Some((id, forecast)) = self.next(config, now, fleet, &awaited, since) else {
                return;
            };
            let Some(forecast) = forecast else {
                self.queue.let_in(id);
                self.doorway = Some(id);
                verdicts.push((id, Verdict::Admitted(Forecast::default(), Vec::new())));
                return;
            };
            let forecast = self.prompts.with_prompts(forecast, now);
            let Some(next) = self.queue.get(id) else {
                return;
            };
            let model = next.entrant.view.model;
            if let Some(reason) = self.too_late(config, next, &forecast, 0.0, now) {
                let refusal = self.turn_away(id, reason, now);
                verdicts.push((id, Verdict::Refused(refusal)));
                continue;
            }
            let has_room = self.has_room(config, &forecast)
                && (awaited.is_empty()
                    || !fleet.places_on(&next.view(config, now, &awaited), &awaited));
            if !config.off && !has_room {
                let Some(only) = fleet.only(&next.entrant.view) else {
                    return;
                };
                awaited.extend(only.iter());
                continue;
            }
            // One that did not wait says nothing of how fast the queue moves.
            if let Some(waiting) = self.queue.let_in(id)
                && !waiting.is_new
            {
                self.pace.let_in(waiting.forecast.work_s, now);
            }
            let workers = || fleet.ready_workers(model);
            self.prompts.let_in(&forecast, workers, now);
            self.doorway = Some(id);
            let avoid = awaited.iter().copied().collect();
            verdicts.push((id, Verdict::Admitted(forecast, avoid)));
        }
    }

    /// Turns away what does not fit in the queue, and what will be too late.
    fn refuse(
        &mut self,
        config: &AdmissionConfig,
        now: Duration,
        verdicts: &mut Vec<(EntrantId, Verdict)>,
    ) {
        while let Some((id, reason)) = self.too_many(config) {
            let refusal = self.turn_away(id, reason, now);
            verdicts.push((id, Verdict::Refused(refusal)));
        }
        if !self.queue.has_new && now < self.looked + LOOK_AGAIN {
            return;
        }
        self.looked = now;
        for (id, reason) in self.late(config, now) {
            let refusal = self.turn_away(id, reason, now);
            verdicts.push((id, Verdict::Refused(refusal)));
        }
    }

    /// The last one in the queue, if the queue is too long.
    fn too_many(&self, config: &AdmissionConfig) -> Option<(EntrantId, RefusalReason)> {
        let last = self.queue.last()?;
        let (sequences, tokens) = (last.sequences(), last.tokens());
        let reason = if self.queue.sequences > config.max_sequences {
            RefusalReason::Sequences {
                waiting: self.queue.sequences - sequences,
                asked: sequences,
                limit: config.max_sequences,
            }
        } else if self.queue.tokens > config.max_tokens {
            RefusalReason::Tokens {
                waiting: self.queue.tokens - tokens,
                asked: tokens,
                limit: config.max_tokens,
            }
        } else {
            return None;
        };
        Some((last.id, reason))
    }

    /// New ones whose first token is expected too late, and those that waited for too long.
    fn late(&mut self, config: &AdmissionConfig, now: Duration) -> Vec<(EntrantId, RefusalReason)> {
        let mut late = Vec::new();
        let mut ahead_s = 0.0;
        for waiting in self.queue.iter() {
            // What it waits for is known when it comes; later only its own prompt is certain.
            let rest = if waiting.is_new {
                waiting.forecast
            } else {
                Forecast {
                    wait_s: 0.0,
                    ..waiting.forecast
                }
            };
            let queue_s = match waiting.is_new {
                true => self.pace.time_s(ahead_s, now),
                false => 0.0,
            };
            let reason = self.too_late(config, waiting, &rest, queue_s, now);
            if let Some(reason) = reason.or_else(|| waited_too_long(config, waiting, now)) {
                late.push((waiting.id, reason));
                continue;
            }
            ahead_s += waiting.forecast.work_s;
        }
        self.queue.all_seen();
        late
    }

    /// Whether a request's first token would come too late. `queue_s`: until it is let in.
    fn too_late(
        &self,
        config: &AdmissionConfig,
        waiting: &Waiting,
        forecast: &Forecast,
        queue_s: f64,
        now: Duration,
    ) -> Option<RefusalReason> {
        let waited = now.saturating_sub(waiting.entrant.arrived);
        let ttft_s = self.ttft.of(forecast.split, forecast.ttft_s());
        let expected_s = waited.as_secs_f64() + queue_s + ttft_s;
        let long_s = LONG_PROMPT * self.ttft.of(forecast.split, forecast.prefill_s);
        let share = if queue_s > 0.0 { QUEUED_SHARE } else { SHARE };
        let limit_s = share * config.ttft?.as_secs_f64().max(long_s);
        (expected_s > limit_s).then(|| RefusalReason::TooLate {
            expected: seconds(expected_s),
            limit: seconds(limit_s),
        })
    }

    fn turn_away(&mut self, id: EntrantId, reason: RefusalReason, now: Duration) -> Refusal {
        let ahead = self.queue.ahead(id);
        let removed = self.queue.remove(id);
        let others = removed.is_some_and(|w| self.queue.has_others(&w.entrant.tenant));
        let wait_s = self.pace.time_s(ahead.work_s, now);
        Refusal {
            reason,
            ahead: ahead.requests,
            over_share: others && 2.0 * ahead.own_work_s >= ahead.work_s,
            retry_after: seconds(wait_s).clamp(Duration::from_secs(1), LATEST_RETRY),
        }
    }
}

/// A forecast as a time: one beyond all measure is the longest that there is.
fn seconds(forecast_s: f64) -> Duration {
    Duration::try_from_secs_f64(forecast_s).unwrap_or(Duration::MAX)
}

fn waited_too_long(
    config: &AdmissionConfig,
    waiting: &Waiting,
    now: Duration,
) -> Option<RefusalReason> {
    let waited = now.saturating_sub(waiting.entrant.arrived);
    (waited > config.max_wait).then_some(RefusalReason::Waited {
        waited,
        limit: config.max_wait,
    })
}
