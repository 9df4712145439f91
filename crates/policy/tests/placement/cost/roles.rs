//! Roles and costs: who is asked for which half, and whether a request is split.

use tasuki_core::{CostModel, HandoffKind, Health, Indivisible, RequestView, Role, WorkerView};
use tasuki_policy::{Choosing, NoPlacement, Policy};

use super::{choose, index, pair, strict_pair};
use crate::fleets::{domain, worker};

#[test]
fn with_strict_roles_a_worker_does_nothing_else() {
    let mut workers = [worker(0, Role::Decode), worker(1, Role::Prefill)];
    for busy in [0, 50] {
        workers[0].load.running_sequences = busy;
        let request = RequestView::new(100, 10);
        assert_eq!(strict_pair(&workers, &request), (1, 0));
    }
}

#[test]
fn among_idle_workers_roles_decide_where_a_handoff_costs_less_than_they_count() {
    let workers = [worker(0, Role::Decode), worker(1, Role::Prefill)];
    assert_eq!(pair(&workers, &RequestView::new(500, 200)), (1, 0));
    // 5% of two steps are less than a handoff.
    let (prefill, decode) = pair(&workers, &RequestView::new(100, 3));
    assert_eq!(prefill, decode);
}

#[test]
fn the_cost_outweighs_a_role() {
    let request = RequestView::new(500, 200);
    let mut workers = [worker(0, Role::Decode), worker(1, Role::Prefill)];
    workers[0].load.running_sequences = 40;
    workers[0].load.running_kv_tokens = 40_000;
    assert_eq!(
        pair(&workers, &request),
        (1, 1),
        "decodes where it disturbs nobody"
    );
    let mut workers = [worker(0, Role::Decode), worker(1, Role::Prefill)];
    workers[1].load.waiting_prefill_tokens = 50_000;
    assert_eq!(pair(&workers, &request), (0, 0), "no queue is there");
}

#[test]
fn over_a_slow_link_nothing_is_split_and_the_reason_is_said() {
    let mut workers = [worker(0, Role::Decode), worker(1, Role::Prefill)];
    let request = RequestView::new(500, 200);
    let split = choose(&workers, &request, false, 0).expect("a placement");
    assert!(split.why.is_some_and(|why| why.is_split));
    for same_machine in [true, false] {
        workers[0].machine = 1;
        workers[1].machine = if same_machine { 1 } else { 2 };
        let mut model = CostModel::default();
        for _ in 0..50 {
            model.links.learn(same_machine, 500, 3.0);
        }
        let how = Choosing {
            model: &model,
            strict_roles: false,
            tie: 0,
        };
        let one = index(&workers).place(&request, how).expect("a placement");
        assert!(one.is_whole(), "{one:?}");
        let told = one.why.expect("costs were compared").to_string();
        let (what, split) = told.split_once("; split ").expect(&told);
        assert!(what.starts_with("colocated "), "{told}");
        assert_eq!(split.starts_with("at least "), same_machine, "{told}");
    }
}

#[test]
fn one_token_is_not_split() {
    let workers = [worker(0, Role::Decode), worker(1, Role::Prefill)];
    assert_eq!(pair(&workers, &RequestView::new(100, 1)), (1, 1));
    assert_eq!(strict_pair(&workers, &RequestView::new(100, 1)), (1, 1));
}

#[test]
fn the_last_worker_serves_everything() {
    for role in [Role::Prefill, Role::Decode, Role::Mixed] {
        let mut workers = [worker(0, role), worker(1, Role::Prefill)];
        workers[1].health = Health::Down;
        assert_eq!(pair(&workers, &RequestView::new(100, 10)), (0, 0));
    }
}

#[test]
fn strict_roles_do_not_yield() {
    let only_decode = [worker(0, Role::Decode)];
    let request = RequestView::new(100, 10);
    assert_eq!(
        choose(&only_decode, &request, true, 0),
        Err(NoPlacement::NoRole {
            role: Role::Prefill
        })
    );
    let only_prefill = [worker(0, Role::Prefill)];
    assert_eq!(
        choose(&only_prefill, &request, true, 0),
        Err(NoPlacement::NoRole { role: Role::Decode })
    );
}

#[test]
fn a_pair_of_another_identity_is_worked_around_unless_roles_are_strict() {
    let mut workers = [worker(0, Role::Prefill), worker(1, Role::Decode)];
    workers[1].domain = domain(2);
    let request = RequestView::new(100, 10);
    let (prefill, decode) = pair(&workers, &request);
    assert_eq!(prefill, decode);
    assert_eq!(
        choose(&workers, &request, true, 0),
        Err(NoPlacement::NoPair)
    );
}

#[test]
fn a_request_without_a_handoff_by_ticket_is_served_by_one_worker() {
    let mut workers = [worker(0, Role::Prefill), worker(1, Role::Decode)];
    for worker in &mut workers {
        worker.capabilities.handoff = HandoffKind::Ticket;
    }
    let request = RequestView {
        indivisible: Some(Indivisible::ForcedCall),
        ..RequestView::new(100, 10)
    };
    let (prefill, decode) = pair(&workers, &request);
    assert_eq!(prefill, decode);
    let refused = |workers: &[WorkerView]| choose(workers, &request, true, 0).unwrap_err();
    let error = refused(&workers);
    assert!(!error.may_pass());
    assert!(
        error
            .to_string()
            .contains("requests with a tool_choice that forces a call are not split")
    );
    // One that may serve it alone comes back.
    let mut mixed = worker(2, Role::Mixed);
    mixed.health = Health::Down;
    let [prefill, decode] = workers.clone();
    let mut all = [prefill, decode, mixed];
    assert!(refused(&all).may_pass());
    all[2].health = Health::Ready;
    let placement = choose(&all, &request, true, 0).unwrap();
    assert_eq!((placement.prefill.0, placement.decode.0), (2, 2));
    // Other handoffs need no ticket.
    for worker in &mut workers {
        worker.capabilities.handoff = HandoffKind::Concurrent;
    }
    assert!(choose(&workers, &request, true, 0).is_ok());
}

#[test]
fn whole_on_request() {
    let workers = [worker(0, Role::Prefill), worker(1, Role::Decode)];
    let mut request = RequestView::new(100, 10);
    request.keep_whole = true;
    let (prefill, decode) = pair(&workers, &request);
    assert_eq!(prefill, decode);
    let placement = choose(&workers, &request, true, 0).unwrap();
    assert_eq!((placement.prefill.0, placement.decode.0), (0, 1));
}
