//! What a worker cannot or shall not do, and the errors where none is left.

use tasuki_core::{HandoffKind, Health, RequestView, Role, WorkerId, WorkerView};
use tasuki_policy::NoPlacement;

use super::{choose, pair};
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

#[test]
fn avoided_workers_serve_only_where_no_other_can() {
    let workers = [worker(0, Role::Mixed), worker(1, Role::Mixed)];
    let mut request = RequestView::new(100, 10);
    request.avoid = vec![WorkerId(0)];
    assert_eq!(pair(&workers, &request), (1, 1));
    request.avoid = vec![WorkerId(0), WorkerId(1)];
    assert!(choose(&workers, &request, false, 0).is_ok());
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
