//! The task of one request: feeds its machine and does what that says.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use tasuki_core::{RequestView, WorkerId};
use tasuki_policy::NoPlacement;
use tasuki_wire::v1::router_message::Message;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::watch;
use tokio::time::sleep_until;

use super::api::{Event, Generation};
use super::machine::Machine;
use super::machine::config::MachineConfig;
use super::machine::io::{Effect, Fleet, Input};
use super::meter::Meter;
use crate::metrics::Metrics;
use crate::workers::{Mail, Registry, Seat, WorkerKey};

/// What every request's task shares.
pub struct Shared {
    pub registry: Arc<Registry>,
    pub metrics: Arc<Metrics>,
    pub machine: MachineConfig,
    /// Turns true when running requests are to end.
    pub cancel: watch::Sender<bool>,
}

/// The client's two ends of a generation.
pub struct ClientEnds {
    pub events: UnboundedSender<Event>,
    pub stop: UnboundedReceiver<u32>,
}

/// Serves one request to its end.
pub async fn drive(request: Generation, mut client: ClientEnds, shared: Arc<Shared>) {
    let received = request.received;
    let mut changes = shared.registry.changes();
    let mut cancel = shared.cancel.subscribe();
    let (mail_sender, mut mail) = mpsc::unbounded_channel();
    let prompt_tokens = request.prompt.len();
    let mut desk = Desk {
        request_id: request.request_id.clone(),
        meter: Meter::new(Arc::clone(&shared.metrics), prompt_tokens, received),
        machine: Machine::new(request, shared.machine),
        events: client.events.clone(),
        mail: mail_sender,
        shared,
    };
    let mut fleet = desk.fleet();
    let effects = desk.machine.start(Instant::now(), &mut fleet);
    desk.perform(effects);
    let mut stops_open = true;
    while !desk.machine.is_over() {
        let deadline = desk.machine.deadline();
        let input = tokio::select! {
            biased;
            () = client.events.closed() => Input::HangUp,
            choice = client.stop.recv(), if stops_open => match choice {
                Some(choice) => Input::Stop(choice),
                None => {
                    stops_open = false;
                    continue;
                }
            },
            Some(mail) = mail.recv() => match mail {
                Mail::Output(from, output) => Input::Output(from, output),
                Mail::Ended(from, ended) => Input::Ended(from, ended),
                Mail::Lost(key) => Input::Lost(key),
            },
            Ok(()) = changes.changed() => Input::WorkersChanged,
            Ok(_) = cancel.wait_for(|&cancel| cancel) => Input::Cancel,
            () = sleep_until(deadline.unwrap_or(received).into()), if deadline.is_some() => {
                Input::Tick
            }
        };
        desk.hear(input);
    }
}

struct Desk {
    request_id: String,
    machine: Machine,
    meter: Meter,
    events: UnboundedSender<Event>,
    mail: UnboundedSender<Mail>,
    shared: Arc<Shared>,
}

impl Desk {
    fn hear(&mut self, input: Input) {
        let mut fleet = self.fleet();
        let effects = self.machine.handle(input, Instant::now(), &mut fleet);
        self.perform(effects);
    }

    fn fleet(&self) -> Placing {
        Placing(Arc::clone(&self.shared.registry))
    }

    /// Does what the machine says; a worker that is gone meanwhile is told back to it.
    fn perform(&mut self, effects: Vec<Effect>) {
        let mut effects = VecDeque::from(effects);
        while let Some(effect) = effects.pop_front() {
            match effect {
                Effect::Submit { to, submit } => {
                    tracing::debug!(
                        request_id = submit.request_id,
                        worker = %to.worker,
                        leg = submit.leg().as_str_name(),
                        prompt_tokens = submit.prompt_tokens.len(),
                        "submit",
                    );
                    if !self.shared.registry.submit(to, submit, &self.mail) {
                        let _ = self.mail.send(Mail::Lost(to));
                    }
                }
                Effect::Abort { to, abort } => {
                    self.shared.registry.send(to, Message::Abort(abort));
                }
                Effect::Retarget { to, retarget } => {
                    self.shared.registry.send(to, Message::Retarget(retarget));
                }
                Effect::Emit(event) => self.emit(event),
                Effect::Setback {
                    attempt,
                    setback,
                    detail,
                } => {
                    let (reason, kind) = (setback.as_str(), setback.kind());
                    tracing::warn!(
                        request_id = attempt,
                        reason,
                        %kind,
                        detail,
                        "attempt set back"
                    );
                    self.shared.metrics.set_back(reason, kind);
                }
            }
        }
    }

    fn emit(&mut self, event: Event) {
        self.meter.observe(&event, Instant::now());
        if let Event::Failed(error) = &event {
            tracing::warn!(request_id = self.request_id, %error, "request failed");
        }
        // A client that left is noticed by the loop.
        let _ = self.events.send(event);
    }
}

/// The registry, as the machine asks it.
struct Placing(Arc<Registry>);

impl Fleet for Placing {
    fn place(&mut self, request: &RequestView) -> Result<(Seat, Seat), NoPlacement> {
        self.0.place(request)
    }

    fn place_decode(
        &mut self,
        request: &RequestView,
        prefill: WorkerKey,
        tried: &[WorkerId],
    ) -> Option<Seat> {
        self.0.place_decode(request, prefill, tried)
    }
}
