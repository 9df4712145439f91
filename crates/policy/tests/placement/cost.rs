//! Placement by cost: what must hold for every fleet and every request.

use std::collections::{BTreeMap, HashMap};
use std::sync::LazyLock;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use tasuki_core::{
    Capabilities, CostModel, HandoffKind, HardwareClass, Health, ModelId, Outstanding,
    ReportedLoad, RequestView, Role, StepSample, Warm, WorkerId, WorkerView,
};
use tasuki_policy::{Choosing, Cost, NoPlacement, Placement, Policy, WorkerIndex};

use crate::fleets::{any_request, any_worker, domain, worker};

/// The policy's answer, with nothing measured yet.
fn choose(
    workers: &[WorkerView],
    request: &RequestView,
    strict_roles: bool,
    tie: u64,
) -> Result<Placement, NoPlacement> {
    let model = CostModel::default();
    let how = Choosing {
        model: &model,
        strict_roles,
        tie,
    };
    index(workers).place(request, how)
}

fn index(workers: &[WorkerView]) -> WorkerIndex {
    let mut index = WorkerIndex::default();
    for worker in workers {
        index.update(ModelId::default(), worker);
    }
    index
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
fn the_kv_of_sequences_that_wait_counts_like_that_of_sequences_that_decode() {
    let cost_s = |load: ReportedLoad| {
        let mut worker = worker(0, Role::Mixed);
        worker.load = ReportedLoad {
            free_blocks: worker.load.free_blocks,
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
    assert_eq!(wait(None), wait(Some(0)), "as of workers that do not report it");
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

/// Three classes of hardware, and links of which the one between machines is slower.
fn learnt() -> &'static CostModel {
    static LEARNT: LazyLock<CostModel> = LazyLock::new(learn);
    &LEARNT
}

/// Costs by which requests are split more often.
fn split() -> &'static CostModel {
    static SPLIT: LazyLock<CostModel> = LazyLock::new(|| {
        let mut model = learn();
        model.config.role_preference = 2.0;
        model
    });
    &SPLIT
}

fn any_model() -> impl Strategy<Value = &'static CostModel> {
    static NEW: LazyLock<CostModel> = LazyLock::new(CostModel::default);
    prop_oneof![Just(&*NEW), Just(learnt()), Just(split())]
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

/// What happens to a fleet between two placements.
#[derive(Debug, Clone)]
enum Change {
    /// A worker is there, with all that is known of it.
    Is(WorkerView, ModelId),
    Gone(WorkerId),
}

fn any_change(ids: u32) -> impl Strategy<Value = Change> {
    let is = (0..ids).prop_flat_map(any_worker);
    let is = (is, 0..8u32).prop_map(|(worker, model)| Change::Is(worker, ModelId(model / 7)));
    prop_oneof![6 => is, 1 => (0..ids).prop_map(|id| Change::Gone(WorkerId(id)))]
}

/// Workers as an index and as a list, changed alike.
#[derive(Debug, Default)]
struct Both {
    index: WorkerIndex,
    list: BTreeMap<WorkerId, (ModelId, WorkerView)>,
}

impl Both {
    fn change(&mut self, change: Change) {
        match change {
            Change::Is(worker, model) => {
                self.index.update(model, &worker);
                self.list.insert(worker.id, (model, worker));
            }
            Change::Gone(id) => {
                self.index.remove(id);
                self.list.remove(&id);
            }
        }
    }

    fn check(
        &self,
        request: &RequestView,
        prefill: WorkerId,
        tried: &[WorkerId],
        how: Choosing<'_>,
    ) {
        let list: Vec<&(ModelId, WorkerView)> = self.list.values().collect();
        let expected = crate::reference::place(&list, request, how);
        let found = self.index.place(request, how);
        let plain = found.map(|found| Placement { why: None, ..found });
        assert_eq!(plain, expected, "{request:?} {list:#?}");
        if let Ok(placement) = found {
            let why = placement.why.expect("costs were compared");
            assert_eq!(why.is_split, !placement.is_whole());
            let total_s = why.chosen.total_s();
            assert!(
                (total_s - placement.cost_s).abs() <= 1e-9 * placement.cost_s,
                "{why:?}"
            );
            let Cost {
                prefill_s,
                handoff_s,
                decode_s,
            } = why.chosen;
            assert!(prefill_s.min(handoff_s).min(decode_s) >= -1e-9, "{why:?}");
            assert!(
                why.other_s
                    .is_none_or(|other_s| other_s >= placement.cost_s),
                "{why:?}"
            );
        }
        let expected = crate::reference::place_decode(&list, request, prefill, tried, how);
        let answer = self.index.place_decode(request, prefill, tried, how);
        assert_eq!(answer, expected, "{request:?} after {prefill} {list:#?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: tasuki_searches::count(2_000),
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(tasuki_searches::seed(7)),
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_allowed_placement_precedes_the_one_chosen(
        changes in proptest::collection::vec(any_change(12), 0..24),
        requests in proptest::collection::vec(any_request(), 24),
        tried in proptest::collection::vec((0..12u32).prop_map(WorkerId), 0..3),
        prefill in 0..12u32, strict_roles: bool, tie: u64, model in any_model(),
    ) {
        let how = Choosing { model, strict_roles, tie };
        let mut both = Both::default();
        for (change, request) in changes.into_iter().zip(requests) {
            both.change(change);
            both.check(&request, WorkerId(prefill), &tried, how);
        }
    }

    #[test]
    fn an_idle_worker_is_preferred_to_its_busy_twin(
        busy in any_worker(0), request in any_request(), tie: u64,
    ) {
        let mut busy = busy;
        busy.health = Health::Ready;
        busy.role = Role::Mixed;
        busy.domain = domain(1);
        busy.capabilities = Capabilities::default();
        busy.capacity.max_model_len_tokens = 1 << 20;
        busy.load.waiting_prefill_tokens += 1;
        let mut idle = busy.clone();
        idle.id = WorkerId(1);
        idle.load = ReportedLoad {
            free_blocks: 1_000,
            ..ReportedLoad::default()
        };
        idle.outstanding = Outstanding::default();
        let request = RequestView {
            avoid: vec![],
            warm: Vec::new(),
            bound_to: None,
            resumed_tokens: 0,
            model: ModelId::default(),
            ..request
        };
        let placement = choose(&[busy, idle], &request, false, tie).unwrap();
        prop_assert_eq!((placement.prefill.0, placement.decode.0), (1, 1));
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: tasuki_searches::count(12),
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(tasuki_searches::seed(11)),
        ..ProptestConfig::default()
    })]

    /// Of three levels and more.
    #[test]
    fn a_large_fleet_is_searched_as_well(
        workers in (0..600u32).map(any_worker).collect::<Vec<_>>(),
        changes in proptest::collection::vec(any_change(600), 6),
        requests in proptest::collection::vec(any_request(), 6),
        machines in 1..200u32, strict_roles: bool, tie: u64, model in any_model(),
    ) {
        let how = Choosing { model, strict_roles, tie };
        let mut both = Both::default();
        for mut worker in workers {
            worker.machine = worker.id.0 % machines;
            both.change(Change::Is(worker, ModelId::default()));
        }
        for (change, request) in changes.into_iter().zip(requests) {
            both.change(change);
            both.check(&request, WorkerId(tie as u32 % 600), &[], how);
        }
    }
}
