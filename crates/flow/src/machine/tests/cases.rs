//! Single decisions: which worker gets which message, at which fault.
//!
//! Longer than a room: one short test for each decision.

use std::collections::VecDeque;
use std::time::Duration;

use tasuki_core::{
    Capabilities, Chunks, FailureKind, Identity, ModelId, RequestView, Role, WorkerId,
};
use tasuki_policy::NoPlacement;

use crate::generation::{Event, Finish, Generation, ServeError, Timings};
use crate::leg::{Handoff, LegEnd, LegEndReason as R, LegKind, Output};
use crate::machine::{Effect, Fleet, Input, Machine, MachineConfig, OnKvLoss, Placed, RetryReason};
use crate::sampling::{SamplingParams, TokenLogprob};
use crate::worker_ref::{LegId, Peer, WorkerKey, WorkerRef};

/// Workers from this number on have other weights.
const OTHER_WEIGHTS: u32 = 100;

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

fn leg(worker: u32, attempt: u32) -> LegId {
    LegId {
        worker: key(worker),
        attempt,
    }
}

fn worker(worker: u32) -> WorkerRef {
    WorkerRef {
        key: key(worker),
        capabilities: Capabilities::default(),
        identity: Identity([u8::from(worker >= OTHER_WEIGHTS); 16]),
        peer: Peer {
            engine_id: format!("engine-{worker}"),
            kv_endpoint: String::new(),
        },
    }
}

impl Fleet for Script {
    fn place(&mut self, request: &RequestView) -> Result<Placed, NoPlacement> {
        self.asked.push(request.clone());
        let (prefill, decode) = self
            .pairs
            .pop_front()
            .unwrap_or(Err(NoPlacement::NoWorker))?;
        Ok(Placed {
            prefill: worker(prefill),
            decode: worker(decode),
            why: None,
        })
    }

    fn place_decode(&mut self, _: &RequestView, _: WorkerKey, _: &[WorkerId]) -> Option<WorkerRef> {
        self.decodes.pop_front().map(worker)
    }
}

struct Case {
    machine: Machine,
    script: Script,
    now: Duration,
    effects: Vec<Effect>,
}

fn generation(n: u32) -> Generation {
    Generation {
        model: ModelId(3),
        request_id: "r".to_owned(),
        prompt: (0..10).collect(),
        n,
        sampling: SamplingParams {
            max_tokens: 8,
            prompt_logprobs: Some(0),
            ..Default::default()
        },
        cache_salt: "t".to_owned(),
        tenant: "".into(),
        priority: 0,
        opaque: None,
    }
}

impl Case {
    /// Retries without a pause come at once.
    fn new(n: u32, config: MachineConfig, pairs: &[Pair], decodes: &[u32]) -> Self {
        let config = MachineConfig {
            spread: Duration::ZERO,
            ..config
        };
        let mut case = Self {
            machine: Machine::new(generation(n), Chunks::default(), config),
            script: Script {
                pairs: pairs.iter().cloned().collect(),
                decodes: decodes.iter().copied().collect(),
                asked: Vec::new(),
            },
            now: Duration::ZERO,
            effects: Vec::new(),
        };
        case.machine.start(case.now, &mut case.script);
        case.take_effects();
        case
    }

    fn plain(pairs: &[Pair], decodes: &[u32]) -> Self {
        Self::new(1, MachineConfig::default(), pairs, decodes)
    }

    /// What one input brings about.
    fn input(&mut self, input: Input) -> &mut Self {
        self.machine.handle(input, self.now, &mut self.script);
        self.take_effects();
        self
    }

    fn take_effects(&mut self) {
        self.effects = std::iter::from_fn(|| self.machine.next_effect()).collect();
    }

    fn output(&mut self, from: LegId, output: Output) -> &mut Self {
        self.input(Input::Output(from, output))
    }

    fn tokens(&mut self, from: LegId, position: u32, count: u32) -> &mut Self {
        let output = Output {
            position,
            tokens: (position..position + count).collect(),
            ..Output::default()
        };
        self.output(from, output)
    }

    fn ended(&mut self, from: LegId, reason: R) -> &mut Self {
        self.failed(from, reason, reason.usual_failure())
    }

    fn failed(&mut self, from: LegId, reason: R, failure: FailureKind) -> &mut Self {
        let ended = LegEnd {
            reason,
            failure,
            message: "said the worker".to_owned(),
            answer: None,
            ticket: None,
            timings: None,
        };
        self.input(Input::Ended(from, ended))
    }

    fn wait(&mut self, time: Duration) -> &mut Self {
        self.now += time;
        self.input(Input::Tick)
    }

    /// What the last input dispatched: worker, attempt, kind, resumed tokens.
    fn dispatched(&self) -> Vec<(u32, u32, LegKind, usize)> {
        let effects = self.effects.iter().filter_map(|effect| match effect {
            Effect::Dispatch { leg, spec } => Some((
                leg.worker.worker.0,
                leg.attempt,
                spec.kind,
                spec.resumed.len(),
            )),
            _ => None,
        });
        effects.collect()
    }

    fn aborts(&self) -> Vec<(u32, u32)> {
        let effects = self.effects.iter().filter_map(|effect| match effect {
            Effect::Abort { leg, .. } => Some((leg.worker.worker.0, leg.attempt)),
            _ => None,
        });
        effects.collect()
    }

    fn retargets(&self) -> Vec<(u32, &str)> {
        let effects = self.effects.iter().filter_map(|effect| match effect {
            Effect::Retarget { leg, peer } => Some((leg.worker.worker.0, &*peer.engine_id)),
            _ => None,
        });
        effects.collect()
    }

    fn retries(&self) -> Vec<RetryReason> {
        let reason = |effect: &Effect| match effect {
            Effect::Retry { reason, .. } => Some(*reason),
            _ => None,
        };
        self.effects.iter().filter_map(reason).collect()
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
    let case = Case::plain(&[Ok((0, 1))], &[]);
    assert_eq!(
        case.dispatched(),
        [(0, 0, LegKind::Prefill, 0), (1, 0, LegKind::Decode, 0)]
    );
    let peer = |effect: &Effect| match effect {
        Effect::Dispatch { spec, .. } => match &spec.handoff {
            Some(Handoff::With(peer)) => Some(peer.engine_id.clone()),
            _ => None,
        },
        _ => None,
    };
    let peers: Vec<_> = case.effects.iter().filter_map(peer).collect();
    assert_eq!(peers, ["engine-1", "engine-0"]);
}

#[test]
fn a_request_is_bound_to_the_weights_that_gave_its_first_token() {
    let others = OTHER_WEIGHTS;
    let pairs = [Ok((0, 1)), Ok((others, others)), Ok((others, others))];
    let mut case = Case::plain(&pairs, &[]);
    case.input(Input::Lost(key(0)));
    case.tokens(leg(others, 1), 0, 1)
        .input(Input::Lost(key(others)));
    assert_eq!(case.dispatched(), [(others, 2, LegKind::Colocated, 1)]);
    let asked = case.script.asked.iter();
    let bound: Vec<_> = asked.map(|view| (view.model, view.bound_to)).collect();
    let model = ModelId(3);
    let other = Some(Identity([1; 16]));
    assert_eq!(bound, [(model, None), (model, None), (model, other)]);
}

#[test]
fn one_worker_gets_one_leg() {
    let case = Case::plain(&[Ok((1, 1))], &[]);
    assert_eq!(case.dispatched(), [(1, 0, LegKind::Colocated, 0)]);
}

#[test]
fn a_new_request_does_not_wait_for_workers() {
    let case = Case::plain(&[Err(NoPlacement::NoWorker)], &[]);
    assert!(matches!(
        case.error(),
        Some(ServeError::Unavailable {
            retry_after_s: 1..,
            ..
        })
    ));
    assert!(case.machine.is_over());
}

#[test]
fn what_is_too_large_is_the_clients_error() {
    let too_large = NoPlacement::TooLarge {
        tokens: 18,
        limit_tokens: 16,
    };
    let case = Case::plain(&[Err(too_large)], &[]);
    let Some(ServeError::Rejected(message)) = case.error() else {
        panic!("{:?}", case.error())
    };
    assert!(message.contains("18") && message.contains("16"));
}

#[test]
fn a_refusal_bends_the_attempt_to_another_decode_worker() {
    for prefilled in [false, true] {
        let mut case = Case::plain(&[Ok((0, 1))], &[2]);
        if prefilled {
            case.tokens(leg(0, 0), 0, 1);
        }
        case.ended(leg(1, 0), R::Refused);
        assert_eq!(case.dispatched(), [(2, 0, LegKind::Decode, 0)]);
        assert_eq!(case.retargets(), [(0, "engine-2")]);
        assert!(case.aborts().is_empty());
    }
}

#[test]
fn a_refusal_with_nobody_else_is_tried_again_after_a_pause() {
    let mut case = Case::plain(&[Ok((0, 1)), Ok((0, 1)), Ok((0, 1))], &[]);
    case.ended(leg(1, 0), R::Refused);
    assert_eq!(case.aborts(), [(0, 0)]);
    assert!(case.dispatched().is_empty());
    case.wait(Duration::from_millis(49));
    assert!(case.dispatched().is_empty());
    case.wait(Duration::from_millis(26));
    assert_eq!(case.dispatched().len(), 2);
    case.ended(leg(1, 1), R::Refused);
    case.wait(Duration::from_millis(99));
    assert!(case.dispatched().is_empty());
    case.wait(Duration::from_millis(51));
    assert_eq!(case.dispatched()[0].1, 2);
}

#[test]
fn what_is_returned_again_and_again_waits_ever_longer_and_not_for_ever() {
    let mut case = Case::plain(&[Ok((0, 0)); 300], &[]);
    let mut pauses = Vec::new();
    let mut attempt = 0;
    while case.error().is_none() {
        case.ended(leg(0, attempt), R::Returned);
        let began = case.now;
        while case.dispatched().is_empty() && case.error().is_none() {
            case.wait(Duration::from_millis(1));
        }
        pauses.push(case.now - began);
        attempt += 1;
        assert!(case.now < Duration::from_secs(200), "it ends");
    }
    let ms = |range: std::ops::Range<u64>| {
        Duration::from_millis(range.start)..Duration::from_millis(range.end + 1)
    };
    assert_eq!(pauses[0], Duration::ZERO);
    for (at, range) in [(1, 50..75), (2, 100..150), (3, 200..300), (6, 1_000..1_500)] {
        assert!(ms(range).contains(&pauses[at]), "{at}: {:?}", pauses[at]);
    }
    assert_ne!(pauses[6], pauses[7], "jitter");
    let error = case.error().expect("an end").to_string();
    assert!(error.contains("no room"), "{error}");
    assert!(case.now > MachineConfig::default().refused_limit);
}

#[test]
fn a_decode_worker_lost_early_costs_no_prefill() {
    for prefilled in [false, true] {
        let mut case = Case::plain(&[Ok((0, 1))], &[2]);
        if prefilled {
            case.tokens(leg(0, 0), 0, 1);
        }
        case.input(Input::Lost(key(1)));
        assert_eq!(case.retargets(), [(0, "engine-2")]);
        assert_eq!(case.dispatched(), [(2, 0, LegKind::Decode, 0)]);
    }
}

#[test]
fn a_decode_worker_lost_later_is_not_replaced_by_one_that_says_it_all_again() {
    let mut case = Case::plain(&[Ok((0, 1)), Ok((0, 2))], &[2]);
    case.tokens(leg(0, 0), 0, 1).tokens(leg(1, 0), 0, 3);
    case.input(Input::Lost(key(1)));
    assert!(case.retargets().is_empty());
    assert_eq!(
        case.dispatched(),
        [(0, 1, LegKind::Prefill, 3), (2, 1, LegKind::Decode, 3)]
    );
    let asked = case.script.asked.last().expect("a placement");
    assert_eq!((asked.prompt_tokens, asked.max_tokens), (13, 5));
    assert_eq!(
        asked.warm.first().map(|warm| warm.worker),
        Some(WorkerId(0))
    );
}

#[test]
fn a_prefill_worker_lost_before_its_first_token_is_replaced_at_once() {
    let mut case = Case::plain(&[Ok((0, 1)), Ok((2, 1))], &[]);
    case.input(Input::Lost(key(0)));
    assert_eq!(case.aborts(), [(1, 0)]);
    assert_eq!(
        case.dispatched(),
        [(2, 1, LegKind::Prefill, 0), (1, 1, LegKind::Decode, 0)]
    );
}

#[test]
fn a_prefill_worker_lost_later_is_decodes_affair() {
    let mut case = Case::plain(&[Ok((0, 1)), Ok((1, 1))], &[]);
    case.tokens(leg(0, 0), 0, 1).input(Input::Lost(key(0)));
    assert!(case.effects.is_empty());
    case.ended(leg(1, 0), R::KvLost);
    assert_eq!(case.dispatched(), [(1, 1, LegKind::Colocated, 1)]);
}

#[test]
fn lost_kv_can_fail_the_request_but_not_before_there_was_any() {
    let config = MachineConfig {
        on_kv_loss: OnKvLoss::Fail,
        ..MachineConfig::default()
    };
    let pairs = [Ok((0, 1)), Ok((2, 1))];
    let mut early = Case::new(1, config, &pairs, &[]);
    early.ended(leg(1, 0), R::KvLost);
    assert!(early.error().is_none() && early.dispatched().len() == 2);
    let mut late = Case::new(1, config, &pairs, &[]);
    late.tokens(leg(0, 0), 0, 1).ended(leg(1, 0), R::KvLost);
    let error = late.error().expect("an error");
    assert_eq!(error.kind(), FailureKind::Transport);
    assert_eq!(late.aborts(), [(0, 0)]);
}

#[test]
fn after_lost_handoffs_the_request_asks_to_stay_whole() {
    let mut case = Case::plain(&[Ok((0, 1)), Ok((0, 1)), Ok((1, 1))], &[]);
    case.ended(leg(1, 0), R::KvLost);
    assert!(!case.script.asked[1].keep_whole);
    case.ended(leg(1, 1), R::KvLost);
    assert!(case.script.asked[2].keep_whole);
}

#[test]
fn a_retarget_that_comes_too_late_starts_anew() {
    let mut case = Case::plain(&[Ok((0, 1)), Ok((0, 2))], &[2]);
    case.tokens(leg(0, 0), 0, 1).input(Input::Lost(key(1)));
    case.ended(leg(0, 0), R::Failed);
    assert_eq!(case.aborts(), [(2, 0)]);
    assert_eq!(case.dispatched()[0], (0, 1, LegKind::Prefill, 1));
}

#[test]
fn what_was_returned_goes_on_where_it_was() {
    let mut case = Case::plain(&[Ok((0, 1)), Ok((0, 1))], &[]);
    case.tokens(leg(0, 0), 0, 1).tokens(leg(1, 0), 0, 4);
    case.ended(leg(0, 0), R::HandedOff);
    case.ended(leg(1, 0), R::Returned);
    assert_eq!(
        case.dispatched(),
        [(0, 1, LegKind::Prefill, 4), (1, 1, LegKind::Decode, 4)]
    );
}

#[test]
fn choices_that_differ_go_on_alone() {
    let mut case = Case::new(
        3,
        MachineConfig::default(),
        &[Ok((0, 0)), Ok((1, 1)), Ok((2, 2))],
        &[],
    );
    let output = |choice, tokens: &[u32], finish| Output {
        choice,
        tokens: tokens.to_vec(),
        finish,
        ..Default::default()
    };
    case.output(leg(0, 0), output(0, &[1], Some(Finish::Stop)));
    case.output(leg(0, 0), output(1, &[1], None));
    case.output(leg(0, 0), output(2, &[1, 2], None));
    case.input(Input::Lost(key(0)));
    let submitted: Vec<_> = case
        .effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Dispatch { spec, .. } => Some((spec.choices.clone(), spec.resumed.clone())),
            _ => None,
        })
        .collect();
    assert_eq!(submitted, [(vec![1], vec![1]), (vec![2], vec![1, 2])]);
}

#[test]
fn failures_are_bounded_and_the_failing_are_avoided() {
    let mut case = Case::plain(&[Ok((0, 0)); 9], &[]);
    for attempt in 0..3 {
        case.ended(leg(0, attempt), R::Failed);
        assert_eq!(case.dispatched().len(), 1);
        let asked = case.script.asked.last().expect("a placement");
        assert!(asked.avoid.contains(&WorkerId(0)));
    }
    case.ended(leg(0, 3), R::Failed);
    let Some(ServeError::Failed { message, .. }) = case.error() else {
        panic!("{:?}", case.error())
    };
    assert!(message.contains('4') && !message.contains("said the worker"));
}

#[test]
fn a_leg_is_retried_as_often_as_its_kind_of_failure_allows() {
    let max = MachineConfig::default().max_failures;
    for (kind, retries) in [
        (FailureKind::Client, 0),
        (FailureKind::Model, 1),
        (FailureKind::Memory, max),
        (FailureKind::Device, max),
        (FailureKind::Transport, max),
        (FailureKind::Overload, max),
    ] {
        let mut case = Case::plain(&[Ok((0, 0)); 9], &[]);
        for attempt in 0..retries {
            case.failed(leg(0, attempt), R::Failed, kind);
            assert_eq!(case.retries(), [RetryReason::Failed(kind)]);
            assert_eq!(case.dispatched().len(), 1, "{kind}");
        }
        case.failed(leg(0, retries), R::Failed, kind);
        assert!(case.dispatched().is_empty(), "{kind}");
        assert_eq!(case.error().expect("an error").kind(), kind);
    }
}

#[test]
fn failures_of_different_kinds_add_up() {
    let mut case = Case::plain(&[Ok((0, 0)); 9], &[]);
    let (device, memory) = (FailureKind::Device, FailureKind::Memory);
    let kinds = [device, FailureKind::Model, memory, device];
    for (attempt, kind) in (0..).zip(kinds) {
        assert!(case.error().is_none());
        case.failed(leg(0, attempt), R::Failed, kind);
    }
    assert_eq!(case.error().expect("an error").kind(), device);
}

#[test]
fn a_request_that_kills_its_workers_is_given_up() {
    let pairs: Vec<Pair> = (0..9).map(|worker| Ok((worker, worker))).collect();
    let mut case = Case::plain(&pairs, &[]);
    for worker in 0..4 {
        case.input(Input::Lost(key(worker)));
        assert_eq!(case.retries(), [RetryReason::WorkerLost]);
        assert!(case.error().is_none());
    }
    case.input(Input::Lost(key(4)));
    assert_eq!(case.error().expect("an error").kind(), FailureKind::Device);
}

#[test]
fn progress_forgives_lost_workers() {
    let pairs: Vec<Pair> = (0..9).map(|worker| Ok((worker, worker))).collect();
    let mut case = Case::plain(&pairs, &[]);
    for worker in 0..7 {
        case.tokens(leg(worker, worker), worker, 1);
        case.input(Input::Lost(key(worker)));
        assert!(case.error().is_none());
    }
}

#[test]
fn an_accepted_request_waits_for_a_worker_but_not_for_ever() {
    let mut case = Case::plain(&[Ok((0, 0))], &[]);
    case.input(Input::Lost(key(0)));
    assert!(case.error().is_none());
    case.wait(Duration::from_secs(9));
    assert!(case.error().is_none());
    case.wait(Duration::from_secs(1));
    assert!(matches!(case.error(), Some(ServeError::Unavailable { .. })));
}

#[test]
fn a_worker_that_comes_back_is_used_at_once() {
    let none = Err(NoPlacement::NoRole { role: Role::Decode });
    let mut case = Case::plain(&[Ok((0, 0)), none, Ok((1, 1))], &[]);
    case.input(Input::Lost(key(0)));
    case.now += Duration::from_millis(1);
    case.input(Input::WorkersChanged);
    assert_eq!(case.dispatched(), [(1, 1, LegKind::Colocated, 0)]);
}

#[test]
fn a_rejection_reaches_the_client_in_the_workers_words() {
    let mut case = Case::plain(&[Ok((0, 1))], &[]);
    case.ended(leg(0, 0), R::Rejected);
    let Some(ServeError::Rejected(message)) = case.error() else {
        panic!("{:?}", case.error())
    };
    assert_eq!(message, "said the worker");
    assert_eq!(case.aborts(), [(1, 0)]);
}

#[test]
fn a_stop_reaches_both_legs_and_the_end_follows() {
    let mut case = Case::plain(&[Ok((0, 1))], &[]);
    case.tokens(leg(0, 0), 0, 1).tokens(leg(1, 0), 0, 2);
    case.input(Input::Stop(0));
    assert_eq!(case.aborts(), [(0, 0), (1, 0)]);
    case.ended(leg(0, 0), R::Aborted);
    assert!(case.done().is_none());
    case.ended(leg(1, 0), R::Aborted);
    assert!(case.done().is_some());
}

#[test]
fn the_end_does_not_wait_long_for_the_legs_ends() {
    let mut case = Case::plain(&[Ok((0, 1))], &[]);
    case.tokens(leg(0, 0), 0, 1).tokens(leg(1, 0), 0, 8);
    assert!(case.done().is_none());
    let deadline = case.machine.deadline().expect("a deadline");
    let rest = deadline - case.now;
    assert!(rest <= MachineConfig::default().settle);
    case.wait(rest);
    assert!(case.done().is_some());
    assert_eq!(case.aborts(), [(0, 0), (1, 0)]);
}

#[test]
fn a_client_that_hangs_up_frees_both_legs() {
    let mut case = Case::plain(&[Ok((0, 1))], &[]);
    case.input(Input::HangUp);
    assert_eq!(case.aborts(), [(0, 0), (1, 0)]);
    assert!(case.machine.is_over() && case.error().is_none());
}

#[test]
fn prompt_logprobs_come_once_and_are_not_asked_for_again() {
    let mut case = Case::plain(&[Ok((0, 0)), Ok((1, 1))], &[]);
    let output = || Output {
        tokens: vec![1],
        prompt_logprobs: vec![TokenLogprob::default(); 9],
        ..Default::default()
    };
    let emitted = |case: &Case| {
        let is = |e: &&Effect| matches!(e, Effect::Emit(Event::PromptLogprobs(l)) if l.len() == 9);
        case.effects.iter().filter(is).count()
    };
    case.output(leg(0, 0), output());
    assert_eq!(emitted(&case), 1);
    case.input(Input::Lost(key(0)));
    let asked = case.effects.iter().find_map(|effect| match effect {
        Effect::Dispatch { spec, .. } => Some(spec.sampling.prompt_logprobs),
        _ => None,
    });
    assert_eq!(asked, Some(None));
    case.output(leg(1, 1), output());
    assert_eq!(emitted(&case), 0);
}

#[test]
fn decode_does_not_overtake_the_prompts_logprobs() {
    let mut case = Case::plain(&[Ok((0, 1))], &[]);
    case.tokens(leg(1, 0), 0, 8).ended(leg(1, 0), R::Finished);
    assert!(case.effects.is_empty(), "held until prefill has spoken");
    let output = Output {
        tokens: vec![0],
        prompt_logprobs: vec![TokenLogprob::default(); 9],
        ..Default::default()
    };
    case.output(leg(0, 0), output);
    let emitted = |effect: &Effect| match effect {
        Effect::Emit(Event::PromptLogprobs(logprobs)) => logprobs.len(),
        Effect::Emit(Event::Tokens { tokens, .. }) => tokens.len(),
        other => panic!("unexpected {other:?}"),
    };
    let emitted: Vec<usize> = case.effects.iter().map(emitted).collect();
    assert_eq!(emitted, [9, 1, 7]);
}

#[test]
fn an_old_attempts_words_are_ignored() {
    let mut case = Case::plain(&[Ok((0, 0)), Ok((1, 1))], &[]);
    case.ended(leg(0, 0), R::Failed);
    case.tokens(leg(0, 0), 0, 1);
    assert!(case.effects.is_empty());
    case.tokens(leg(0, 1), 0, 1);
    assert!(case.effects.is_empty(), "from a worker without the leg");
    case.tokens(leg(1, 1), 0, 1);
    assert_eq!(case.effects.len(), 1);
}

#[test]
fn a_decode_leg_without_a_token_for_too_long_goes_on_elsewhere() {
    let limit = Duration::from_secs(30);
    let mut case = Case::plain(&[Ok((0, 1)), Ok((0, 2))], &[]);
    case.tokens(leg(0, 0), 0, 1).ended(leg(0, 0), R::HandedOff);
    // Until decode has begun the handoff's own limits hold.
    assert_eq!(case.machine.deadline(), None);
    case.now += Duration::from_secs(5);
    case.tokens(leg(1, 0), 1, 3);
    assert_eq!(case.machine.deadline(), Some(case.now + limit));
    case.wait(limit - Duration::from_millis(1));
    assert_eq!(case.effects.len(), 0);
    case.wait(Duration::from_millis(1));
    assert_eq!(case.aborts(), [(1, 0)]);
    assert_eq!(case.retries(), [RetryReason::Failed(FailureKind::Device)]);
    assert_eq!(
        case.dispatched(),
        [(0, 1, LegKind::Prefill, 4), (2, 1, LegKind::Decode, 4)]
    );
    assert_eq!(case.script.asked[1].avoid, [WorkerId(1)]);
    // What the stalled worker still sends is ignored.
    case.tokens(leg(1, 0), 4, 1);
    assert_eq!(case.effects.len(), 0);
}

#[test]
fn a_request_that_stalls_everywhere_fails_in_the_end() {
    let mut case = Case::plain(&[Ok((0, 0)); 9], &[]);
    let limit = Duration::from_secs(30);
    let mut stalls = 0;
    while !case.machine.is_over() {
        let attempt = stalls;
        case.tokens(leg(0, attempt), 2 * attempt, 2);
        case.wait(limit);
        stalls += 1;
        assert!(stalls < 9, "it goes on for ever");
        if !case.machine.is_over() {
            case.wait(Duration::ZERO);
        }
    }
    assert_eq!(stalls, 1 + MachineConfig::default().max_failures);
}
