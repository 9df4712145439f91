//! Who gets a new request, by which legs.

use tasuki_core::{Identity, ModelId};
use tasuki_policy::NoPlacement;

use super::{Case, OTHER_WEIGHTS, key, leg};
use crate::generation::ServeError;
use crate::leg::{Handoff, LegKind};
use crate::machine::{Effect, Input};

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
    let Some(ServeError::Rejected { message, .. }) = case.error() else {
        panic!("{:?}", case.error())
    };
    assert!(message.contains("18") && message.contains("16"));
}

#[test]
fn too_many_choices_are_the_clients_error_with_value_limit_and_remedy() {
    let too_many = NoPlacement::TooManyChoices {
        choices: 100,
        tokens: 18,
        limit_choices: 64,
    };
    let case = Case::plain(&[Err(too_many)], &[]);
    assert_eq!(case.dispatched(), []);
    let Some(ServeError::Rejected { message, .. }) = case.error() else {
        panic!("{:?}", case.error())
    };
    assert!(message.starts_with("n is 100, "), "{message}");
    assert!(message.contains("lower n to 64"), "{message}");
}
