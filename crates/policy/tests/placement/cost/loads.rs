//! Loads, links and cached prefixes: which of the workers that could serve a request gets it.

use std::collections::HashMap;

use tasuki_core::{CostModel, ReportedLoad, RequestView, Role, Warm, WorkerId, WorkerView};
use tasuki_policy::{Choosing, Policy};

use super::{choose, index, pair, strict_pair};
use crate::fleets::worker;

#[test]
fn the_kv_of_sequences_that_wait_counts_like_that_of_sequences_that_decode() {
    let cost_s = |load: ReportedLoad| {
        let mut worker = worker(0, Role::Mixed);
        worker.load = ReportedLoad {
            free_blocks: 10_000,
            ..load
        };
        let placed = choose(&[worker], &RequestView::new(500, 200), false, 0);
        placed.expect("a placement").cost_s
    };
    let decode = cost_s(ReportedLoad {
        running_sequences: 40,
        running_kv_tokens: 40_000,
        ..ReportedLoad::default()
    });
    let wait = |waiting_kv_tokens| {
        cost_s(ReportedLoad {
            waiting_sequences: 40,
            waiting_kv_tokens,
            ..ReportedLoad::default()
        })
    };
    assert_eq!(wait(Some(40_000)), decode);
    assert!(wait(Some(80_000)) > decode);
    assert_eq!(
        wait(None),
        wait(Some(0)),
        "as of workers that do not report it"
    );
}

#[test]
fn a_placement_says_what_it_compared() {
    let mut workers = [worker(0, Role::Decode), worker(1, Role::Prefill)];
    let explain = |workers: &[WorkerView]| {
        let model = CostModel::default();
        let how = Choosing {
            model: &model,
            strict_roles: false,
            tie: 0,
        };
        let placed = index(workers).place(&RequestView::new(500, 200), how);
        placed.unwrap().why.unwrap()
    };
    let why = explain(&workers);
    assert!(why.is_split && why.chosen.handoff_s > 0.0, "{why:?}");
    let text = why.to_string();
    assert!(
        text.starts_with("split ") && text.contains("; colocated "),
        "{text}"
    );
    workers[0].load.running_sequences = 40;
    workers[0].load.running_kv_tokens = 40_000;
    let why = explain(&workers);
    assert!(!why.is_split && why.chosen.prefill_s > 0.0, "{why:?}");
    assert!(why.to_string().starts_with("colocated "), "{why}");
}

#[test]
fn a_long_prompt_goes_where_it_stalls_the_fewest() {
    let mut workers = [worker(0, Role::Mixed), worker(1, Role::Mixed)];
    workers[0].load.running_sequences = 6;
    workers[1].load.running_sequences = 5;
    workers[1].load.running_kv_tokens = 200_000;
    assert_eq!(pair(&workers, &RequestView::new(4_000, 2)).0, 1);
}

#[test]
fn equally_good_workers_share_requests() {
    let roles = [
        Role::Prefill,
        Role::Prefill,
        Role::Decode,
        Role::Decode,
        Role::Decode,
    ];
    let workers: Vec<WorkerView> = (0..)
        .zip(roles)
        .map(|(id, role)| worker(id, role))
        .collect();
    let mut seen = HashMap::new();
    for tie in 0..600 {
        let placement = choose(&workers, &RequestView::new(100, 10), true, tie).unwrap();
        let pair = (placement.prefill.0, placement.decode.0);
        *seen.entry(pair).or_insert(0) += 1;
    }
    assert_eq!(seen.len(), 6);
    assert!(
        seen.values().all(|times| (60..140).contains(times)),
        "{seen:?}"
    );
    let mixed = [worker(0, Role::Mixed), worker(1, Role::Mixed)];
    let placements =
        (0..100).map(|tie| choose(&mixed, &RequestView::new(100, 10), false, tie).unwrap());
    let (first, second): (Vec<_>, Vec<_>) = placements
        .inspect(|placement| assert!(placement.is_whole()))
        .partition(|placement| placement.prefill.0 == 0);
    assert!(first.len().abs_diff(second.len()) < 30);
}

#[test]
fn requests_in_flight_spread_evenly() {
    let mut workers = [
        worker(0, Role::Prefill),
        worker(1, Role::Decode),
        worker(2, Role::Decode),
    ];
    for tie in 0..16 {
        let request = RequestView::new(100, 10);
        let placement = choose(&workers, &request, true, tie).unwrap();
        workers[placement.decode.0 as usize].outstanding.sequences += 1;
    }
    let got = [1, 2].map(|at: usize| workers[at].outstanding.sequences);
    assert_eq!(got, [8, 8]);
}

#[test]
fn of_equal_pairs_one_within_a_machine_is_taken() {
    let roles = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
    let mut workers: Vec<WorkerView> = (0..)
        .zip(roles)
        .map(|(id, role)| worker(id, role))
        .collect();
    for (worker, machine) in workers.iter_mut().zip([1, 2, 3, 2]) {
        worker.machine = machine;
    }
    let mut model = CostModel::default();
    for _ in 0..50 {
        model.links.learn(true, 500, 1e-3);
        model.links.learn(false, 500, 50e-3);
    }
    let index = index(&workers);
    for tie in 0..20 {
        let how = Choosing {
            model: &model,
            strict_roles: true,
            tie,
        };
        let placement = index.place(&RequestView::new(500, 100), how).unwrap();
        assert_eq!((placement.prefill.0, placement.decode.0), (1, 3));
        let next = index.place_decode(&RequestView::new(500, 100), WorkerId(1), &[], how);
        assert_eq!(next, Some(WorkerId(3)));
    }
}

#[test]
fn a_heavy_prefill_backlog_sends_the_prefill_elsewhere() {
    let mut workers = [worker(0, Role::Mixed), worker(1, Role::Mixed)];
    workers[0].load.waiting_prefill_tokens = 1_500;
    assert_eq!(pair(&workers, &RequestView::new(1_000, 200)), (1, 1));
}

#[test]
fn a_prompt_does_not_count_to_stall_those_whose_prompts_wait_elsewhere() {
    let mut workers = [worker(0, Role::Mixed), worker(1, Role::Mixed)];
    workers[0].load.waiting_prefill_tokens = 20_000;
    workers[1].load.waiting_sequences = 40;
    workers[1].load.awaited_sequences = 40;
    let request = RequestView::new(500, 2);
    assert_eq!(pair(&workers, &request).0, 1);
    // Those that decode, or whose prompts come before it, are stalled.
    workers[1].load.awaited_sequences = 0;
    assert_eq!(pair(&workers, &request).0, 0);
    workers[1].outstanding.sequences = 9;
    workers[1].outstanding.awaited_sequences = 9;
    workers[1].load.waiting_sequences = 0;
    assert_eq!(pair(&workers, &request).0, 1);
}

#[test]
fn who_has_waited_for_a_worker_with_a_backlog_goes_to_one_where_it_stalls_others() {
    let mut workers = [worker(0, Role::Mixed), worker(1, Role::Mixed)];
    workers[0].load.waiting_prefill_tokens = 23_500;
    workers[1].load.running_sequences = 50;
    let after = |waited| {
        let new = RequestView::new(500, 2);
        pair(&workers, &RequestView { waited, ..new }).0
    };
    assert_eq!([false, true].map(after), [0, 1]);
}

#[test]
fn a_warm_prefix_attracts() {
    let workers = [
        worker(0, Role::Prefill),
        worker(1, Role::Prefill),
        worker(2, Role::Decode),
    ];
    let mut request = RequestView::new(1_000, 10);
    request.warm = vec![Warm {
        worker: WorkerId(1),
        tokens: 900,
    }];
    assert_eq!(strict_pair(&workers, &request), (1, 2));
    request.warm = vec![Warm {
        worker: WorkerId(2),
        tokens: 900,
    }];
    let cached = pair(&workers, &request);
    assert_eq!(cached, (2, 2), "also whole on a decode worker");
}

#[test]
fn both_halves_of_a_pair_may_be_warm() {
    let workers = [
        worker(0, Role::Prefill),
        worker(1, Role::Prefill),
        worker(2, Role::Decode),
        worker(3, Role::Decode),
    ];
    let warm = |worker, tokens| Warm {
        worker: WorkerId(worker),
        tokens,
    };
    let mut request = RequestView::new(1_000, 10);
    request.warm = vec![warm(1, 600), warm(2, 900)];
    assert_eq!(strict_pair(&workers, &request), (1, 2));
    request.warm = vec![warm(0, 600), warm(3, 900)];
    assert_eq!(strict_pair(&workers, &request), (0, 3));
}
