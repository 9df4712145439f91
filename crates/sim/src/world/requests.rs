//! Requests in the router: what its tasks do, in simulated time.

use std::sync::Arc;
use std::time::Duration;

use tasuki_core::{Chunks, Forecast, ModelId, RequestView, WorkerId};
use tasuki_flow::admission::{Entrant, EntrantId, Refusal, Verdict};
use tasuki_flow::{
    Effect, Event as Told, Fleet, FleetState, Generation, Input, Machine, Placed, RetryBudget,
    SamplingParams, WorkerKey, WorkerRef,
};
use tasuki_policy::NoPlacement;

use super::legs::Leg;
use super::record::ShellEvent;
use super::{Event, LOOK_AGAIN_S, World};
use crate::client::{Outcome, Request};
use crate::time::Time;

/// Prompts of no more tokens are kept, one of each length.
const KEPT_TOKENS: u32 = 8_192;

/// A request that is in the router.
pub(super) struct Live {
    /// Unlike its place, never used again.
    pub number: u32,
    pub request: Request,
    pub machine: Machine,
    pub outcome: Outcome,
    pub legs: Vec<Leg>,
    pub received: Time,
    entrant: EntrantId,
    /// Until an attempt fails, and since when.
    forecast: Option<(Forecast, Time)>,
    tick: Time,
    over: bool,
}

/// The fleet as a request's machine sees it.
struct Shell<'a> {
    fleet: &'a mut FleetState,
    budget: &'a mut RetryBudget,
    now: Duration,
}

impl Fleet for Shell<'_> {
    fn place(&mut self, request: &RequestView) -> Result<Placed, NoPlacement> {
        self.fleet.place(request)
    }

    fn place_decode(
        &mut self,
        request: &RequestView,
        prefill: WorkerKey,
        tried: &[WorkerId],
    ) -> Option<WorkerRef> {
        self.fleet.place_decode(request, prefill, tried)
    }

    fn on_request(&mut self) {
        self.budget.on_request(self.now);
    }

    fn may_retry(&mut self) -> bool {
        self.budget.take(self.now)
    }
}

impl World<'_> {
    /// A client sends a request, unless it has as many in flight as it may.
    pub(super) fn send(&mut self, request: Request) {
        self.held.push_back(request);
        self.send_held();
    }

    /// A request may be over while it is sent: the loop that sends goes on with the next one.
    fn send_held(&mut self) {
        if std::mem::replace(&mut self.sending, true) {
            return;
        }
        let limit = self.config.max_in_flight.unwrap_or(usize::MAX);
        while self.in_flight < limit
            && let Some(request) = self.held.pop_front()
        {
            self.in_flight += 1;
            self.receive(request);
        }
        self.sending = false;
    }

    /// The router gets a request.
    fn receive(&mut self, request: Request) {
        self.requests += 1;
        if self.config.record {
            self.run.record.push(ShellEvent::Arrived {
                at: self.now,
                index: request.index,
                prompt_tokens: request.prompt_tokens,
                output_tokens: request.output_tokens,
                chunks: Arc::clone(&request.chunks),
                tenant: Arc::clone(&request.tenant),
                priority: request.priority,
            });
        }
        let generation = Generation {
            model: ModelId::default(),
            request_id: request.index.to_string(),
            prompt: self.prompt(&request),
            n: 1,
            sampling: SamplingParams {
                max_tokens: request.output_tokens,
                ..SamplingParams::default()
            },
            cache_salt: String::new(),
            tenant: Arc::clone(&request.tenant),
            priority: request.priority,
            opaque: None,
        };
        let chunks = self.chunks(&request);
        let machine = Machine::new(generation, chunks, self.config.machine);
        let entrant = Entrant {
            view: machine.request(),
            tenant: Arc::clone(&request.tenant),
            priority: request.priority,
            arrived: self.now.since_start(),
        };
        self.fleet.on_arrival(&entrant.view, entrant.arrived);
        let entrant = self.admission.enter(entrant, &self.fleet);
        let live = Box::new(Live {
            number: self.requests,
            outcome: Outcome::new(&request, self.now),
            request,
            machine,
            legs: Vec::new(),
            received: self.now,
            entrant,
            forecast: None,
            tick: Time::NEVER,
            over: false,
        });
        let place = match self.free_live.pop() {
            Some(place) => {
                self.live[place as usize] = Some(live);
                place
            }
            None => {
                self.live.push(Some(live));
                (self.live.len() - 1) as u32
            }
        };
        self.entrants.insert(entrant, place);
        self.settle();
    }

    fn prompt(&mut self, request: &Request) -> Arc<[u32]> {
        let tokens = request.prompt_tokens;
        if request.chunks.is_empty() && tokens <= KEPT_TOKENS {
            let kept = self.prompts.entry(tokens);
            return Arc::clone(kept.or_insert_with(|| vec![0; tokens as usize].into()));
        }
        // Policies that look at the first tokens see which prompts begin alike.
        let first = request
            .chunks
            .first()
            .copied()
            .unwrap_or(request.index as u64) as u32;
        vec![first; tokens as usize].into()
    }

    fn chunks(&self, request: &Request) -> Chunks {
        if !self.config.prefix_index || request.chunks.is_empty() {
            return Chunks::default();
        }
        let schemes = self.fleet.chunk_schemes(ModelId::default());
        Chunks::named(&schemes, &request.chunks)
    }

    /// Lets in and turns away what can be now.
    pub(super) fn settle(&mut self) {
        loop {
            let now = self.now.since_start();
            let verdicts = self.admission.settle(now, &self.fleet);
            if verdicts.is_empty() {
                break;
            }
            for (id, verdict) in verdicts {
                let Some(place) = self.entrants.remove(&id) else {
                    continue;
                };
                match verdict {
                    Verdict::Admitted(forecast, avoid) => self.start(place, forecast, &avoid),
                    Verdict::Refused(refusal) => self.refuse(place, &refusal),
                }
                self.admission.withdraw(id);
                self.admission.passed(id);
            }
        }
        if !self.settling && self.admission.waiting().0 > 0 {
            self.settling = true;
            self.at(self.now.plus_s(LOOK_AGAIN_S), Event::Settle);
        }
    }

    fn start(&mut self, place: u32, forecast: Forecast, avoid: &[WorkerId]) {
        let now = self.now;
        self.with_machine(place, |live, fleet| {
            live.outcome.admitted = Some(now);
            live.forecast = Some((forecast, now));
            let since = now.since(live.received);
            live.machine.start(forecast.waited, avoid, since, fleet);
        });
    }

    fn refuse(&mut self, place: u32, refusal: &Refusal) {
        if let Some(live) = &mut self.live[place as usize] {
            live.outcome.failure = Some(format!("refused: {}", refusal.reason));
            live.outcome.end = self.now;
            live.over = true;
            if self.config.record {
                let index = live.request.index;
                self.run.record.push(ShellEvent::Refused {
                    at: self.now,
                    index,
                });
            }
            self.retire(place);
        }
    }

    /// Gives a machine an input, and does what follows.
    pub(super) fn input(&mut self, place: u32, input: Input) {
        let now = self.now;
        self.with_machine(place, |live, fleet| {
            live.machine.handle(input, now.since(live.received), fleet);
        });
    }

    pub(super) fn tick(&mut self, place: u32, number: u32) {
        let live = self.live[place as usize].as_mut();
        let Some(live) = live.filter(|live| live.number == number && live.tick <= self.now) else {
            return;
        };
        live.tick = Time::NEVER;
        self.input(place, Input::Tick);
    }

    fn with_machine(&mut self, place: u32, act: impl FnOnce(&mut Live, &mut Shell<'_>)) {
        let Some(live) = self.live[place as usize].as_mut().filter(|live| !live.over) else {
            return;
        };
        let mut shell = Shell {
            fleet: &mut self.fleet,
            budget: &mut self.budget,
            now: self.now.since_start(),
        };
        act(live, &mut shell);
        self.perform(place);
    }

    /// Carries out a machine's effects.
    fn perform(&mut self, place: u32) {
        loop {
            let Some(live) = &mut self.live[place as usize] else {
                return;
            };
            let Some(effect) = live.machine.next_effect() else {
                break;
            };
            match effect {
                Effect::Dispatch { leg, spec } => self.dispatch(place, leg, &spec),
                Effect::Abort { leg, .. } => self.abort(place, leg),
                // The decode leg that was dispatched before names the prefill leg.
                Effect::Retarget { .. } => {}
                Effect::Emit(event) => self.emit(place, &event),
                Effect::Retry { .. } => {
                    live.forecast = None;
                    live.outcome.retries += 1;
                }
            }
        }
        let Some(live) = &mut self.live[place as usize] else {
            return;
        };
        if live.machine.is_over() {
            live.over = true;
            self.retire(place);
            return;
        }
        if let Some(deadline) = live.machine.deadline() {
            let at = live.received.plus(deadline);
            if at < live.tick {
                live.tick = at;
                let request = live.number;
                self.at(
                    at,
                    Event::Tick {
                        live: place,
                        request,
                    },
                );
            }
        }
    }

    fn emit(&mut self, place: u32, event: &Told) {
        let Some(live) = &mut self.live[place as usize] else {
            return;
        };
        let at = self.now.plus_s(self.config.message_s);
        let outcome = &mut live.outcome;
        match event {
            Told::Tokens { tokens, finish, .. } => {
                outcome.output_tokens += tokens.len() as u32;
                outcome.end = at;
                let is_first = outcome.first.is_none();
                let first = *outcome.first.get_or_insert(at);
                let Some((forecast, admitted)) = live.forecast else {
                    return;
                };
                let after = outcome.output_tokens.saturating_sub(1).max(1);
                let ttft = is_first.then(|| self.now.since(admitted));
                let tpot = (!is_first && finish.is_some()).then(|| at.since(first) / after);
                let model = ModelId::default();
                let now = self.now.since_start();
                self.admission.learn(model, &forecast, ttft, tpot, now);
            }
            Told::Failed(error) => {
                outcome.failure = Some(format!("{}: {error}", error.kind()));
                outcome.end = self.now;
            }
            Told::Done(timings) => outcome.cached_tokens = timings.cached_prompt_tokens,
            Told::PromptLogprobs(_) | Told::Frame { .. } => {}
        }
    }

    /// A request is over: its client is told, and may send another one.
    fn retire(&mut self, place: u32) {
        let Some(mut live) = self.live[place as usize].take() else {
            return;
        };
        self.free_live.push(place);
        self.in_flight -= 1;
        self.entrants.remove(&live.entrant);
        for leg in std::mem::take(&mut live.legs) {
            if let Some(handoff) = leg.handoff {
                self.end_handoff(handoff);
            }
            self.drop_sequence(leg.worker, leg.seq);
            self.fleet.on_ended(leg.id.worker, leg.slot, None);
            self.fleet.recount(leg.id.worker);
        }
        let at = live.outcome.end;
        let index = live.request.index;
        self.run.outcomes.push(live.outcome);
        if let Some(request) = self.clients.over(index, at) {
            let due = request.due.max(self.now);
            let place = self.followed;
            self.followed += 1;
            self.following.insert(place, request);
            self.at(due, Event::Follow { place });
        }
        self.send_held();
    }
}
