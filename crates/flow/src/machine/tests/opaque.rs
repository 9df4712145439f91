//! Requests that are not tokens: single decisions.

use std::time::Duration;

use tasuki_core::{Capabilities, FirstToken, HandoffKind, Identity, ModelId, Payload, Positions};
use tasuki_core::{Indivisible, RequestView, WorkerId};
use tasuki_policy::NoPlacement;

use crate::generation::{Event, Finish, Generation, ServeError};
use crate::leg::{LegEnd, LegEndReason as R, LegKind, Output};
use crate::machine::{Effect, Fleet, Input, Machine, MachineConfig, Placed};
use crate::opaque::{Opaque, OpaqueRequest};
use crate::sampling::SamplingParams;
use crate::worker_ref::{LegId, Peer, WorkerKey, WorkerRef};

/// Workers 0 and 1 with tickets, as far as the request lets itself be split.
#[derive(Default)]
struct Two {
    asked: Vec<RequestView>,
}

fn worker(id: u32) -> WorkerRef {
    WorkerRef {
        key: WorkerKey {
            worker: WorkerId(id),
            connection: 0,
        },
        capabilities: Capabilities {
            handoff: HandoffKind::Ticket,
            first_token: FirstToken::Decode,
            positions: Positions::Counted,
            resumes: false,
            retargets: false,
            splits_choices: false,
            payload: Payload::Opaque,
            ..Capabilities::default()
        },
        identity: Identity::default(),
        peer: Peer::default(),
    }
}

impl Fleet for Two {
    fn place(&mut self, request: &RequestView) -> Result<Placed, NoPlacement> {
        self.asked.push(request.clone());
        let whole = request.keep_whole || request.choices > 1;
        match request.resumed_tokens {
            0 => Ok(Placed {
                prefill: worker(0),
                decode: worker(u32::from(!whole)),
                why: None,
            }),
            _ => Err(NoPlacement::CannotResume),
        }
    }

    fn place_decode(&mut self, _: &RequestView, _: WorkerKey, _: &[WorkerId]) -> Option<WorkerRef> {
        Some(worker(1))
    }
}

struct Request {
    machine: Machine,
    fleet: Two,
    effects: Vec<Effect>,
}

impl Request {
    fn start(sequences: u32) -> Self {
        Self::of(sequences, None)
    }

    fn of(sequences: u32, indivisible: Option<Indivisible>) -> Self {
        let generation = Generation {
            model: ModelId(0),
            request_id: "r".to_owned(),
            prompt: (0..10).collect(),
            n: 1,
            sampling: SamplingParams {
                max_tokens: 1,
                ..Default::default()
            },
            cache_salt: String::new(),
            tenant: "".into(),
            priority: 0,
            opaque: Some(OpaqueRequest {
                content: Opaque::new("content"),
                sequences,
                adapters: vec!["adapter".into()],
                bound_to: Some(Identity([3; 16])),
                indivisible,
                resumes: false,
            }),
        };
        let config = MachineConfig {
            spread: Duration::ZERO,
            ..MachineConfig::default()
        };
        let mut request = Self {
            machine: Machine::new(generation, tasuki_core::Chunks::default(), config),
            fleet: Two::default(),
            effects: Vec::new(),
        };
        request
            .machine
            .start(false, &[], Duration::ZERO, &mut request.fleet);
        request.take();
        request
    }

    fn input(&mut self, input: Input) {
        self.machine.handle(input, Duration::ZERO, &mut self.fleet);
        self.take();
    }

    fn take(&mut self) {
        self.effects = std::iter::from_fn(|| self.machine.next_effect()).collect();
    }

    fn end(&mut self, at: (u32, u32), reason: R, answer: Option<Opaque>) {
        let end = LegEnd {
            reason,
            failure: reason.usual_failure(),
            message: String::new(),
            answer,
            ticket: None,
            timings: None,
        };
        self.input(Input::Ended(leg(at), end));
    }

    fn frame(&mut self, at: (u32, u32), text: &'static str, tokens: usize) {
        let output = Output {
            tokens: vec![0; tokens],
            frame: Some(Opaque::new(text)),
            ..Output::default()
        };
        self.input(Input::Output(leg(at), output));
    }

    fn legs(&self) -> Vec<(u32, LegKind, u32)> {
        let legs = self.effects.iter().filter_map(|effect| match effect {
            Effect::Dispatch { leg, spec } => {
                Some((leg.worker.worker.0, spec.kind, spec.sequences()))
            }
            _ => None,
        });
        legs.collect()
    }

    fn frames(&self) -> Vec<(&'static str, u32)> {
        let frames = self.effects.iter().filter_map(|effect| match effect {
            Effect::Emit(Event::Frame { frame, tokens }) => {
                Some((*frame.get::<&'static str>()?, *tokens))
            }
            _ => None,
        });
        frames.collect()
    }

    fn error(&self) -> Option<&ServeError> {
        self.effects.iter().find_map(|effect| match effect {
            Effect::Emit(Event::Failed(error)) => Some(error),
            _ => None,
        })
    }
}

fn leg((id, attempt): (u32, u32)) -> LegId {
    LegId {
        worker: worker(id).key,
        attempt,
    }
}

#[test]
fn a_missing_ticket_keeps_the_next_attempt_whole() {
    let mut request = Request::start(1);
    assert_eq!(request.legs(), [(0, LegKind::Prefill, 1)], "however short");
    assert_eq!(request.fleet.asked[0].bound_to, Some(Identity([3; 16])));
    assert_eq!(request.fleet.asked[0].adapters, ["adapter".into()]);
    request.end((0, 0), R::HandedOff, None);
    assert_eq!(request.legs(), [(0, LegKind::Colocated, 1)]);
}

/// One worker serves it better, whatever the handoff.
#[test]
fn what_is_indivisible_asks_for_one_worker() {
    let request = Request::of(1, Some(Indivisible::PromptLogprobs));
    let asked = &request.fleet.asked[0];
    assert!(asked.keep_whole && asked.indivisible.is_some());
    assert_eq!(request.legs(), [(0, LegKind::Colocated, 1)]);
}

#[test]
fn several_sequences_count_and_are_not_split() {
    let request = Request::start(4);
    assert_eq!(request.legs(), [(0, LegKind::Colocated, 4)]);
}

#[test]
fn frames_pass_in_order_beyond_the_estimated_length_and_without_tokens() {
    let mut request = Request::start(4);
    request.frame((0, 0), "a", 2);
    assert_eq!(request.frames(), [("a", 2)]);
    request.frame((0, 0), "b", 5);
    assert_eq!(request.frames(), [("b", 5)], "an estimate is no limit");
    request.frame((0, 0), "end", 0);
    assert_eq!(request.frames(), [("end", 0)]);
    let finish = Output {
        finish: Some(Finish::Stop),
        ..Output::default()
    };
    request.input(Input::Output(leg((0, 0)), finish));
    request.end((0, 0), R::Finished, None);
    assert!(request.machine.is_over() && request.error().is_none());
}

#[test]
fn a_refusal_is_the_workers_own_answer() {
    let mut request = Request::start(1);
    let answer = Opaque::new("400");
    request.end((0, 0), R::Rejected, Some(answer.clone()));
    assert!(matches!(request.error(), Some(ServeError::Answered(a)) if *a == answer));
}

#[test]
fn after_the_first_frame_a_loss_is_the_end() {
    let mut request = Request::start(4);
    request.frame((0, 0), "a", 1);
    request.input(Input::Lost(worker(0).key));
    assert!(matches!(request.error(), Some(ServeError::Failed { .. })));
    let mut request = Request::start(4);
    request.input(Input::Lost(worker(0).key));
    assert_eq!(
        request.legs(),
        [(0, LegKind::Colocated, 4)],
        "before it, it is placed again"
    );
}
