//! The registry as a request's machine sees it.

use std::time::Instant;

use tasuki_core::{RequestView, WorkerId};
use tasuki_flow::{Fleet, Placed, WorkerKey, WorkerRef};
use tasuki_policy::NoPlacement;

use super::registry::Registry;

impl Fleet for &Registry {
    fn place(&mut self, request: &RequestView) -> Result<Placed, NoPlacement> {
        self.lock().fleet.place(request)
    }

    fn place_decode(
        &mut self,
        request: &RequestView,
        prefill: WorkerKey,
        tried: &[WorkerId],
    ) -> Option<WorkerRef> {
        self.lock().fleet.place_decode(request, prefill, tried)
    }

    fn on_request(&mut self) {
        let now = self.since_start(Instant::now());
        self.lock_budget().on_request(now);
    }

    fn may_retry(&mut self) -> bool {
        let now = self.since_start(Instant::now());
        self.lock_budget().take(now)
    }
}
