//! What the client gets, and what it stops.

use super::{Case, key, leg};
use crate::generation::{Event, ServeError};
use crate::leg::{LegEndReason as R, Output};
use crate::machine::{Effect, Input, MachineConfig};
use crate::sampling::TokenLogprob;

#[test]
fn a_rejection_reaches_the_client_with_the_workers_message() {
    let mut case = Case::plain(&[Ok((0, 1))], &[]);
    case.ended(leg(0, 0), R::Rejected);
    let Some(ServeError::Rejected { message, .. }) = case.error() else {
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
    assert!(case.effects.is_empty(), "held until prefill has output");
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
fn output_of_an_old_attempt_is_ignored() {
    let mut case = Case::plain(&[Ok((0, 0)), Ok((1, 1))], &[]);
    case.ended(leg(0, 0), R::Failed);
    case.tokens(leg(0, 0), 0, 1);
    assert!(case.effects.is_empty());
    case.tokens(leg(0, 1), 0, 1);
    assert!(case.effects.is_empty(), "from a worker without the leg");
    case.tokens(leg(1, 1), 0, 1);
    assert_eq!(case.effects.len(), 1);
}
