//! The index against a comparison of all placements, on random fleets.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use tasuki_core::{
    Capabilities, CostModel, HardwareClass, Health, ModelId, Outstanding, ReportedLoad,
    RequestView, Role, StepSample, WorkerId, WorkerView,
};
use tasuki_policy::{Choosing, Cost, Placement, Policy, WorkerIndex};

use super::choose;
use crate::fleets::{any_request, any_worker, domain};

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
                why.other
                    .is_none_or(|other| other.seconds() >= placement.cost_s),
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
        busy.capacity.max_sequences = u32::MAX;
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
            only: None,
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
