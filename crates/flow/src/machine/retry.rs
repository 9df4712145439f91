//! Abandoning an attempt: what was streamed stands, the rest waits for the next attempt.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use super::Machine;
use super::attempt::{Group, GroupState, LegState};
use super::io::{Effect, Fleet, RetryReason};
use crate::leg::LegEndReason;

/// Tells requests that fail together apart.
pub(super) fn jitter_seed(request_id: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    request_id.hash(&mut hasher);
    hasher.finish()
}

impl Machine {
    /// Abandons an attempt; its unfinished choices wait for the next one.
    pub(super) fn retry(&mut self, group: usize, reason: RetryReason, detail: &str, now: Duration) {
        self.report_retry(group, reason, detail);
        let jitter = self.jitter(self.next_attempt);
        let retries = &mut self.groups[group].retries;
        let counted = retries.count(reason, now, &self.config, jitter);
        let pause = match counted {
            Ok(pause) => pause,
            Err(error) => {
                self.end(Some(error));
                return;
            }
        };
        self.abort(group, &[]);
        self.timings.replacements += 1;
        let prefilled = self.is_prefilled(group);
        let unfinished = self.unfinished(group);
        let old = &mut self.groups[group];
        old.choices.clear();
        let state = std::mem::replace(&mut old.state, GroupState::Ended);
        let (retries, mut avoid) = (old.retries.clone(), std::mem::take(&mut old.avoid));
        let phases = old.phases.clone();
        let mut warm = None;
        if let GroupState::Running(attempt) = state {
            let prefill = &attempt.prefill;
            let prefilled = prefilled && prefill.state != LegState::Lost
                || prefill.state == LegState::Ended(LegEndReason::HandedOff);
            warm = prefilled.then_some(prefill.worker.key.worker);
            let at_fault = attempt.at_fault(reason);
            avoid.retain(|worker| !at_fault.contains(worker));
            avoid.extend(at_fault);
        }
        for choices in self.regroup(unfinished) {
            for &index in &choices {
                self.choices[index as usize].forget_early();
            }
            self.groups.push(Group {
                choices,
                state: GroupState::Waiting {
                    not_before: now + pause,
                    since: now + pause,
                    for_workers: false,
                },
                avoid: avoid.clone(),
                warm,
                retries: retries.clone(),
                needs_budget: reason.needs_budget(),
                phases: phases.clone(),
            });
        }
    }

    /// Whether a group may be placed as far as the budget of retries is concerned; if not, it
    /// waits longer and longer, and is given up in the end.
    pub(super) fn is_within_budget(
        &mut self,
        group: usize,
        now: Duration,
        fleet: &mut dyn Fleet,
    ) -> bool {
        let jitter = self.jitter(now);
        let waiting = &mut self.groups[group];
        if !waiting.needs_budget || fleet.may_retry() {
            waiting.needs_budget = false;
            waiting.retries.has_budget();
            return true;
        }
        match waiting.retries.wait_for_budget(now, &self.config, jitter) {
            Ok(pause) => {
                waiting.state = GroupState::Waiting {
                    not_before: now + pause,
                    since: now + pause,
                    for_workers: false,
                };
            }
            Err(error) => self.end(Some(error)),
        }
        false
    }

    /// In [0, 1), by the request and `of`.
    fn jitter(&self, of: impl Hash) -> f64 {
        let mut hasher = DefaultHasher::new();
        (self.jitter_seed, of).hash(&mut hasher);
        (hasher.finish() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// For logs and metrics.
    pub(super) fn report_retry(&mut self, group: usize, reason: RetryReason, detail: &str) {
        let attempt = self.groups[group].attempt().map(|attempt| attempt.number);
        self.effects.push_back(Effect::Retry {
            attempt: attempt.unwrap_or_default(),
            reason,
            detail: detail.to_owned(),
        });
    }

    /// Choices without a token can share a prefill; each of the others has tokens of its own
    /// to resume.
    fn regroup(&self, unfinished: Vec<u32>) -> Vec<Vec<u32>> {
        let has_none = |index: &u32| self.choices[*index as usize].tokens.is_empty();
        let (fresh, begun): (Vec<u32>, Vec<u32>) = unfinished.into_iter().partition(has_none);
        let fresh = (!fresh.is_empty()).then_some(fresh);
        begun
            .into_iter()
            .map(|index| vec![index])
            .chain(fresh)
            .collect()
    }
}
