//! A decider to compare with: long prompts are split, short ones are not, whatever the load.
//!
//! That is what llm-d's prefix-based decider and Dynamo's conditional disaggregation do: a
//! request whose prompt has fewer uncached tokens than a threshold is served whole by a decode
//! worker. Among the workers of a half the one with the fewest requests is taken.

use std::collections::BTreeMap;

use tasuki_core::{Health, ModelId, RequestView, Role, WorkerId, WorkerView};
use tasuki_policy::{Choosing, NoPlacement, Placement, Policy};

/// See the module. It looks at every worker for each request.
#[derive(Debug)]
pub(crate) struct PromptThreshold {
    tokens: u32,
    workers: BTreeMap<WorkerId, WorkerView>,
}

impl PromptThreshold {
    pub fn new(tokens: u32) -> Self {
        Self {
            tokens,
            workers: BTreeMap::new(),
        }
    }

    fn least(&self, may: impl Fn(Role) -> bool, avoid: &[WorkerId]) -> Option<WorkerId> {
        let able = self.workers.values().filter(|view| {
            view.health == Health::Ready && may(view.role) && !avoid.contains(&view.id)
        });
        able.min_by_key(|view| (view.requests(), view.id))
            .map(|view| view.id)
    }
}

impl Policy for PromptThreshold {
    fn update(&mut self, _: ModelId, worker: &WorkerView) {
        self.workers.insert(worker.id, worker.clone());
    }

    fn remove(&mut self, worker: WorkerId) {
        self.workers.remove(&worker);
    }

    fn place(&self, request: &RequestView, _: Choosing<'_>) -> Result<Placement, NoPlacement> {
        let missing = |role| NoPlacement::NoRole { role };
        let decode = self.least(Role::decodes, &request.avoid);
        let decode = decode.ok_or(missing(Role::Decode))?;
        let uncached = request.prompt_tokens - request.cached_tokens(decode);
        let prefill = if uncached < self.tokens || request.max_tokens < 2 {
            decode
        } else {
            let prefill = self.least(|role| role == Role::Prefill, &request.avoid);
            prefill.ok_or(missing(Role::Prefill))?
        };
        Ok(Placement {
            prefill,
            decode,
            cost_s: 0.0,
            why: None,
        })
    }

    fn place_decode(
        &self,
        _: &RequestView,
        _: WorkerId,
        tried: &[WorkerId],
        _: Choosing<'_>,
    ) -> Option<WorkerId> {
        self.least(Role::decodes, tried)
    }
}
