//! The task of one request: passes inputs to its machine and carries out the effects.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Instant;

use tasuki_core::{Chunks, WorkerId};
use tasuki_flow::admission::{Entrant, Refusal};
use tasuki_flow::{Effect, Event, Generation, Input, LegId, Machine, MachineConfig};
use tasuki_reqlog::RequestLog;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::watch;

use super::api::{Account, Arrival, ServeError};
use super::events::EventSender;
use super::forecasts::Checked;
use super::meter::Meter;
use super::others::Others;
use crate::access_log;
use crate::metrics::Metrics;
use crate::request_log::Recording;
use crate::traces::{LegTraces, PhaseName, Trace};
use crate::workers::{Dispatched, LocalLeg, Registry};

/// What every request's task shares.
pub struct Shared {
    pub registry: Arc<Registry>,
    pub metrics: Arc<Metrics>,
    pub machine: MachineConfig,
    /// Set once, before anything is served, if there is to be one.
    pub request_log: OnceLock<RequestLog>,
    /// Turns true when running requests are to end.
    pub cancel: watch::Sender<bool>,
}

/// The client's two ends of a generation.
pub struct ClientEnds {
    pub events: EventSender,
    pub stop: UnboundedReceiver<u32>,
    pub account: Arc<Account>,
}

/// What an input takes while it lies in an inbox, besides its tokens' 4 bytes each and what log
/// probabilities were asked for.
const _: () = assert!(size_of::<Input>() <= 256);

/// For what workers of our own report of a request. It has no limit, because a worker's stream is
/// that of many requests and cannot wait for one of them. What bounds it:
///
/// - Nothing comes before the request is admitted, and from then on its task waits for nothing
///   but its inputs: it never waits for the client ([`super::events`] has a limit). So an input
///   lies here only until the task gets its turn, one from each step of a worker meanwhile.
/// - Were there no turn at all: a worker's output has at least one token, so there are at most as
///   many inputs as the answer may have tokens (`n` times `max_tokens`), and a few for each leg.
fn inbox() -> (UnboundedSender<Input>, UnboundedReceiver<Input>) {
    mpsc::unbounded_channel()
}

/// Serves one request to its end.
pub async fn drive(
    generation: Generation,
    Arrival { received, trace }: Arrival,
    client: ClientEnds,
    shared: Arc<Shared>,
) {
    let changes = shared.registry.changes();
    let mut cancel = shared.cancel.subscribe();
    let (sender, inbox) = inbox();
    let prompt_tokens = generation.prompt.len();
    let registry = Arc::clone(&shared.registry);
    let model = generation.model;
    let resumes = generation.opaque.as_ref().is_some_and(|o| o.resumes);
    let schemes = registry.chunk_schemes(model);
    let name_chunks = match generation.opaque {
        Some(_) => Chunks::of_text,
        None => Chunks::new,
    };
    let chunks = name_chunks(&schemes, &generation.cache_salt, &generation.prompt);
    let (tenant, priority) = (Arc::clone(&generation.tenant), generation.priority);
    let trace = trace.filter(Trace::is_sampled);
    let legs = trace.as_ref().map(|t| t.legs(&generation.request_id));
    let log = shared.request_log.get();
    let recording = log.map(|log| Recording::new(log, &generation, &chunks, received));
    let mut task = RequestTask {
        request_id: generation.request_id.clone(),
        received,
        meter: Meter::new(
            Arc::clone(&shared.metrics),
            &generation.request_id,
            prompt_tokens,
            received,
            (generation.opaque.is_some()).then(|| Arc::clone(&client.account)),
        ),
        machine: Machine::new(generation, chunks, shared.machine),
        checked: None,
        legs,
        recording,
        events: client.events.clone(),
        account: Arc::clone(&client.account),
        inbox: sender,
        local: Vec::new(),
        aborted: VecDeque::new(),
        shared,
    };
    // An answer that goes on was let in before.
    let mut turn = None;
    let (mut waited, mut avoid) = (false, Vec::new());
    if !resumes {
        let queue = trace.map(|trace| trace.begin(PhaseName::Queue, Instant::now()));
        let entrant = Entrant {
            view: task.machine.request(),
            tenant,
            priority,
            arrived: registry.since_start(received),
        };
        let admitted = tokio::select! {
            biased;
            () = client.events.closed() => return,
            Ok(_) = cancel.wait_for(|&cancel| cancel) => return task.on_input(Input::Cancel),
            admitted = registry.admit(entrant) => admitted,
        };
        let (admitted, forecast, awaited) = match admitted {
            Ok(admitted) => admitted,
            Err(refusal) => return task.refuse(&refusal),
        };
        if let Some(queue) = queue {
            queue.end();
        }
        let now = Instant::now();
        task.shared
            .metrics
            .admission_wait
            .observe((now - received).as_secs_f64());
        task.checked = Some(Checked::new(&registry, model, forecast, now));
        (waited, avoid) = (forecast.waited, awaited);
        turn = Some(admitted);
    }
    if let Some(recording) = &mut task.recording {
        recording.admitted(Instant::now());
    }
    task.start(waited, &avoid);
    drop(turn);
    let mut others = Others::new(client, cancel, changes, inbox);
    poll_fn(|context| task.poll(&mut others, context)).await;
}

struct RequestTask {
    request_id: String,
    received: Instant,
    machine: Machine,
    meter: Meter,
    /// Until an attempt fails: then the forecast was of something else.
    checked: Option<Checked>,
    /// `None`: it is not traced.
    legs: Option<LegTraces>,
    /// `None`: there is no request log.
    recording: Option<Recording>,
    events: EventSender,
    account: Arc<Account>,
    /// For what the workers report of this request's legs.
    inbox: UnboundedSender<Input>,
    /// The legs that run here.
    local: Vec<LocalLeg>,
    /// What is still to be learnt of those that were aborted.
    aborted: VecDeque<Input>,
    shared: Arc<Shared>,
}

impl RequestTask {
    /// Goes on until there is nothing more to do now. Ready at the request's end.
    fn poll(&mut self, others: &mut Others, context: &mut Context<'_>) -> Poll<()> {
        loop {
            while let Some(input) = self.next_local(context) {
                self.on_input(input);
            }
            if self.machine.is_over() {
                return Poll::Ready(());
            }
            let deadline = self.machine.deadline();
            others.set_deadline(deadline.map(|after| self.received + after));
            match others.poll(context) {
                Poll::Ready(input) => self.on_input(input),
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// What has happened of the legs that run here.
    fn next_local(&mut self, context: &Context<'_>) -> Option<Input> {
        if let Some(input) = self.aborted.pop_front() {
            return Some(input);
        }
        let legs = self.local.iter_mut();
        let input = { legs }.find_map(|leg| {
            leg.next().or_else(|| {
                leg.poll(context);
                leg.next()
            })
        });
        if input.is_none() {
            self.local.retain(|leg| !leg.has_ended());
        }
        input
    }

    fn start(&mut self, waited: bool, avoid: &[WorkerId]) {
        if let Some(legs) = &mut self.legs {
            legs.place();
        }
        let now = Instant::now();
        let since = now.saturating_duration_since(self.received);
        self.machine
            .start(waited, avoid, since, &mut &*self.shared.registry);
        self.perform_effects(now);
    }

    fn on_input(&mut self, input: Input) {
        if let Input::Lost(worker) = input {
            self.local.retain(|leg| leg.id().worker != worker);
        }
        if let Some(legs) = &mut self.legs {
            legs.observe(&input);
        }
        let now = Instant::now();
        let since = now.saturating_duration_since(self.received);
        self.machine
            .handle(input, since, &mut &*self.shared.registry);
        self.perform_effects(now);
    }

    fn perform_effects(&mut self, now: Instant) {
        while let Some(effect) = self.machine.next_effect() {
            self.perform(effect, now);
        }
    }

    fn perform(&mut self, effect: Effect, now: Instant) {
        let registry = &self.shared.registry;
        match effect {
            Effect::Dispatch { leg, mut spec } => {
                let timings = self.machine.timings();
                if access_log::is_on() || self.legs.is_some() {
                    self.account.write(timings);
                }
                if let Some(legs) = &mut self.legs {
                    legs.dispatch(leg, &mut spec, timings);
                }
                if let Some(recording) = &mut self.recording {
                    recording.dispatch(leg, spec.kind);
                }
                let name = self.name_of(leg.attempt);
                tracing::debug!(
                    request_id = name,
                    worker = %leg.worker.worker,
                    leg = spec.kind.as_str(),
                    prompt_tokens = spec.prompt.len(),
                    "dispatch",
                );
                match registry.dispatch(leg, name, *spec, &self.inbox) {
                    Dispatched::Gone => {
                        let _ = self.inbox.send(Input::Lost(leg.worker));
                    }
                    Dispatched::Sent => {}
                    Dispatched::Local(leg) => self.local.push(leg),
                }
            }
            Effect::Abort { leg, choices } => {
                match self.local.iter().position(|local| local.id() == leg) {
                    // It has one choice.
                    Some(at) => {
                        let ended = self.local.swap_remove(at).abort();
                        self.aborted.extend(ended);
                    }
                    None => registry.abort(leg.worker, &self.name_of(leg.attempt), choices),
                }
            }
            Effect::Retarget {
                leg: LegId { worker, attempt },
                peer,
            } => registry.retarget(worker, &self.name_of(attempt), peer),
            Effect::Emit(event) => self.emit(event, now),
            Effect::Retry {
                attempt,
                reason,
                detail,
            } => {
                let (request_id, kind) = (self.name_of(attempt), reason.kind());
                if let Some(legs) = &mut self.legs {
                    legs.retry(attempt, reason, &detail);
                }
                if let Some(recording) = &mut self.recording {
                    recording.retry();
                }
                let reason = reason.as_str();
                tracing::warn!(
                    request_id,
                    reason,
                    %kind,
                    detail,
                    "attempt abandoned or retargeted"
                );
                self.shared.metrics.retried(reason, kind);
                self.checked = None;
            }
        }
    }

    fn refuse(&mut self, refusal: &Refusal) {
        self.shared.metrics.refused(refusal.reason.as_str());
        let reason = format!(
            "{}, and {} requests wait before it",
            refusal.reason, refusal.ahead
        );
        let refused = Event::Failed(ServeError::Overloaded {
            reason,
            retry_after_s: refusal.retry_after.as_secs_f64().ceil() as u32,
            over_share: refusal.over_share,
        });
        self.emit(refused, Instant::now());
    }

    /// The name of an attempt's legs on their workers, and in logs.
    fn name_of(&self, attempt: u32) -> String {
        format!("{}.{attempt}", self.request_id)
    }

    fn emit(&mut self, event: Event, now: Instant) {
        let had_begun = self.meter.has_begun();
        self.meter.observe(&event, now);
        // What is known if the client leaves.
        if self.meter.has_begun() && !had_begun && (access_log::is_on() || self.legs.is_some()) {
            self.account.write(self.machine.timings());
        }
        if let Some(checked) = &mut self.checked {
            checked.observe(&event, now);
        }
        if let Some(recording) = &mut self.recording {
            recording.observe(&event, now);
        }
        if let Event::Failed(error) = &event {
            tracing::warn!(request_id = self.request_id, %error, "request failed");
        }
        // A client that left is noticed by the loop.
        if !self.events.send(event) {
            self.meter.too_slow();
            if let Some(recording) = &mut self.recording {
                recording.too_slow();
            }
        }
    }
}
