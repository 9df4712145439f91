//! Policies that reckon no cost.

use std::collections::HashMap;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use tasuki_core::{CostModel, Health, ModelId, RequestView, Role, RoleUse, WorkerId, WorkerView};
use tasuki_policy::{Choosing, NoPlacement, Placement, Policy, Rule, SimplePolicy};

use crate::fleets::{any_request, any_worker, worker};

const RULES: [Rule; 5] = [
    Rule::RoundRobin,
    Rule::LeastLoaded,
    Rule::PowerOfTwo,
    Rule::ConsistentHash,
    Rule::PrefixHash,
];

/// A fleet, and a policy that knows it.
struct Fleet {
    policy: SimplePolicy,
    workers: Vec<WorkerView>,
    model: CostModel,
    turn: u64,
}

impl Fleet {
    fn new(rule: Rule, roles: &[Role]) -> Self {
        let mut policy = SimplePolicy::new(rule);
        let workers: Vec<_> = (0..)
            .zip(roles)
            .map(|(id, role)| worker(id, *role))
            .collect();
        for worker in &workers {
            policy.update(ModelId::default(), worker);
        }
        Self {
            policy,
            workers,
            model: CostModel::default(),
            turn: 0,
        }
    }

    fn place(&mut self, request: &RequestView) -> (u32, u32) {
        self.turn += 1;
        let how = Choosing {
            model: &self.model,
            strict_roles: false,
            tie: self.turn,
        };
        let placement = self.policy.place(request, how).expect("a placement");
        (placement.prefill.0, placement.decode.0)
    }

    fn change(&mut self, id: usize, change: impl FnOnce(&mut WorkerView)) {
        change(&mut self.workers[id]);
        self.policy.update(ModelId::default(), &self.workers[id]);
    }

    /// Where the requests of so many sessions go.
    fn homes(&mut self, sessions: u64) -> Vec<u32> {
        let of = |session| RequestView {
            session,
            ..RequestView::new(100, 10)
        };
        (0..sessions)
            .map(|session| self.place(&of(session)).0)
            .collect()
    }
}

fn request() -> RequestView {
    RequestView::new(100, 10)
}

#[test]
fn roles_decide_while_there_is_a_worker_of_each() {
    for rule in RULES {
        let mut fleet = Fleet::new(rule, &[Role::Prefill, Role::Decode]);
        assert_eq!(fleet.place(&request()), (0, 1), "{rule:?}");
        assert_eq!(fleet.place(&RequestView::new(100, 1)), (0, 0), "{rule:?}");
        fleet.change(1, |worker| worker.health = Health::Suspect);
        assert_eq!(fleet.place(&request()), (0, 0), "{rule:?}");
        fleet.change(1, |worker| worker.health = Health::Ready);
        fleet.change(0, |worker| worker.health = Health::Down);
        assert_eq!(fleet.place(&request()), (1, 1), "{rule:?}");
        let mut mixed = Fleet::new(rule, &[Role::Decode, Role::Mixed, Role::Decode]);
        assert_eq!(mixed.place(&request()), (1, 1), "{rule:?}");
    }
}

#[test]
fn round_robin_takes_one_worker_after_another() {
    let mut fleet = Fleet::new(Rule::RoundRobin, &[Role::Mixed; 3]);
    let taken: Vec<u32> = (0..6).map(|_| fleet.place(&request()).0).collect();
    assert_eq!(taken, [1, 2, 0, 1, 2, 0]);
}

#[test]
fn least_loaded_takes_the_fewest_requests_whether_reported_or_just_sent() {
    let mut fleet = Fleet::new(Rule::LeastLoaded, &[Role::Mixed; 3]);
    fleet.change(0, |worker| worker.load.running_requests = 2);
    fleet.change(1, |worker| worker.load.waiting_requests = 1);
    fleet.change(2, |worker| worker.outstanding.requests = 3);
    assert_eq!(fleet.place(&request()).0, 1);
    fleet.change(1, |worker| worker.outstanding.requests = 2);
    assert_eq!(fleet.place(&request()).0, 0);
}

#[test]
fn power_of_two_never_takes_the_fullest_and_draws_among_the_others() {
    let mut fleet = Fleet::new(Rule::PowerOfTwo, &[Role::Mixed; 4]);
    for id in 0..4 {
        fleet.change(id, |worker| worker.load.running_requests = id as u32);
    }
    let mut taken = HashMap::new();
    for _ in 0..600 {
        *taken.entry(fleet.place(&request()).0).or_insert(0) += 1;
    }
    // Of six pairs: three have 0, two have 1 and not 0, one has 2 and 3.
    let times = |id| taken.get(&id).copied().unwrap_or(0);
    assert!((250..350).contains(&times(0)), "{taken:?}");
    assert!((150..250).contains(&times(1)), "{taken:?}");
    assert!((60..140).contains(&times(2)), "{taken:?}");
    assert_eq!(times(3), 0);
}

#[test]
fn a_worker_that_joins_or_leaves_moves_its_own_sessions_only() {
    let mut fleet = Fleet::new(Rule::ConsistentHash, &[Role::Mixed; 10]);
    let before = fleet.homes(2_000);
    assert_eq!(before, fleet.homes(2_000), "a session stays");
    let share = |id| before.iter().filter(|home| **home == id).count();
    for id in 0..10 {
        assert!((140..260).contains(&share(id)), "{id}: {}", share(id));
    }
    fleet.change(3, |worker| worker.health = Health::Down);
    let without = fleet.homes(2_000);
    for (home, now) in before.iter().zip(&without) {
        assert!(*home == 3 || home == now);
        assert_ne!(*now, 3);
    }
    fleet.change(3, |worker| worker.health = Health::Ready);
    assert_eq!(before, fleet.homes(2_000), "and comes back");
    fleet
        .policy
        .update(ModelId::default(), &worker(10, Role::Mixed));
    let with = fleet.homes(2_000);
    assert!(
        before
            .iter()
            .zip(&with)
            .all(|(home, now)| *now == 10 || home == now)
    );
    let moved = with.iter().filter(|home| **home == 10).count();
    assert!((100..270).contains(&moved), "{moved}");
}

#[test]
fn the_requests_of_one_session_overflow_to_others_at_its_bound() {
    let mut fleet = Fleet::new(Rule::ConsistentHash, &[Role::Mixed; 4]);
    for placed in 1..=200u32 {
        let home = fleet.place(&request()).0 as usize;
        fleet.change(home, |worker| worker.outstanding.requests += 1);
        let most = fleet.workers.iter().map(|w| w.requests()).max();
        let bound = (1.25 * f64::from(placed) / 4.0).ceil() as u32;
        assert!(most <= Some(bound), "{most:?} of {placed}");
    }
}

#[test]
fn a_tenant_is_a_session_and_a_beginning_is_a_prefix() {
    let prompt: Vec<u32> = (0..200).collect();
    let mut other_end = prompt.clone();
    other_end[100] = 0;
    let mut other = prompt.clone();
    other[0] = 7;
    let keys = |tenant, prompt: &[u32]| {
        let keyed = request().keyed(tenant, prompt);
        (keyed.session, keyed.prefix)
    };
    assert_eq!(keys("", &prompt), keys("", &other_end));
    assert_ne!(keys("", &prompt).0, keys("", &other).0);
    assert_eq!(keys("a", &prompt).0, keys("a", &other).0);
    assert_ne!(keys("a", &prompt).0, keys("b", &prompt).0);
    assert_eq!(keys("a", &prompt).1, keys("b", &prompt).1);
    for (rule, same) in [(Rule::ConsistentHash, true), (Rule::PrefixHash, false)] {
        let mut fleet = Fleet::new(rule, &[Role::Mixed; 16]);
        let homes: Vec<_> = (0..20)
            .map(|first| fleet.place(&request().keyed("a", &[first])))
            .collect();
        assert_eq!(homes.iter().all(|home| *home == homes[0]), same, "{rule:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: tasuki_searches::count(2_000),
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(tasuki_searches::seed(13)),
        ..ProptestConfig::default()
    })]

    /// There is a placement where the reference has one, and else the same reason.
    #[test]
    fn every_rule_follows_capabilities_limits_health_and_roles(
        workers in (0..9u32).prop_flat_map(|n| (0..n).map(any_worker).collect::<Vec<_>>()),
        request in any_request(),
        tried in proptest::collection::vec((0..9u32).prop_map(WorkerId), 0..3),
        prefill in (0..9u32).prop_map(WorkerId), strict_roles: bool, tie: u64,
    ) {
        let workers: Vec<_> = workers.into_iter().map(|w| (ModelId::default(), w)).collect();
        let list: Vec<_> = workers.iter().collect();
        let model = CostModel::default();
        let how = Choosing { model: &model, strict_roles, tie };
        for rule in RULES {
            let mut policy = SimplePolicy::new(rule);
            for (model, worker) in &workers {
                policy.update(*model, worker);
            }
            let expected = crate::reference::place(&list, &request, how);
            match policy.place(&request, how) {
                Ok(Placement { prefill, decode, .. }) => {
                    prop_assert!(
                        crate::reference::is_allowed(&list, &request, how, (prefill, decode)),
                        "{rule:?}: {prefill} {decode}"
                    );
                }
                Err(reason) => prop_assert_eq!(Err(reason), expected),
            }
            let decode = policy.place_decode(&request, prefill, &tried, how);
            let expected = crate::reference::place_decode(&list, &request, prefill, &tried, how);
            prop_assert_eq!(decode.is_some(), expected.is_some());
            if let Some(decode) = decode {
                // As if all others had been tried.
                let mut others: Vec<WorkerId> = (0..9).map(WorkerId).collect();
                others.retain(|id| *id != decode || tried.contains(id));
                let only = crate::reference::place_decode(&list, &request, prefill, &others, how);
                prop_assert_eq!(only, Some(decode));
            }
        }
    }
}

#[test]
fn a_worker_of_one_half_only_is_never_given_the_other() {
    for rule in RULES {
        let mut fleet = Fleet::new(rule, &[Role::Prefill, Role::Decode]);
        for id in 0..2 {
            fleet.change(id, |worker| worker.capabilities.role_use = RoleUse::Only);
        }
        assert_eq!(fleet.place(&request()), (0, 1), "{rule:?}");
        let kept = RequestView {
            keep_whole: true,
            ..request()
        };
        assert_eq!(
            fleet.place(&kept),
            (0, 1),
            "{rule:?}: nobody can keep it whole"
        );
        fleet.change(1, |worker| worker.health = Health::Down);
        let model = CostModel::default();
        let how = Choosing {
            model: &model,
            strict_roles: false,
            tie: 0,
        };
        let placed = fleet.policy.place(&request(), how);
        assert!(
            matches!(placed, Err(NoPlacement::NoRole { .. })),
            "{rule:?}: {placed:?}"
        );
    }
}
