//! Single decisions: who is told what, at which fault.
//!
//! Longer than a room: one short test for each decision.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tasuki_core::{FailureKind, RequestView, Role, WorkerId};
use tasuki_policy::NoPlacement;
use tasuki_wire::v1::{self, FailureKind as Kind, Leg, LegEndReason as R};

use crate::serve::api::{Event, Generation, ServeError, Timings};
use crate::serve::machine::Machine;
use crate::serve::machine::config::{MachineConfig, OnKvLoss};
use crate::serve::machine::io::{Effect, Fleet, Input, Setback};
use crate::workers::{Seat, WorkerKey};

type Pair = Result<(u32, u32), NoPlacement>;

/// Answers as written down beforehand.
#[derive(Default)]
struct Script {
    pairs: VecDeque<Pair>,
    decodes: VecDeque<u32>,
    asked: Vec<RequestView>,
}

fn key(worker: u32) -> WorkerKey {
    WorkerKey {
        worker: WorkerId(worker),
        connection: u64::from(worker),
    }
}

fn seat(worker: u32) -> Seat {
    Seat {
        key: key(worker),
        peer: v1::Peer {
            engine_id: format!("engine-{worker}"),
            kv_endpoint: String::new(),
        },
    }
}

impl Fleet for Script {
    fn place(&mut self, request: &RequestView) -> Result<(Seat, Seat), NoPlacement> {
        self.asked.push(request.clone());
        let (prefill, decode) = self
            .pairs
            .pop_front()
            .unwrap_or(Err(NoPlacement::NoWorker))?;
        Ok((seat(prefill), seat(decode)))
    }

    fn place_decode(&mut self, _: &RequestView, _: WorkerKey, _: &[WorkerId]) -> Option<Seat> {
        self.decodes.pop_front().map(seat)
    }
}

struct Desk {
    machine: Machine,
    script: Script,
    now: Instant,
    effects: Vec<Effect>,
}

fn request(n: u32, received: Instant) -> Generation {
    Generation {
        request_id: "r".to_owned(),
        prompt: (0..10).collect(),
        n,
        sampling: v1::SamplingParams {
            max_tokens: 8,
            prompt_logprobs: Some(0),
            ..Default::default()
        },
        tenant: "t".to_owned(),
        received,
    }
}

impl Desk {
    fn new(n: u32, config: MachineConfig, pairs: &[Pair], decodes: &[u32]) -> Self {
        let now = Instant::now();
        let mut desk = Self {
            machine: Machine::new(request(n, now), config),
            script: Script {
                pairs: pairs.iter().cloned().collect(),
                decodes: decodes.iter().copied().collect(),
                asked: Vec::new(),
            },
            now,
            effects: Vec::new(),
        };
        desk.effects = desk.machine.start(now, &mut desk.script);
        desk
    }

    fn plain(pairs: &[Pair], decodes: &[u32]) -> Self {
        Self::new(1, MachineConfig::default(), pairs, decodes)
    }

    /// What one input brings about.
    fn hear(&mut self, input: Input) -> &mut Self {
        self.effects = self.machine.handle(input, self.now, &mut self.script);
        self
    }

    fn tokens(&mut self, from: u32, attempt: &str, position: u32, count: u32) -> &mut Self {
        let output = v1::Output {
            request_id: attempt.to_owned(),
            position,
            tokens: (position..position + count).collect(),
            ..Default::default()
        };
        self.hear(Input::Output(key(from), output))
    }

    fn ended(&mut self, from: u32, attempt: &str, reason: R) -> &mut Self {
        self.failed(from, attempt, reason, Kind::FailureUnspecified)
    }

    fn failed(&mut self, from: u32, attempt: &str, reason: R, kind: Kind) -> &mut Self {
        let ended = v1::LegEnd {
            request_id: attempt.to_owned(),
            reason: reason.into(),
            message: "said the worker".to_owned(),
            failure: kind.into(),
            ..Default::default()
        };
        self.hear(Input::Ended(key(from), ended))
    }

    fn wait(&mut self, time: Duration) -> &mut Self {
        self.now += time;
        self.hear(Input::Tick)
    }

    /// Submits of the last input: worker, attempt, leg, resumed tokens.
    fn submits(&self) -> Vec<(u32, &str, Leg, usize)> {
        let effects = self.effects.iter().filter_map(|effect| match effect {
            Effect::Submit { to, submit } => {
                let resumed = submit.resumed_tokens.len();
                Some((to.worker.0, &*submit.request_id, submit.leg(), resumed))
            }
            _ => None,
        });
        effects.collect()
    }

    fn aborts(&self) -> Vec<(u32, &str)> {
        let effects = self.effects.iter().filter_map(|effect| match effect {
            Effect::Abort { to, abort } => Some((to.worker.0, &*abort.request_id)),
            _ => None,
        });
        effects.collect()
    }

    fn retargets(&self) -> Vec<(u32, &str)> {
        let effects = self.effects.iter().filter_map(|effect| match effect {
            Effect::Retarget { to, retarget } => {
                Some((to.worker.0, &*retarget.peer.as_ref()?.engine_id))
            }
            _ => None,
        });
        effects.collect()
    }

    fn setbacks(&self) -> Vec<Setback> {
        let setback = |effect: &Effect| match effect {
            Effect::Setback { setback, .. } => Some(*setback),
            _ => None,
        };
        self.effects.iter().filter_map(setback).collect()
    }

    fn error(&self) -> Option<&ServeError> {
        self.effects.iter().find_map(|effect| match effect {
            Effect::Emit(Event::Failed(error)) => Some(error),
            _ => None,
        })
    }

    fn done(&self) -> Option<&Timings> {
        self.effects.iter().find_map(|effect| match effect {
            Effect::Emit(Event::Done(timings)) => Some(timings),
            _ => None,
        })
    }
}

#[test]
fn both_legs_are_submitted_at_once() {
    let desk = Desk::plain(&[Ok((0, 1))], &[]);
    assert_eq!(
        desk.submits(),
        [(0, "r.0", Leg::Prefill, 0), (1, "r.0", Leg::Decode, 0)]
    );
    let peers: Vec<_> = desk
        .effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Submit { submit, .. } => submit.peer.as_ref().map(|p| p.engine_id.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(peers, ["engine-1", "engine-0"]);
}

#[test]
fn one_worker_gets_one_leg() {
    let desk = Desk::plain(&[Ok((1, 1))], &[]);
    assert_eq!(desk.submits(), [(1, "r.0", Leg::Colocated, 0)]);
}

#[test]
fn a_new_request_does_not_wait_for_workers() {
    let desk = Desk::plain(&[Err(NoPlacement::NoWorker)], &[]);
    assert!(matches!(
        desk.error(),
        Some(ServeError::Unavailable {
            retry_after_s: 1..,
            ..
        })
    ));
    assert!(desk.machine.is_over());
}

#[test]
fn what_is_too_large_is_the_clients_error() {
    let too_large = NoPlacement::TooLarge {
        tokens: 18,
        limit_tokens: 16,
    };
    let desk = Desk::plain(&[Err(too_large)], &[]);
    let Some(ServeError::Rejected(message)) = desk.error() else {
        panic!("{:?}", desk.error())
    };
    assert!(message.contains("18") && message.contains("16"));
}

#[test]
fn a_refusal_bends_the_attempt_to_another_decode_worker() {
    for prefilled in [false, true] {
        let mut desk = Desk::plain(&[Ok((0, 1))], &[2]);
        if prefilled {
            desk.tokens(0, "r.0", 0, 1);
        }
        desk.ended(1, "r.0", R::LegEndRefused);
        assert_eq!(desk.submits(), [(2, "r.0", Leg::Decode, 0)]);
        assert_eq!(desk.retargets(), [(0, "engine-2")]);
        assert!(desk.aborts().is_empty());
    }
}

#[test]
fn a_refusal_with_nobody_else_is_tried_again_after_a_pause() {
    let mut desk = Desk::plain(&[Ok((0, 1)), Ok((0, 1)), Ok((0, 1))], &[]);
    desk.ended(1, "r.0", R::LegEndRefused);
    assert_eq!(desk.aborts(), [(0, "r.0")]);
    assert!(desk.submits().is_empty());
    desk.wait(Duration::from_millis(49));
    assert!(desk.submits().is_empty());
    desk.wait(Duration::from_millis(1));
    assert_eq!(desk.submits().len(), 2);
    desk.ended(1, "r.1", R::LegEndRefused);
    desk.wait(Duration::from_millis(99));
    assert!(desk.submits().is_empty());
    desk.wait(Duration::from_millis(1));
    assert_eq!(desk.submits()[0].1, "r.2");
}

#[test]
fn a_decode_worker_lost_early_costs_no_prefill() {
    for prefilled in [false, true] {
        let mut desk = Desk::plain(&[Ok((0, 1))], &[2]);
        if prefilled {
            desk.tokens(0, "r.0", 0, 1);
        }
        desk.hear(Input::Lost(key(1)));
        assert_eq!(desk.retargets(), [(0, "engine-2")]);
        assert_eq!(desk.submits(), [(2, "r.0", Leg::Decode, 0)]);
    }
}

#[test]
fn a_decode_worker_lost_later_is_not_replaced_by_one_that_says_it_all_again() {
    let mut desk = Desk::plain(&[Ok((0, 1)), Ok((0, 2))], &[2]);
    desk.tokens(0, "r.0", 0, 1).tokens(1, "r.0", 0, 3);
    desk.hear(Input::Lost(key(1)));
    assert!(desk.retargets().is_empty());
    assert_eq!(
        desk.submits(),
        [(0, "r.1", Leg::Prefill, 3), (2, "r.1", Leg::Decode, 3)]
    );
    let asked = desk.script.asked.last().expect("a placement");
    assert_eq!((asked.prompt_tokens, asked.max_tokens), (13, 5));
    assert_eq!(asked.warm.map(|warm| warm.worker), Some(WorkerId(0)));
}

#[test]
fn a_prefill_worker_lost_before_its_first_token_is_replaced_at_once() {
    let mut desk = Desk::plain(&[Ok((0, 1)), Ok((2, 1))], &[]);
    desk.hear(Input::Lost(key(0)));
    assert_eq!(desk.aborts(), [(1, "r.0")]);
    assert_eq!(
        desk.submits(),
        [(2, "r.1", Leg::Prefill, 0), (1, "r.1", Leg::Decode, 0)]
    );
}

#[test]
fn a_prefill_worker_lost_later_is_decodes_affair() {
    let mut desk = Desk::plain(&[Ok((0, 1)), Ok((1, 1))], &[]);
    desk.tokens(0, "r.0", 0, 1).hear(Input::Lost(key(0)));
    assert!(desk.effects.is_empty());
    desk.ended(1, "r.0", R::LegEndKvLost);
    assert_eq!(desk.submits(), [(1, "r.1", Leg::Colocated, 1)]);
}

#[test]
fn lost_kv_can_fail_the_request_but_not_before_there_was_any() {
    let config = MachineConfig {
        on_kv_loss: OnKvLoss::Fail,
        ..MachineConfig::default()
    };
    let pairs = [Ok((0, 1)), Ok((2, 1))];
    let mut early = Desk::new(1, config, &pairs, &[]);
    early.ended(1, "r.0", R::LegEndKvLost);
    assert!(early.error().is_none() && early.submits().len() == 2);
    let mut late = Desk::new(1, config, &pairs, &[]);
    late.tokens(0, "r.0", 0, 1);
    late.failed(1, "r.0", R::LegEndKvLost, Kind::FailureTransport);
    let error = late.error().expect("an error");
    assert_eq!(error.kind(), FailureKind::Transport);
    assert_eq!(late.aborts(), [(0, "r.0")]);
}

#[test]
fn after_lost_handoffs_the_request_asks_to_stay_whole() {
    let mut desk = Desk::plain(&[Ok((0, 1)), Ok((0, 1)), Ok((1, 1))], &[]);
    desk.ended(1, "r.0", R::LegEndKvLost);
    assert!(!desk.script.asked[1].keep_whole);
    desk.ended(1, "r.1", R::LegEndKvLost);
    assert!(desk.script.asked[2].keep_whole);
}

#[test]
fn a_retarget_that_comes_too_late_starts_anew() {
    let mut desk = Desk::plain(&[Ok((0, 1)), Ok((0, 2))], &[2]);
    desk.tokens(0, "r.0", 0, 1).hear(Input::Lost(key(1)));
    desk.ended(0, "r.0", R::LegEndFailed);
    assert_eq!(desk.aborts(), [(2, "r.0")]);
    assert_eq!(desk.submits()[0], (0, "r.1", Leg::Prefill, 1));
}

#[test]
fn what_was_returned_goes_on_where_it_was() {
    let mut desk = Desk::plain(&[Ok((0, 1)), Ok((0, 1))], &[]);
    desk.tokens(0, "r.0", 0, 1).tokens(1, "r.0", 0, 4);
    desk.ended(0, "r.0", R::LegEndHandedOff);
    desk.ended(1, "r.0", R::LegEndReturned);
    assert_eq!(
        desk.submits(),
        [(0, "r.1", Leg::Prefill, 4), (1, "r.1", Leg::Decode, 4)]
    );
}

#[test]
fn choices_that_differ_go_on_alone() {
    let mut desk = Desk::new(
        3,
        MachineConfig::default(),
        &[Ok((0, 0)), Ok((1, 1)), Ok((2, 2))],
        &[],
    );
    let output = |choice, tokens: &[u32], finish: v1::FinishReason| v1::Output {
        request_id: "r.0".to_owned(),
        choice,
        tokens: tokens.to_vec(),
        finish: finish.into(),
        ..Default::default()
    };
    let none = v1::FinishReason::FinishNone;
    let stop = v1::FinishReason::FinishStop;
    desk.hear(Input::Output(key(0), output(0, &[1], stop)));
    desk.hear(Input::Output(key(0), output(1, &[1], none)));
    desk.hear(Input::Output(key(0), output(2, &[1, 2], none)));
    desk.hear(Input::Lost(key(0)));
    let submitted: Vec<_> = desk
        .effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Submit { submit, .. } => {
                Some((submit.choices.clone(), submit.resumed_tokens.clone()))
            }
            _ => None,
        })
        .collect();
    assert_eq!(submitted, [(vec![1], vec![1]), (vec![2], vec![1, 2])]);
}

#[test]
fn failures_are_bounded_and_the_failing_are_avoided() {
    let mut desk = Desk::plain(&[Ok((0, 0)); 9], &[]);
    for attempt in 0..3 {
        desk.ended(0, &format!("r.{attempt}"), R::LegEndFailed);
        assert_eq!(desk.submits().len(), 1);
        let asked = desk.script.asked.last().expect("a placement");
        assert!(asked.avoid.contains(&WorkerId(0)));
    }
    desk.ended(0, "r.3", R::LegEndFailed);
    let Some(ServeError::Failed { message, .. }) = desk.error() else {
        panic!("{:?}", desk.error())
    };
    assert!(message.contains('4') && !message.contains("said the worker"));
}

#[test]
fn a_leg_is_retried_as_often_as_its_kind_of_failure_allows() {
    let max = MachineConfig::default().max_failures;
    for (wire, kind, retries) in [
        (Kind::FailureClient, FailureKind::Client, 0),
        (Kind::FailureModel, FailureKind::Model, 1),
        (Kind::FailureMemory, FailureKind::Memory, max),
        (Kind::FailureDevice, FailureKind::Device, max),
        (Kind::FailureTransport, FailureKind::Transport, max),
        (Kind::FailureOverload, FailureKind::Overload, max),
    ] {
        let mut desk = Desk::plain(&[Ok((0, 0)); 9], &[]);
        for attempt in 0..retries {
            desk.failed(0, &format!("r.{attempt}"), R::LegEndFailed, wire);
            assert_eq!(desk.setbacks(), [Setback::Failed(kind)]);
            assert_eq!(desk.submits().len(), 1, "{kind}");
        }
        desk.failed(0, &format!("r.{retries}"), R::LegEndFailed, wire);
        assert!(desk.submits().is_empty(), "{kind}");
        assert_eq!(desk.error().expect("an error").kind(), kind);
    }
}

#[test]
fn failures_of_different_kinds_add_up() {
    let mut desk = Desk::plain(&[Ok((0, 0)); 9], &[]);
    let kinds = [
        Kind::FailureDevice,
        Kind::FailureModel,
        Kind::FailureMemory,
        Kind::FailureDevice,
    ];
    for (attempt, kind) in kinds.into_iter().enumerate() {
        assert!(desk.error().is_none());
        desk.failed(0, &format!("r.{attempt}"), R::LegEndFailed, kind);
    }
    assert_eq!(desk.error().expect("an error").kind(), FailureKind::Device);
}

#[test]
fn a_request_that_kills_its_workers_is_given_up() {
    let pairs: Vec<Pair> = (0..9).map(|worker| Ok((worker, worker))).collect();
    let mut desk = Desk::plain(&pairs, &[]);
    for worker in 0..4 {
        desk.hear(Input::Lost(key(worker)));
        assert_eq!(desk.setbacks(), [Setback::WorkerLost]);
        assert!(desk.error().is_none());
    }
    desk.hear(Input::Lost(key(4)));
    assert_eq!(desk.error().expect("an error").kind(), FailureKind::Device);
}

#[test]
fn progress_forgives_lost_workers() {
    let pairs: Vec<Pair> = (0..9).map(|worker| Ok((worker, worker))).collect();
    let mut desk = Desk::plain(&pairs, &[]);
    for worker in 0..7 {
        desk.tokens(worker, &format!("r.{worker}"), worker, 1);
        desk.hear(Input::Lost(key(worker)));
        assert!(desk.error().is_none());
    }
}

#[test]
fn an_accepted_request_waits_for_a_worker_but_not_for_ever() {
    let mut desk = Desk::plain(&[Ok((0, 0))], &[]);
    desk.hear(Input::Lost(key(0)));
    assert!(desk.error().is_none());
    desk.wait(Duration::from_secs(9));
    assert!(desk.error().is_none());
    desk.wait(Duration::from_secs(1));
    assert!(matches!(desk.error(), Some(ServeError::Unavailable { .. })));
}

#[test]
fn a_worker_that_comes_back_is_used_at_once() {
    let none = Err(NoPlacement::NoRole { role: Role::Decode });
    let mut desk = Desk::plain(&[Ok((0, 0)), none, Ok((1, 1))], &[]);
    desk.hear(Input::Lost(key(0)));
    desk.now += Duration::from_millis(1);
    desk.hear(Input::WorkersChanged);
    assert_eq!(desk.submits(), [(1, "r.1", Leg::Colocated, 0)]);
}

#[test]
fn a_rejection_reaches_the_client_in_the_workers_words() {
    let mut desk = Desk::plain(&[Ok((0, 1))], &[]);
    desk.ended(0, "r.0", R::LegEndRejected);
    let Some(ServeError::Rejected(message)) = desk.error() else {
        panic!("{:?}", desk.error())
    };
    assert_eq!(message, "said the worker");
    assert_eq!(desk.aborts(), [(1, "r.0")]);
}

#[test]
fn a_stop_reaches_both_legs_and_the_end_follows() {
    let mut desk = Desk::plain(&[Ok((0, 1))], &[]);
    desk.tokens(0, "r.0", 0, 1).tokens(1, "r.0", 0, 2);
    desk.hear(Input::Stop(0));
    assert_eq!(desk.aborts(), [(0, "r.0"), (1, "r.0")]);
    desk.ended(0, "r.0", R::LegEndAborted);
    assert!(desk.done().is_none());
    desk.ended(1, "r.0", R::LegEndAborted);
    assert!(desk.done().is_some());
}

#[test]
fn the_end_does_not_wait_long_for_the_legs_ends() {
    let mut desk = Desk::plain(&[Ok((0, 1))], &[]);
    desk.tokens(0, "r.0", 0, 1).tokens(1, "r.0", 0, 8);
    assert!(desk.done().is_none());
    let deadline = desk.machine.deadline().expect("a deadline");
    let rest = deadline - desk.now;
    assert!(rest <= MachineConfig::default().settle);
    desk.wait(rest);
    assert!(desk.done().is_some());
    assert_eq!(desk.aborts(), [(0, "r.0"), (1, "r.0")]);
}

#[test]
fn a_client_that_hangs_up_frees_both_legs() {
    let mut desk = Desk::plain(&[Ok((0, 1))], &[]);
    desk.hear(Input::HangUp);
    assert_eq!(desk.aborts(), [(0, "r.0"), (1, "r.0")]);
    assert!(desk.machine.is_over() && desk.error().is_none());
}

#[test]
fn prompt_logprobs_come_once_and_are_not_asked_for_again() {
    let mut desk = Desk::plain(&[Ok((0, 0)), Ok((1, 1))], &[]);
    let output = |attempt: &str| v1::Output {
        request_id: attempt.to_owned(),
        tokens: vec![1],
        prompt_logprobs: vec![v1::TokenLogprob::default(); 9],
        ..Default::default()
    };
    let emitted = |desk: &Desk| {
        let is = |e: &&Effect| matches!(e, Effect::Emit(Event::PromptLogprobs(l)) if l.len() == 9);
        desk.effects.iter().filter(is).count()
    };
    desk.hear(Input::Output(key(0), output("r.0")));
    assert_eq!(emitted(&desk), 1);
    desk.hear(Input::Lost(key(0)));
    let asked = desk.effects.iter().find_map(|effect| match effect {
        Effect::Submit { submit, .. } => submit.sampling.as_ref().map(|s| s.prompt_logprobs),
        _ => None,
    });
    assert_eq!(asked, Some(None));
    desk.hear(Input::Output(key(1), output("r.1")));
    assert_eq!(emitted(&desk), 0);
}

#[test]
fn decode_does_not_overtake_the_prompts_logprobs() {
    let mut desk = Desk::plain(&[Ok((0, 1))], &[]);
    desk.tokens(1, "r.0", 0, 8)
        .ended(1, "r.0", R::LegEndFinished);
    assert!(desk.effects.is_empty(), "held until prefill has spoken");
    let output = v1::Output {
        request_id: "r.0".to_owned(),
        tokens: vec![0],
        prompt_logprobs: vec![v1::TokenLogprob::default(); 9],
        ..Default::default()
    };
    desk.hear(Input::Output(key(0), output));
    let emitted = |effect: &Effect| match effect {
        Effect::Emit(Event::PromptLogprobs(logprobs)) => logprobs.len(),
        Effect::Emit(Event::Tokens { tokens, .. }) => tokens.len(),
        other => panic!("unexpected {other:?}"),
    };
    let emitted: Vec<usize> = desk.effects.iter().map(emitted).collect();
    assert_eq!(emitted, [9, 1, 7]);
}

#[test]
fn an_old_attempts_words_are_ignored() {
    let mut desk = Desk::plain(&[Ok((0, 0)), Ok((1, 1))], &[]);
    desk.ended(0, "r.0", R::LegEndFailed);
    desk.tokens(0, "r.0", 0, 1);
    assert!(desk.effects.is_empty());
    desk.tokens(0, "r.1", 0, 1);
    assert!(desk.effects.is_empty(), "from a worker without the leg");
    desk.tokens(1, "r.1", 0, 1);
    assert_eq!(desk.effects.len(), 1);
}
