//! What must hold for every fleet and every request.

use std::collections::HashMap;
use std::sync::LazyLock;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use tasuki_core::{
    Capabilities, Capacity, CostModel, HandoffKind, HardwareClass, Health, Identity, KvDomain,
    Load, Outstanding, ReportedLoad, RequestView, Role, StepSample, Warm, WorkerId, WorkerView,
};
use tasuki_policy::{Choosing, NoPlacement, Placement, place, place_decode};

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
        hardware: 0,
        machine: 0,
        health: Health::Ready,
        capacity: Capacity {
            max_model_len_tokens: 4_096,
            block_size_tokens: 16,
            total_blocks: 1_000,
        },
        load: ReportedLoad {
            free_blocks: 1_000,
            ..ReportedLoad::default()
        },
        outstanding: Outstanding::default(),
    }
}

/// The policy's answer, with nothing measured yet.
fn choose(
    workers: &[WorkerView],
    request: &RequestView,
    strict_roles: bool,
    tie: u64,
) -> Result<Placement, NoPlacement> {
    let model = CostModel::default();
    let views: Vec<&WorkerView> = workers.iter().collect();
    let how = Choosing {
        model: &model,
        strict_roles,
        tie,
    };
    place(&views, request, how)
}

fn pair(workers: &[WorkerView], request: &RequestView) -> (u32, u32) {
    let placement = choose(workers, request, false, 0).expect("a placement");
    (placement.prefill.0, placement.decode.0)
}

fn strict_pair(workers: &[WorkerView], request: &RequestView) -> (u32, u32) {
    let placement = choose(workers, request, true, 0).expect("a placement");
    (placement.prefill.0, placement.decode.0)
}

#[test]
fn strict_roles_decide_who_does_what() {
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
fn a_long_prompt_goes_where_it_stalls_the_fewest() {
    let mut workers = [worker(0, Role::Mixed), worker(1, Role::Mixed)];
    workers[0].load.running_sequences = 6;
    workers[1].load.running_sequences = 5;
    workers[1].load.running_kv_tokens = 200_000;
    assert_eq!(pair(&workers, &RequestView::new(4_000, 2)).0, 1);
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
    let views: Vec<&WorkerView> = workers.iter().collect();
    for tie in 0..20 {
        let how = Choosing {
            model: &model,
            strict_roles: true,
            tie,
        };
        let placement = place(&views, &RequestView::new(500, 100), how).unwrap();
        assert_eq!((placement.prefill.0, placement.decode.0), (1, 3));
        let next = place_decode(&views, &RequestView::new(500, 100), WorkerId(1), &[], how);
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
fn too_large_is_told_from_down() {
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
fn whole_on_request() {
    let workers = [worker(0, Role::Prefill), worker(1, Role::Decode)];
    let mut request = RequestView::new(100, 10);
    request.keep_whole = true;
    let (prefill, decode) = pair(&workers, &request);
    assert_eq!(prefill, decode);
    let placement = choose(&workers, &request, true, 0).unwrap();
    assert_eq!((placement.prefill.0, placement.decode.0), (0, 1));
}

#[test]
fn the_avoided_serve_only_when_nobody_else_can() {
    let workers = [worker(0, Role::Mixed), worker(1, Role::Mixed)];
    let mut request = RequestView::new(100, 10);
    request.avoid = vec![WorkerId(0)];
    assert_eq!(pair(&workers, &request), (1, 1));
    request.avoid = vec![WorkerId(0), WorkerId(1)];
    assert!(choose(&workers, &request, false, 0).is_ok());
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
    assert_eq!(strict_pair(&workers, &request), (1, 2));
    request.warm = Some(Warm {
        worker: WorkerId(2),
        tokens: 900,
    });
    let cached = pair(&workers, &request);
    assert_eq!(cached, (2, 2), "also whole on a decode worker");
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

fn any_role() -> impl Strategy<Value = Role> {
    prop_oneof![Just(Role::Prefill), Just(Role::Decode), Just(Role::Mixed)]
}

fn any_health() -> impl Strategy<Value = Health> {
    prop_oneof![4 => Just(Health::Ready), 1 => Just(Health::Suspect), 1 => Just(Health::Down)]
}

fn any_worker(id: u32) -> impl Strategy<Value = WorkerView> {
    // Few values each, so that equal costs are common.
    let load = (
        0..4u32,
        0..4u32,
        (0..4u64).prop_map(|thousands| thousands * 1_000),
        0..1_000u32,
        (0..4u64).prop_map(|thousands| thousands * 10_000),
    );
    let rest = (0..3u32, 0..3u32, 0..500u64);
    let kind = (
        any_role(),
        any_health(),
        0..3u8,
        0..3u32,
        0..3usize,
        0..4u32,
    );
    (kind, load, rest).prop_map(move |(kind, load, rest)| {
        let (role, health, identity, size, hardware, machine) = kind;
        let mut worker = worker(id, role);
        worker.health = health;
        worker.hardware = hardware;
        worker.machine = machine;
        worker.domain = domain(identity / 2);
        worker.capacity.max_model_len_tokens = 1_024 << size;
        worker.load = ReportedLoad {
            waiting_sequences: load.0,
            running_sequences: load.1,
            waiting_prefill_tokens: load.2,
            free_blocks: load.3,
            running_kv_tokens: load.4,
            ..ReportedLoad::default()
        };
        worker.outstanding = Outstanding {
            prefill_tokens: u64::from(rest.0) * 500,
            sequences: rest.1,
            promised_blocks: rest.2,
            ..Outstanding::default()
        };
        worker
    })
}

fn any_fleet() -> impl Strategy<Value = Vec<WorkerView>> {
    (0..7u32).prop_flat_map(|count| (0..count).map(any_worker).collect::<Vec<_>>())
}

fn any_request() -> impl Strategy<Value = RequestView> {
    let avoid = proptest::collection::vec((0..7u32).prop_map(WorkerId), 0..3);
    let warm = proptest::option::of((0..7u32, 0..4_000u32));
    let rest = (1..4u32, avoid, any::<bool>(), warm);
    (1..4_000u32, 1..600u32, rest).prop_map(
        |(prompt, output, (choices, avoid, keep_whole, warm))| RequestView {
            choices,
            avoid,
            keep_whole,
            warm: warm.map(|(worker, tokens)| Warm {
                worker: WorkerId(worker),
                tokens,
            }),
            ..RequestView::new(prompt, output)
        },
    )
}

/// Three classes of hardware, and links of which the one between machines is slower.
fn learnt() -> &'static CostModel {
    static LEARNT: LazyLock<CostModel> = LazyLock::new(learn);
    &LEARNT
}

fn learn() -> CostModel {
    let mut model = CostModel::default();
    for (tensor_parallel, step_s) in [(1, 0.01), (2, 0.004), (4, 0.05)] {
        let class = model.hardware.class(&HardwareClass {
            tensor_parallel,
            ..HardwareClass::default()
        });
        for number in 1..20 {
            let decode = StepSample {
                number,
                duration_s: step_s * (1.0 + 0.02 * number as f64),
                sequences: number as u32,
                kv_tokens: 500 * number,
                ..StepSample::default()
            };
            let prefill = StepSample {
                number,
                duration_s: step_s * number as f64,
                prefill_tokens: 100 * number as u32,
                prefill_squares: (100.0 * number as f64).powi(2),
                ..StepSample::default()
            };
            model.hardware.learn(class, &decode);
            model.hardware.learn(class, &prefill);
        }
    }
    for _ in 0..20 {
        model.links.learn(true, 1_000, 2e-3);
        model.links.learn(false, 1_000, 40e-3);
    }
    model
}

fn find(workers: &[WorkerView], id: WorkerId) -> &WorkerView {
    workers.iter().find(|w| w.id == id).expect("a known worker")
}

/// What a placement costs, by definition.
fn cost_s(
    model: &CostModel,
    prefill: &WorkerView,
    decode: &WorkerView,
    request: &RequestView,
) -> f64 {
    let (p, d) = (
        model.price(prefill.hardware, request),
        model.price(decode.hardware, request),
    );
    let whole = prefill.id == decode.id;
    let mut cost_s = p.prefill_s(&Load::of(prefill), request.cached_tokens(prefill.id))
        + p.prefill_preference_s(prefill.role);
    if request.max_tokens > 1 || !whole {
        cost_s += d.decode_s(&Load::of(decode), whole) + d.decode_preference_s(decode.role);
    }
    if !whole {
        let same = prefill.machine == decode.machine && prefill.machine != 0;
        cost_s += model.handoff_s(request, request.cached_tokens(decode.id), same);
    }
    cost_s
}

/// Whether a pair may be chosen, by definition.
fn is_allowed(
    prefill: &WorkerView,
    decode: &WorkerView,
    request: &RequestView,
    strict: bool,
) -> bool {
    let whole = prefill.id == decode.id;
    let roles =
        !strict || (prefill.role.prefills() && (request.max_tokens == 1 || decode.role.decodes()));
    let able = [prefill, decode].iter().all(|w| {
        w.health == Health::Ready
            && u64::from(w.capacity.max_model_len_tokens) >= request.total_tokens()
    });
    roles && able && prefill.domain == decode.domain && (whole || request.max_tokens > 1)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: tasuki_searches::count(2_000),
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(tasuki_searches::seed(7)),
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_allowed_pair_is_cheaper(
        workers in any_fleet(), request in any_request(), strict_roles: bool, tie: u64,
    ) {
        let model = learnt();
        let views: Vec<&WorkerView> = workers.iter().collect();
        let how = Choosing { model, strict_roles, tie };
        let answer = place(&views, &request, how);
        prop_assert_eq!(&answer, &place(&views, &request, how), "a function of its arguments");
        let mut allowed: Vec<(&WorkerView, &WorkerView)> = Vec::new();
        for avoiding in [true, false] {
            let avoided = |w: &WorkerView| avoiding && request.avoid.contains(&w.id);
            for prefill in workers.iter().filter(|w| !avoided(w)) {
                for decode in workers.iter().filter(|w| !avoided(w)) {
                    if is_allowed(prefill, decode, &request, strict_roles) {
                        allowed.push((prefill, decode));
                    }
                }
            }
            if !allowed.is_empty() {
                break;
            }
        }
        let whole: Vec<_> = allowed.iter().copied().filter(|(p, d)| p.id == d.id).collect();
        if request.keep_whole && !whole.is_empty() {
            allowed = whole;
        }
        let Ok(placement) = answer else {
            prop_assert!(allowed.is_empty(), "{:?}", allowed);
            return Ok(());
        };
        let prefill = find(&workers, placement.prefill);
        let decode = find(&workers, placement.decode);
        prop_assert!(allowed.iter().any(|(p, d)| p.id == prefill.id && d.id == decode.id));
        let chosen_s = cost_s(model, prefill, decode, &request);
        if request.max_tokens > 1 {
            prop_assert!((chosen_s - placement.cost_s).abs() <= 1e-9 * chosen_s);
        }
        for (prefill, decode) in allowed {
            let other_s = cost_s(model, prefill, decode, &request);
            prop_assert!(chosen_s <= other_s * (1.0 + 1e-9), "{:?} {:?}", placement, other_s);
        }
    }

    #[test]
    fn an_idle_worker_is_preferred_to_its_busy_twin(
        busy in any_worker(0), request in any_request(), tie: u64,
    ) {
        let mut busy = busy;
        busy.health = Health::Ready;
        busy.role = Role::Mixed;
        busy.capacity.max_model_len_tokens = 1 << 20;
        busy.load.waiting_prefill_tokens += 1;
        let mut idle = busy.clone();
        idle.id = WorkerId(1);
        idle.load = ReportedLoad {
            free_blocks: 1_000,
            ..ReportedLoad::default()
        };
        idle.outstanding = Outstanding::default();
        let request = RequestView { avoid: vec![], warm: None, ..request };
        let placement = choose(&[busy, idle], &request, false, tie).unwrap();
        prop_assert_eq!((placement.prefill.0, placement.decode.0), (1, 1));
    }

    #[test]
    fn another_decode_worker_is_able_and_new(
        workers in any_fleet(), request in any_request(), strict_roles: bool, tie: u64,
        tried in proptest::collection::vec((0..7u32).prop_map(WorkerId), 0..3),
        prefill in 0..7u32,
    ) {
        let model = learnt();
        let views: Vec<&WorkerView> = workers.iter().collect();
        let how = Choosing { model, strict_roles, tie };
        let prefill = WorkerId(prefill);
        if let Some(id) = place_decode(&views, &request, prefill, &tried, how) {
            let decode = find(&workers, id);
            prop_assert!(decode.health == Health::Ready);
            prop_assert!(id != prefill && !tried.contains(&id));
            prop_assert_eq!(decode.domain, find(&workers, prefill).domain);
            prop_assert!(!strict_roles || decode.role.decodes());
        }
    }
}
