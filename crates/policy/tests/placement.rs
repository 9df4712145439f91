//! What must hold for every fleet and every request.

use std::collections::HashMap;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use tasuki_core::{
    Capabilities, Capacity, CostModel, HandoffKind, Health, Identity, KvDomain, Outstanding,
    ReportedLoad, RequestView, Role, Warm, WorkerId, WorkerView,
};
use tasuki_policy::{NoPlacement, PolicyConfig, place, place_decode};

fn domain(identity: u8) -> KvDomain {
    KvDomain {
        backend: "test",
        identity: Identity([identity; 16]),
    }
}

fn worker(id: u32, role: Role) -> WorkerView {
    WorkerView {
        id: WorkerId(id),
        domain: domain(1),
        capabilities: Capabilities::default(),
        role,
        health: Health::Ready,
        capacity: Capacity {
            max_model_len_tokens: 4_096,
            block_size_tokens: 16,
            total_blocks: 1_000,
        },
        load: ReportedLoad {
            free_blocks: 1_000,
            prefill_tokens_per_s: 1_000.0,
            single_step_s: 0.02,
            ..ReportedLoad::default()
        },
        outstanding: Outstanding::default(),
    }
}

fn strict() -> PolicyConfig {
    PolicyConfig {
        strict_roles: true,
        ..PolicyConfig::default()
    }
}

fn pair(workers: &[WorkerView], request: &RequestView) -> (u32, u32) {
    let placement = place(workers, request, &PolicyConfig::default(), 0).expect("a placement");
    (placement.prefill.0, placement.decode.0)
}

#[test]
fn roles_decide_who_does_what() {
    let workers = [worker(0, Role::Decode), worker(1, Role::Prefill)];
    assert_eq!(pair(&workers, &RequestView::new(100, 10)), (1, 0));
}

#[test]
fn one_token_is_not_split() {
    let workers = [worker(0, Role::Decode), worker(1, Role::Prefill)];
    assert_eq!(pair(&workers, &RequestView::new(100, 1)), (1, 1));
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
        place(&only_decode, &request, &strict(), 0),
        Err(NoPlacement::NoRole {
            role: Role::Prefill
        })
    );
    let only_prefill = [worker(0, Role::Prefill)];
    assert_eq!(
        place(&only_prefill, &request, &strict(), 0),
        Err(NoPlacement::NoRole { role: Role::Decode })
    );
}

#[test]
fn idle_mixed_workers_keep_requests_whole_and_take_turns() {
    let workers = [worker(0, Role::Mixed), worker(1, Role::Mixed)];
    let request = RequestView::new(100, 10);
    let mut seen = Vec::new();
    for tie in 0..4 {
        let placement = place(&workers, &request, &PolicyConfig::default(), tie).unwrap();
        assert!(placement.is_whole());
        seen.push(placement.prefill.0);
    }
    assert_eq!(seen, [0, 1, 0, 1]);
}

#[test]
fn equal_pairs_take_turns_and_so_do_their_halves() {
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
    for tie in 0..12 {
        let request = RequestView::new(100, 10);
        let placement = place(&workers, &request, &PolicyConfig::default(), tie).unwrap();
        *seen
            .entry((placement.prefill.0, placement.decode.0))
            .or_insert(0) += 1;
    }
    assert_eq!(seen.len(), 6);
    assert!(seen.values().all(|times| *times == 2), "{seen:?}");
}

#[test]
fn a_worker_that_measured_nothing_yet_is_not_left_out() {
    for (busy, idle) in [(1, 2), (2, 1)] {
        let mut workers = [
            worker(0, Role::Prefill),
            worker(1, Role::Decode),
            worker(2, Role::Decode),
        ];
        workers[busy].load.single_step_s = 0.001;
        workers[busy].load.running_requests = 1;
        workers[idle].load.single_step_s = 0.0;
        let chosen = pair(&workers, &RequestView::new(100, 10));
        assert_eq!(chosen, (0, idle as u32));
    }
}

#[test]
fn requests_spread_over_workers_that_measure_alike() {
    let mut workers = [
        worker(0, Role::Prefill),
        worker(1, Role::Decode),
        worker(2, Role::Decode),
    ];
    workers[1].load.single_step_s = 0.011;
    workers[2].load.single_step_s = 0.009;
    for tie in 0..16 {
        let request = RequestView::new(100, 10);
        let placement = place(&workers, &request, &PolicyConfig::default(), tie).unwrap();
        workers[placement.decode.0 as usize].outstanding.requests += 1;
    }
    let got = [
        workers[1].outstanding.requests,
        workers[2].outstanding.requests,
    ];
    assert_eq!(got, [8, 8]);
}

#[test]
fn a_heavy_prefill_backlog_sends_the_prefill_elsewhere() {
    // 0 decodes fast but has prompts waiting; 1 is idle but decodes slowly.
    let mut workers = [worker(0, Role::Mixed), worker(1, Role::Mixed)];
    workers[0].load.waiting_prefill_tokens = 1_500;
    workers[1].load.single_step_s = 0.5;
    assert_eq!(pair(&workers, &RequestView::new(1_000, 200)), (1, 0));
}

#[test]
fn a_mixed_worker_decodes_while_few_prompts_wait_there() {
    let mut workers = [worker(0, Role::Mixed), worker(1, Role::Decode)];
    workers[0].load.running_requests = 10;
    workers[1].load.running_requests = 20;
    for (waiting_tokens, decode) in [(0, 0), (100, 0), (10_000, 1)] {
        workers[0].load.waiting_prefill_tokens = waiting_tokens;
        assert_eq!(pair(&workers, &RequestView::new(500, 200)), (0, decode));
    }
}

#[test]
fn too_large_is_told_from_down() {
    let mut workers = [worker(0, Role::Mixed), worker(1, Role::Mixed)];
    workers[1].capacity.max_model_len_tokens = 100;
    workers[0].health = Health::Suspect;
    let config = PolicyConfig::default();
    let huge = place(&workers, &RequestView::new(4_000, 97), &config, 0);
    assert_eq!(
        huge,
        Err(NoPlacement::TooLarge {
            tokens: 4_097,
            limit_tokens: 4_096
        })
    );
    assert!(!huge.unwrap_err().may_pass());
    let large = place(&workers, &RequestView::new(100, 1), &config, 0);
    assert_eq!(
        large,
        Err(NoPlacement::NoneLargeEnough {
            tokens: 101,
            limit_tokens: 100
        })
    );
    assert!(large.unwrap_err().may_pass());
    assert_eq!(
        place(&[], &RequestView::new(1, 1), &config, 0),
        Err(NoPlacement::NoWorker)
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
        place(&workers, &request, &strict(), 0),
        Err(NoPlacement::NoPair)
    );
}

#[test]
fn whole_on_request() {
    let workers = [worker(0, Role::Prefill), worker(1, Role::Decode)];
    let mut request = RequestView::new(100, 10);
    request.keep_whole = true;
    let (prefill, decode) = pair(&workers, &request);
    assert_eq!(prefill, decode);
    let placement = place(&workers, &request, &strict(), 0).unwrap();
    assert_eq!((placement.prefill.0, placement.decode.0), (0, 1));
}

#[test]
fn the_avoided_serve_only_when_nobody_else_can() {
    let workers = [worker(0, Role::Mixed), worker(1, Role::Mixed)];
    let mut request = RequestView::new(100, 10);
    request.avoid = vec![WorkerId(0)];
    assert_eq!(pair(&workers, &request), (1, 1));
    request.avoid = vec![WorkerId(0), WorkerId(1)];
    assert!(place(&workers, &request, &PolicyConfig::default(), 0).is_ok());
}

#[test]
fn a_warm_prefix_attracts() {
    let workers = [
        worker(0, Role::Prefill),
        worker(1, Role::Prefill),
        worker(2, Role::Decode),
    ];
    let mut request = RequestView::new(1_000, 10);
    request.warm = Some(Warm {
        worker: WorkerId(1),
        tokens: 900,
    });
    assert_eq!(pair(&workers, &request), (1, 2));
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
        let (prefill, decode) = pair(&workers, &request);
        prefill != decode
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
        let placement = place(&workers, &begun, &PolicyConfig::default(), tie).unwrap();
        assert_eq!((placement.prefill.0, placement.decode.0), (1, 1));
    }
    workers[1].health = Health::Down;
    let waits = place(&workers, &begun, &PolicyConfig::default(), 0).unwrap_err();
    assert!(waits.may_pass(), "{waits}");
    workers[1].capabilities.resumes = false;
    let never = place(&workers, &begun, &PolicyConfig::default(), 0).unwrap_err();
    assert_eq!(never, NoPlacement::CannotResume);
    assert!(!never.may_pass());
}

fn any_role() -> impl Strategy<Value = Role> {
    prop_oneof![Just(Role::Prefill), Just(Role::Decode), Just(Role::Mixed)]
}

fn any_health() -> impl Strategy<Value = Health> {
    prop_oneof![4 => Just(Health::Ready), 1 => Just(Health::Suspect), 1 => Just(Health::Down)]
}

fn any_worker(id: u32) -> impl Strategy<Value = WorkerView> {
    let load = (
        0..20u32,
        0..20u32,
        0..5_000u64,
        0..1_000u32,
        0..3u32,
        0..3u32,
    );
    let rest = (0..3_000u64, 0..5u32, 0..500u64);
    (any_role(), any_health(), 0..3u8, 0..3u32, load, rest).prop_map(
        move |(role, health, identity, size, load, rest)| {
            let mut worker = worker(id, role);
            worker.health = health;
            worker.domain = domain(identity / 2);
            worker.capacity.max_model_len_tokens = 1_024 << size;
            worker.load = ReportedLoad {
                waiting_requests: load.0,
                running_requests: load.1,
                waiting_prefill_tokens: load.2,
                free_blocks: load.3,
                prefill_tokens_per_s: f64::from(load.4) * 700.0,
                single_step_s: f64::from(load.5) * 0.02,
            };
            worker.outstanding = Outstanding {
                prefill_tokens: rest.0,
                requests: rest.1,
                promised_blocks: rest.2,
            };
            worker
        },
    )
}

fn any_fleet() -> impl Strategy<Value = Vec<WorkerView>> {
    (0..7u32).prop_flat_map(|count| (0..count).map(any_worker).collect::<Vec<_>>())
}

fn any_request() -> impl Strategy<Value = RequestView> {
    let avoid = proptest::collection::vec((0..7u32).prop_map(WorkerId), 0..3);
    (1..4_000u32, 1..600u32, 1..4u32, avoid, any::<bool>()).prop_map(
        |(prompt, output, choices, avoid, keep_whole)| RequestView {
            choices,
            avoid,
            keep_whole,
            ..RequestView::new(prompt, output)
        },
    )
}

fn find(workers: &[WorkerView], id: WorkerId) -> &WorkerView {
    workers.iter().find(|w| w.id == id).expect("a known worker")
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: tasuki_searches::count(2_000),
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(tasuki_searches::seed(7)),
        ..ProptestConfig::default()
    })]

    #[test]
    fn only_able_pairs_are_chosen(
        workers in any_fleet(), request in any_request(), is_strict: bool, tie: u64,
    ) {
        let config = PolicyConfig { strict_roles: is_strict, ..PolicyConfig::default() };
        let fits = |w: &&WorkerView| w.health == Health::Ready
            && u64::from(w.capacity.max_model_len_tokens) >= request.total_tokens();
        let able: Vec<&WorkerView> = workers.iter().filter(fits).collect();
        match place(&workers, &request, &config, tie) {
            Ok(placement) => {
                let prefill = find(&workers, placement.prefill);
                let decode = find(&workers, placement.decode);
                prop_assert!(able.contains(&prefill) && able.contains(&decode));
                prop_assert_eq!(prefill.domain, decode.domain);
                prop_assert!(placement.cost_s.is_finite());
                prop_assert!(request.max_tokens > 1 || placement.is_whole());
                if is_strict {
                    prop_assert!(prefill.role.prefills());
                    prop_assert!(request.max_tokens == 1 || decode.role.decodes());
                }
            }
            // Without strict roles one able worker is enough.
            Err(_) => prop_assert!(is_strict || able.is_empty()),
        }
    }

    #[test]
    fn no_allowed_pair_is_cheaper(
        workers in any_fleet(), request in any_request(), tie: u64,
    ) {
        let request = RequestView { avoid: vec![], keep_whole: false, ..request };
        let config = PolicyConfig::default();
        let Ok(placement) = place(&workers, &request, &config, tie) else { return Ok(()); };
        let fits = |w: &&WorkerView| w.health == Health::Ready
            && u64::from(w.capacity.max_model_len_tokens) >= request.total_tokens();
        let able: Vec<&WorkerView> = workers.iter().filter(fits).collect();
        let wanted = |wants: fn(Role) -> bool| {
            let some = able.iter().any(|w| wants(w.role));
            able.iter().copied().filter(move |w| !some || wants(w.role)).collect::<Vec<_>>()
        };
        let model = CostModel::new(config.cost, able.iter().copied());
        for prefill in wanted(Role::prefills) {
            for decode in wanted(Role::decodes) {
                let whole = prefill.id == decode.id;
                if prefill.domain != decode.domain || (request.max_tokens == 1 && !whole) {
                    continue;
                }
                let handoff_s = if whole { 0.0 } else { model.handoff_s(&request) };
                let cost_s = model.first_token_s(prefill, &request)
                    + handoff_s + model.decode_s(decode, &request, whole);
                prop_assert!(placement.cost_s <= cost_s * (1.0 + 1e-8), "{:?}", placement);
            }
        }
    }

    #[test]
    fn the_answer_depends_on_the_arguments_alone(
        workers in any_fleet(), request in any_request(), tie: u64,
    ) {
        let config = PolicyConfig::default();
        prop_assert_eq!(
            place(&workers, &request, &config, tie),
            place(&workers, &request, &config, tie)
        );
    }

    #[test]
    fn an_idle_worker_is_preferred_to_its_busy_twin(
        busy in any_worker(0), request in any_request(), tie: u64,
    ) {
        prop_assume!(busy.load.running_requests + busy.outstanding.requests > 0);
        let mut busy = busy;
        busy.health = Health::Ready;
        busy.role = Role::Mixed;
        busy.capacity.max_model_len_tokens = 1 << 20;
        busy.load.waiting_prefill_tokens += 1;
        let mut idle = busy.clone();
        idle.id = WorkerId(1);
        idle.load = ReportedLoad {
            free_blocks: 1_000,
            prefill_tokens_per_s: busy.load.prefill_tokens_per_s,
            single_step_s: busy.load.single_step_s,
            ..ReportedLoad::default()
        };
        idle.outstanding = Outstanding::default();
        let request = RequestView { avoid: vec![], keep_whole: false, ..request };
        let placement = place(&[busy, idle], &request, &PolicyConfig::default(), tie).unwrap();
        prop_assert_eq!((placement.prefill.0, placement.decode.0), (1, 1));
    }

    #[test]
    fn another_decode_worker_is_able_and_new(
        workers in any_fleet(), request in any_request(), is_strict: bool, tie: u64,
        tried in proptest::collection::vec((0..7u32).prop_map(WorkerId), 0..3),
        prefill in 0..7u32,
    ) {
        let config = PolicyConfig { strict_roles: is_strict, ..PolicyConfig::default() };
        let prefill = WorkerId(prefill);
        if let Some(id) = place_decode(&workers, &request, prefill, &tried, &config, tie) {
            let decode = find(&workers, id);
            prop_assert!(decode.health == Health::Ready);
            prop_assert!(id != prefill && !tried.contains(&id));
            prop_assert_eq!(decode.domain, find(&workers, prefill).domain);
            prop_assert!(!is_strict || decode.role.decodes());
        }
    }
}
