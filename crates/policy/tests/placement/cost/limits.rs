//! What a worker cannot or shall not do, and the errors where none is left.

use tasuki_core::{CostModel, HandoffKind, Health, RequestView, Role, WorkerId, WorkerView};
use tasuki_policy::{Choosing, NoPlacement, Policy};

use super::{choose, index, pair};
use crate::fleets::worker;

#[test]
fn too_large_and_down_are_different_answers() {
    let mut workers = [worker(0, Role::Mixed), worker(1, Role::Mixed)];
    workers[1].capacity.max_model_len_tokens = 100;
    workers[0].health = Health::Suspect;
    let huge = choose(&workers, &RequestView::new(4_000, 97), false, 0);
    assert_eq!(
        huge,
        Err(NoPlacement::TooLarge {
            tokens: 4_097,
            limit_tokens: 4_096
        })
    );
    assert!(!huge.unwrap_err().may_pass());
    let large = choose(&workers, &RequestView::new(100, 1), false, 0);
    assert_eq!(
        large,
        Err(NoPlacement::NoneLargeEnough {
            tokens: 101,
            limit_tokens: 100
        })
    );
    assert!(large.unwrap_err().may_pass());
    assert_eq!(
        choose(&[], &RequestView::new(1, 1), false, 0),
        Err(NoPlacement::NoWorker)
    );
}

fn of_choices(choices: u32) -> RequestView {
    RequestView {
        choices,
        ..RequestView::new(100, 10)
    }
}

#[test]
fn a_worker_gets_no_more_choices_than_it_generates_at_once() {
    let mut workers = [worker(0, Role::Mixed), worker(1, Role::Mixed)];
    workers[0].capacity.max_sequences = 64;
    workers[1].capacity.max_sequences = 256;
    workers[1].load.waiting_prefill_tokens = 100_000;
    assert_eq!(pair(&workers, &of_choices(64)), (0, 0));
    assert_eq!(pair(&workers, &of_choices(65)), (1, 1));
    // Nor is it given one half of such a request, whatever its role.
    for (narrow, wide) in [(Role::Prefill, Role::Decode), (Role::Decode, Role::Prefill)] {
        (workers[0].role, workers[1].role) = (narrow, wide);
        workers[1].load.waiting_prefill_tokens = 0;
        assert_eq!(pair(&workers, &of_choices(65)), (1, 1));
    }
    let how = Choosing {
        model: &CostModel::default(),
        strict_roles: false,
        tie: 0,
    };
    let decode_for = |n| index(&workers).place_decode(&of_choices(n), WorkerId(1), &[], how);
    assert_eq!(decode_for(64), Some(WorkerId(0)));
    assert_eq!(decode_for(65), None);
}

#[test]
fn too_many_choices_and_a_wide_worker_that_is_down_are_different_answers() {
    let mut workers = [worker(0, Role::Mixed), worker(1, Role::Mixed)];
    workers[0].capacity.max_sequences = 64;
    workers[1].capacity.max_sequences = 128;
    workers[1].health = Health::Down;
    let never = choose(&workers, &of_choices(129), false, 0).unwrap_err();
    assert_eq!(
        never,
        NoPlacement::TooManyChoices {
            choices: 129,
            tokens: 110,
            limit_choices: 128
        }
    );
    assert!(!never.may_pass());
    let later = choose(&workers, &of_choices(128), false, 0).unwrap_err();
    assert_eq!(
        later,
        NoPlacement::NoneForChoices {
            choices: 128,
            tokens: 110,
            limit_choices: 64
        }
    );
    assert!(later.may_pass());
    // The widest worker takes short requests alone.
    workers[1].capacity.max_model_len_tokens = 100;
    let never = choose(&workers, &of_choices(65), false, 0).unwrap_err();
    assert_eq!(
        never,
        NoPlacement::TooManyChoices {
            choices: 65,
            tokens: 110,
            limit_choices: 64
        }
    );
}

#[test]
fn with_strict_roles_the_limit_of_a_role_is_the_reason() {
    let mut workers = [worker(0, Role::Prefill), worker(1, Role::Decode)];
    for (narrow, limit_choices) in [(0, 64), (1, 32)] {
        for worker in &mut workers {
            worker.capacity.max_sequences = 256;
        }
        workers[narrow].capacity.max_sequences = limit_choices;
        assert!(choose(&workers, &of_choices(limit_choices), true, 0).is_ok());
        let never = choose(&workers, &of_choices(100), true, 0).unwrap_err();
        assert_eq!(
            never,
            NoPlacement::TooManyChoices {
                choices: 100,
                tokens: 110,
                limit_choices
            }
        );
    }
}

#[test]
fn avoided_workers_serve_only_where_no_other_can() {
    let workers = [worker(0, Role::Mixed), worker(1, Role::Mixed)];
    let mut request = RequestView::new(100, 10);
    request.avoid = vec![WorkerId(0)];
    assert_eq!(pair(&workers, &request), (1, 1));
    request.avoid = vec![WorkerId(0), WorkerId(1)];
    assert!(choose(&workers, &request, false, 0).is_ok());
}

/// Where not all of them can be avoided, those that failed last are.
#[test]
fn one_half_that_cannot_be_avoided_does_not_bring_the_other_back() {
    for (roles, pair) in [
        ([Role::Prefill, Role::Decode, Role::Prefill], (2, 1)),
        ([Role::Prefill, Role::Decode, Role::Decode], (0, 2)),
    ] {
        let mut workers = [0, 1, 2].map(|id| worker(id, roles[id as usize]));
        workers[2].load.waiting_prefill_tokens = 10_000;
        workers[2].load.running_sequences = 50;
        for avoid in [[0, 1], [1, 0]] {
            let request = RequestView {
                avoid: avoid.map(WorkerId).to_vec(),
                ..RequestView::new(100, 10)
            };
            let placed = choose(&workers, &request, true, 0).expect("a pair");
            assert_eq!((placed.prefill.0, placed.decode.0), pair, "{avoid:?}");
        }
    }
    let workers = [0, 1, 2].map(|id| worker(id, Role::Mixed));
    let request = RequestView {
        avoid: [2, 0, 1].map(WorkerId).to_vec(),
        ..RequestView::new(100, 10)
    };
    for tie in 0..8 {
        let placed = choose(&workers, &request, false, tie).expect("a worker");
        assert_eq!(placed.prefill, WorkerId(2), "it failed first");
    }
}

#[test]
fn kv_moves_within_a_domain_by_one_kind_of_handoff() {
    let pair_of = |change: fn(&mut WorkerView), choices| {
        let mut workers = [worker(0, Role::Prefill), worker(1, Role::Decode)];
        change(&mut workers[1]);
        let request = RequestView {
            choices,
            ..RequestView::new(100, 10)
        };
        let split = choose(&workers, &request, true, 0);
        split.is_ok_and(|placement| !placement.is_whole())
    };
    assert!(pair_of(|_| {}, 3));
    assert!(!pair_of(|w| w.domain.backend = "another", 1));
    assert!(!pair_of(
        |w| w.capabilities.handoff = HandoffKind::Ticket,
        1
    ));
    assert!(pair_of(|w| w.capabilities.splits_choices = false, 1));
    assert!(!pair_of(|w| w.capabilities.splits_choices = false, 3));
    let mut alone = [worker(0, Role::Prefill), worker(1, Role::Decode)];
    for worker in &mut alone {
        worker.capabilities.handoff = HandoffKind::None;
    }
    let (prefill, decode) = pair(&alone, &RequestView::new(100, 10));
    assert_eq!(prefill, decode);
}

#[test]
fn what_was_begun_goes_to_workers_that_resume() {
    let mut workers = [worker(0, Role::Mixed), worker(1, Role::Mixed)];
    workers[0].capabilities.resumes = false;
    let begun = RequestView {
        resumed_tokens: 5,
        ..RequestView::new(100, 10)
    };
    for tie in 0..4 {
        let placement = choose(&workers, &begun, false, tie).unwrap();
        assert_eq!((placement.prefill.0, placement.decode.0), (1, 1));
    }
    workers[1].health = Health::Down;
    let waits = choose(&workers, &begun, false, 0).unwrap_err();
    assert!(waits.may_pass(), "{waits}");
    workers[1].capabilities.resumes = false;
    let never = choose(&workers, &begun, false, 0).unwrap_err();
    assert_eq!(never, NoPlacement::CannotResume);
    assert!(!never.may_pass());
}
