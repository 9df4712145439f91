//! A half of a split request is refused or lost, or the KV between them.

use std::time::Duration;

use tasuki_core::{FailureKind, WorkerId};

use super::{Case, key, leg};
use crate::leg::{LegEndReason as R, LegKind};
use crate::machine::{Input, MachineConfig, OnKvLoss, RetryReason};

#[test]
fn a_refused_decode_leg_is_retargeted_to_another_worker() {
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
fn a_refusal_without_another_worker_is_retried_after_a_pause() {
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
fn a_decode_worker_lost_before_its_first_token_costs_no_prefill() {
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
fn a_decode_worker_lost_after_its_first_token_costs_a_new_attempt() {
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
fn after_its_first_token_a_lost_prefill_worker_is_noticed_by_the_decode_worker() {
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
    let retargeted = || {
        let mut case = Case::plain(&[Ok((0, 1)), Ok((0, 2))], &[2]);
        case.tokens(leg(0, 0), 0, 1).input(Input::Lost(key(1)));
        case
    };
    // The lease ran out.
    let mut case = retargeted();
    case.failed(leg(0, 0), R::Failed, FailureKind::Transport);
    assert_eq!(case.aborts(), [(2, 0)]);
    assert_eq!(case.dispatched()[0], (0, 1, LegKind::Prefill, 1));
    assert_eq!(case.retries(), [RetryReason::KvLost]);
    assert_eq!(case.script.asked[1].avoid, []);
    // The prefill worker itself failed.
    let mut case = retargeted();
    case.failed(leg(0, 0), R::Failed, FailureKind::Device);
    assert_eq!(case.aborts(), [(2, 0)]);
    assert_eq!(case.retries(), [RetryReason::Failed(FailureKind::Device)]);
    assert_eq!(case.script.asked[1].avoid, [WorkerId(0)]);
}

#[test]
fn a_returned_request_goes_on_after_its_last_token() {
    let mut case = Case::plain(&[Ok((0, 1)), Ok((0, 1))], &[]);
    case.tokens(leg(0, 0), 0, 1).tokens(leg(1, 0), 0, 4);
    case.ended(leg(0, 0), R::HandedOff);
    case.ended(leg(1, 0), R::Returned);
    assert_eq!(
        case.dispatched(),
        [(0, 1, LegKind::Prefill, 4), (1, 1, LegKind::Decode, 4)]
    );
}
