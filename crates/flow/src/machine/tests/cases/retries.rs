//! How often a request is tried again, where, and when it is given up.

use std::time::Duration;

use tasuki_core::{FailureKind, Role, WorkerId};
use tasuki_policy::NoPlacement;

use super::{Case, Pair, key, leg};
use crate::generation::{Finish, ServeError};
use crate::leg::{LegEndReason as R, LegKind, Output};
use crate::machine::{Effect, Input, MachineConfig, RetryReason};

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
    assert!(
        error.contains("no room for it, the limit is 120 s"),
        "{error}"
    );
    assert!(case.now > MachineConfig::default().refused_limit);
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
fn a_worker_that_refused_is_avoided() {
    for (pair, refuses) in [((0, 0), 0), ((0, 1), 0), ((0, 1), 1)] {
        let mut case = Case::plain(&[Ok(pair), Ok((2, 2))], &[]);
        case.ended(leg(refuses, 0), R::Refused);
        case.wait(Duration::from_millis(75));
        assert_eq!(case.dispatched(), [(2, 1, LegKind::Colocated, 0)]);
        assert_eq!(case.script.asked[1].avoid, [WorkerId(refuses)], "{pair:?}");
    }
}

#[test]
fn workers_that_refused_before_a_retarget_are_avoided_too() {
    for reason in [R::Refused, R::Failed] {
        let mut case = Case::plain(&[Ok((0, 1)), Ok((3, 3))], &[2]);
        case.ended(leg(1, 0), R::Refused);
        case.failed(leg(2, 0), reason, FailureKind::Device);
        case.wait(Duration::from_millis(75));
        assert_eq!(case.script.asked[1].avoid, [WorkerId(1), WorkerId(2)]);
    }
}

/// A handshake that is refused, or KV that does not come, is the fault of either side.
#[test]
fn after_a_failed_handoff_both_workers_are_avoided() {
    let workers = |ids: &[u32]| -> Vec<WorkerId> { ids.iter().copied().map(WorkerId).collect() };
    let pairs = [Ok((0, 1)), Ok((0, 2)), Ok((3, 2))];
    for reason in [R::Failed, R::KvLost] {
        let mut case = Case::plain(&pairs, &[]);
        case.failed(leg(1, 0), reason, FailureKind::Transport);
        assert_eq!(case.script.asked[1].avoid, workers(&[1, 0]), "{reason:?}");
        case.failed(leg(2, 1), reason, FailureKind::Transport);
        assert_eq!(case.script.asked[2].avoid, workers(&[1, 2, 0]));
    }
    // What a worker fails to compute is its own fault, and KV of one that is gone nobody's.
    let mut case = Case::plain(&pairs, &[]);
    case.failed(leg(1, 0), R::Failed, FailureKind::Device);
    assert_eq!(case.script.asked[1].avoid, workers(&[1]));
    let mut case = Case::plain(&pairs, &[]);
    case.tokens(leg(0, 0), 0, 1).input(Input::Lost(key(0)));
    case.ended(leg(1, 0), R::KvLost);
    assert_eq!(case.script.asked[1].avoid, []);
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

#[test]
fn legs_of_later_attempts_stand_in_line_where_the_first_ones_stood() {
    let waited = |case: &Case| -> Vec<u64> {
        let specs = case.effects.iter().filter_map(|effect| match effect {
            Effect::Dispatch { spec, .. } => Some(spec.waited.as_secs()),
            _ => None,
        });
        specs.collect()
    };
    let mut case = Case::plain(&[Ok((0, 1)), Ok((2, 1))], &[3]);
    assert_eq!(waited(&case), [0, 0]);
    case.now += Duration::from_secs(3);
    case.input(Input::Lost(key(0)));
    assert_eq!(waited(&case), [3, 3]);
    case.now += Duration::from_secs(2);
    case.ended(leg(1, 1), R::Refused);
    assert_eq!(waited(&case), [5], "the decode leg alone, elsewhere");
}
