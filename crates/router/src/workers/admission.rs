//! Requests that wait to be placed: `tasuki_flow::admission` with real waiting.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tasuki_core::{Forecast, ModelId, WorkerId};
use tasuki_flow::admission::{Entrant, EntrantId, Refusal, Verdict};
use tokio::sync::oneshot;
use tokio::time::sleep;

use super::Registry;
use super::registry::State;

/// How often those that wait are looked at, besides at every report: a refusal is due within
/// 50 ms.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A request's place in the queue and in the doorway, given up when it is dropped.
pub struct Turn {
    registry: Arc<Registry>,
    id: EntrantId,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.registry.lock();
        state.waiters.remove(&self.id);
        state.admission.withdraw(self.id);
        state.admission.passed(self.id);
        state.settle(self.registry.since_start(Instant::now()));
    }
}

impl Registry {
    /// Waits until the request may be placed. The next one may as soon as the [`Turn`] is
    /// dropped: hold it until the request is dispatched. The workers are those to avoid.
    ///
    /// # Errors
    ///
    /// It is turned away.
    pub async fn admit(
        self: &Arc<Self>,
        entrant: Entrant,
    ) -> Result<(Turn, Forecast, Vec<WorkerId>), Refusal> {
        let (sender, verdict) = oneshot::channel();
        let turn = {
            let mut state = self.lock();
            let State {
                admission, fleet, ..
            } = &mut *state;
            fleet.on_arrival(&entrant.view, entrant.arrived);
            let id = admission.enter(entrant, fleet);
            state.waiters.insert(id, sender);
            state.settle(self.since_start(Instant::now()));
            Turn {
                registry: Arc::clone(self),
                id,
            }
        };
        match verdict.await {
            Ok(Verdict::Admitted(forecast, avoid)) => Ok((turn, forecast, avoid)),
            Ok(Verdict::Refused(refusal)) => Err(refusal),
            Err(_) => unreachable!("a waiter is removed with its verdict or by its turn"),
        }
    }

    /// Looks at those that wait, again and again.
    pub async fn keep_settling(&self) -> std::convert::Infallible {
        loop {
            sleep(LOOK_AGAIN).await;
            self.lock().settle(self.since_start(Instant::now()));
        }
    }

    /// What became of a forecast, see [`tasuki_flow::admission::Admission::learn`].
    pub fn learn(
        &self,
        model: ModelId,
        forecast: &Forecast,
        ttft: Option<Duration>,
        tpot: Option<Duration>,
    ) {
        let now = self.since_start(Instant::now());
        let mut state = self.lock();
        state.admission.learn(model, forecast, ttft, tpot, now);
    }

    /// Requests that wait to be placed, their sequences and prompt tokens.
    pub fn waiting(&self) -> (usize, u64, u64) {
        self.lock().admission.waiting()
    }
}

impl State {
    /// Tells everybody who is let in or turned away now.
    pub fn settle(&mut self, now: Duration) {
        for (id, verdict) in self.admission.settle(now, &self.fleet) {
            if let Some(waiter) = self.waiters.remove(&id) {
                // Who left gives the place up by itself.
                let _ = waiter.send(verdict);
            }
        }
    }
}
