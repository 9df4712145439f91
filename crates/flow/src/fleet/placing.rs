//! Who gets a request, and what it is expected to see.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tasuki_core::{Forecast, Health, ModelId, RequestView, Warm, WorkerId, WorkerView};
use tasuki_policy::{Choosing, NoPlacement, Placement};

use super::{FleetState, WorkerState};
use crate::machine::{Fleet, Placed};
use crate::worker_ref::{WorkerKey, WorkerRef};

impl FleetState {
    /// What a request is expected to see if it is placed now.
    ///
    /// # Errors
    ///
    /// As [`Fleet::place`].
    pub fn forecast(&self, request: &RequestView) -> Result<Forecast, NoPlacement> {
        let placement = self.choose(request)?;
        let view = |id| self.workers.get(&id).map(|state| &state.view);
        let views = view(placement.prefill).zip(view(placement.decode));
        let (prefill, decode) = views.ok_or(NoPlacement::NoWorker)?;
        let price = |worker: &WorkerView| self.costs.price(worker.hardware, request);
        let cached = self.prefixes.expected(prefill.id, &request.chunks).likely;
        Ok(price(prefill).forecast(prefill, (&price(decode), decode), cached))
    }

    /// Whether a request gets one of these workers if it is placed now.
    pub(crate) fn places_on(&self, request: &RequestView, workers: &BTreeSet<WorkerId>) -> bool {
        let placement = self.choose(request);
        let both = placement.map(|placement| [placement.prefill, placement.decode]);
        both.is_ok_and(|both| both.iter().any(|worker| workers.contains(worker)))
    }

    /// The only workers that may serve a request: those that have its adapters and the identity that
    /// it is bound to. `None`: all of the model may.
    pub(crate) fn only(&self, request: &RequestView) -> Option<Arc<BTreeSet<WorkerId>>> {
        let only = self.with_adapters(request);
        let Some(identity) = request.bound_to else {
            return only;
        };
        let workers = self.workers.values();
        let (may, others): (BTreeSet<_>, BTreeSet<_>) = workers
            .filter(|state| state.model == Some(request.model))
            .map(|state| (state.view.id, state.view.domain.identity))
            .partition(|(_, of)| *of == identity);
        if others.is_empty() {
            return only;
        }
        let may = may.into_iter().map(|(worker, _)| worker);
        let may = may.filter(|worker| only.as_ref().is_none_or(|only| only.contains(worker)));
        Some(Arc::new(may.collect()))
    }

    /// The workers that have the adapters of a request. Those of another identity than it is bound to
    /// do not make an adapter known.
    fn with_adapters(&self, request: &RequestView) -> Option<Arc<BTreeSet<WorkerId>>> {
        self.models.with_adapters(request, |worker| {
            let state = self.workers.get(worker);
            let identity = state.map(|state| state.view.domain.identity);
            request.bound_to.is_none() || request.bound_to == identity
        })
    }

    /// Workers of a model that take new work.
    pub fn ready_workers(&self, model: ModelId) -> usize {
        let ready =
            |state: &&WorkerState| state.model == Some(model) && state.view.health == Health::Ready;
        self.workers.values().filter(ready).count()
    }

    /// When a worker of a model reported tokens of a leg that decodes, last.
    pub fn last_decoded(&self, model: ModelId) -> Option<Duration> {
        let workers = self.workers.values();
        let of_model = workers.filter(|state| state.model == Some(model));
        of_model.filter_map(|state| state.last_decoded).max()
    }

    pub(super) fn choose(&self, request: &RequestView) -> Result<Placement, NoPlacement> {
        let chosen = self.chosen.borrow();
        if let Some((of, placement)) = &*chosen
            && of == request
        {
            return Ok(*placement);
        }
        drop(chosen);
        let placement = self.policy.place(&self.warmed(request), self.choosing())?;
        self.chosen.replace(Some((request.clone(), placement)));
        Ok(placement)
    }

    /// The request with the workers that hold most of its prompt, and those that have its adapters.
    fn warmed<'a>(&self, request: &'a RequestView) -> Cow<'a, RequestView> {
        let mut known = Cow::Borrowed(request);
        if let Some(workers) = self.with_adapters(request) {
            known.to_mut().only = Some(workers);
        }
        let warm = self.warmest(&known);
        if !warm.is_empty() {
            known.to_mut().warm = warm;
        }
        known
    }

    /// Who holds most of the request's prompt, of the workers whose role is either half; none
    /// where an attempt before says it.
    fn warmest(&self, request: &RequestView) -> Vec<Warm> {
        if !request.warm.is_empty() {
            return Vec::new();
        }
        let halves = |id: WorkerId| {
            let view = self.workers.get(&id).map(|state| &state.view);
            let view = view.filter(|view| view.health == Health::Ready);
            let view = view.filter(|_| request.allows(id) && !request.avoid.contains(&id));
            view.map_or([false; 2], |view| {
                [view.role.prefills(), view.role.decodes()]
            })
        };
        self.prefixes.warmest(&request.chunks, halves, |id| {
            let view = self.workers.get(&id).map(|state| &state.view);
            view.map(|view| (view.prefill_backlog_tokens(), view.sequences()))
        })
    }

    fn next_tie(&mut self) {
        self.tie = self.tie.wrapping_add(1);
        self.chosen.take();
    }

    /// How the next request's workers are chosen.
    pub(super) fn choosing(&self) -> Choosing<'_> {
        Choosing {
            model: &self.costs,
            strict_roles: self.config.strict_roles,
            tie: self.tie,
        }
    }
}

impl Fleet for FleetState {
    fn place(&mut self, request: &RequestView) -> Result<Placed, NoPlacement> {
        // A forecast before it chose by the same order.
        let placement = self.choose(request);
        let placement = placement.or_else(|reason| self.choose_failing(request, reason))?;
        self.next_tie();
        let prefill = self.worker_ref(placement.prefill);
        let decode = self.worker_ref(placement.decode);
        let (prefill, decode) = prefill.zip(decode).ok_or(NoPlacement::NoWorker)?;
        let why = placement.why;
        Ok(Placed {
            prefill,
            decode,
            why,
        })
    }

    fn place_decode(
        &mut self,
        request: &RequestView,
        prefill: WorkerKey,
        tried: &[WorkerId],
    ) -> Option<WorkerRef> {
        self.next_tie();
        let (request, prefill) = (self.warmed(request), prefill.worker);
        let choosing = self.choosing();
        let worker = self
            .policy
            .place_decode(&request, prefill, tried, choosing)?;
        self.worker_ref(worker)
    }
}
