//! A leg that its request's task runs, as those on workers of other engines.
//!
//! What happens of it reaches the request without another task's turn. The registry learns of its
//! first output and its end before, and counts what comes in between ten times a second: no
//! part of a stream waits for the lock of all.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Context;
use std::time::{Duration, Instant};

use tasuki_flow::fleet::LegSlot;
use tasuki_flow::{Input, LegEnd, LegEndReason, LegId, Output};

use super::registry::Registry;
use crate::woken::Woken;

/// Output is counted as late as this.
const COUNT_AFTER: Duration = Duration::from_millis(100);

/// What runs a leg to its end and reports it to its [`Reports`]. Dropped: the worker learns that
/// the answer is not read.
pub type LegWork = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A leg in its request's task. Dropped before its end, it is aborted.
pub struct LocalLeg {
    id: LegId,
    reports: Reports,
    /// `None`: it has ended.
    work: Option<LegWork>,
    woken: Woken,
}

/// Where a leg's work says what happened of it. Cheap to clone.
#[derive(Clone)]
pub struct Reports(Arc<Shared>);

struct Shared {
    registry: Arc<Registry>,
    id: LegId,
    slot: LegSlot,
    name: String,
    told: Mutex<Told>,
}

#[derive(Default)]
struct Told {
    /// Not taken yet by the request.
    inputs: VecDeque<Input>,
    /// Tokens that the registry has not counted, and when it last did.
    uncounted: usize,
    counted: Option<Instant>,
    /// The registry does not know the leg any more.
    is_void: bool,
}

impl LocalLeg {
    pub fn new(reports: Reports, work: LegWork) -> Self {
        Self {
            id: reports.0.id,
            reports,
            work: Some(work),
            woken: Woken::new(),
        }
    }

    pub fn id(&self) -> LegId {
        self.id
    }

    /// Goes on with the leg, if something has happened that it waits for. What it reports is to be
    /// taken from [`LocalLeg::next`].
    pub fn poll(&mut self, context: &Context<'_>) {
        let Some(work) = &mut self.work else {
            return;
        };
        let polled = self
            .woken
            .poll(context, |context| work.as_mut().poll(context));
        if polled.is_ready() {
            self.work = None;
        }
    }

    /// What was reported and not taken yet.
    pub fn next(&self) -> Option<Input> {
        self.reports.lock().inputs.pop_front()
    }

    pub fn has_ended(&self) -> bool {
        self.work.is_none()
    }

    /// Ends it now; what its request learns of that.
    pub fn abort(self) -> Option<Input> {
        let reports = self.reports.clone();
        drop(self);
        let last = reports.lock().inputs.pop_back();
        last.filter(|input| matches!(input, Input::Ended(..)))
    }
}

impl Drop for LocalLeg {
    fn drop(&mut self) {
        if self.work.take().is_some() {
            self.reports.end(LegEnd {
                reason: LegEndReason::Aborted,
                failure: LegEndReason::Aborted.usual_failure(),
                message: String::new(),
                answer: None,
                ticket: None,
                timings: None,
            });
        }
    }
}

impl Reports {
    pub fn new(registry: Arc<Registry>, id: LegId, slot: LegSlot, name: &str) -> Self {
        Self(Arc::new(Shared {
            registry,
            id,
            slot,
            name: name.to_owned(),
            told: Mutex::default(),
        }))
    }

    /// The leg's name on the connection.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The leg has output.
    pub fn output(&self, output: Output) {
        self.output_at(output, Instant::now());
    }

    /// The same, as of `now`.
    pub fn output_at(&self, output: Output, now: Instant) {
        let Shared {
            registry, id, slot, ..
        } = &*self.0;
        let cached = output.cached_prompt_tokens;
        let mut told = self.lock();
        told.uncounted += output.tokens.len();
        let waits = |counted: Instant| now.saturating_duration_since(counted) < COUNT_AFTER;
        if cached > 0 || !told.counted.is_some_and(waits) {
            let tokens = std::mem::take(&mut told.uncounted);
            told.counted = Some(now);
            told.is_void |= !registry.on_leg_output(id.worker, *slot, tokens, cached, now);
        }
        if !told.is_void {
            told.inputs.push_back(Input::Output(*id, output));
        }
    }

    /// The leg has ended.
    pub fn end(&self, end: LegEnd) {
        let Shared {
            registry, id, name, ..
        } = &*self.0;
        let mut told = self.lock();
        let tokens = std::mem::take(&mut told.uncounted);
        if registry.on_leg_end(id.worker, name, tokens, &end, Instant::now()) {
            told.inputs.push_back(Input::Ended(*id, end));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Told> {
        self.0.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
