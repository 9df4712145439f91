//! Placement sees every change of every worker at once.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tasuki_policy::{PolicyKind, Rule};

use super::super::WorkerState;
use super::*;

const REGRESSIONS: &[u64] = &[];
const WORKERS: u32 = 6;
const KINDS: [PolicyKind; 6] = [
    PolicyKind::Cost,
    PolicyKind::Simple(Rule::RoundRobin),
    PolicyKind::Simple(Rule::LeastLoaded),
    PolicyKind::Simple(Rule::PowerOfTwo),
    PolicyKind::Simple(Rule::ConsistentHash),
    PolicyKind::Simple(Rule::PrefixHash),
];

#[test]
fn placement_sees_every_change_of_every_worker() {
    tasuki_searches::run(300, REGRESSIONS, |seed| {
        let mut random = StdRng::seed_from_u64(seed);
        let mut fleet = fleet_by(KINDS[seed as usize % KINDS.len()], WORKERS as usize);
        let (mut keys, mut legs) = (Vec::new(), Vec::new());
        for _ in 0..40 {
            change(&mut fleet, &mut keys, &mut legs, &mut random);
            check(&fleet, &mut random);
        }
    });
}

fn change(
    fleet: &mut FleetState,
    keys: &mut Vec<WorkerKey>,
    legs: &mut Vec<(WorkerKey, LegSlot)>,
    random: &mut StdRng,
) {
    let worker = WorkerId(random.random_range(0..WORKERS));
    let role = [Role::Prefill, Role::Decode, Role::Mixed][random.random_range(0..3)];
    let max_model_len = random.random_range(1..4) * 20;
    let max_sequences = [None, Some(1)][random.random_range(0..2)];
    let info = |engine: &str| WorkerInfo {
        role,
        max_model_len,
        max_sequences,
        ..super::info(engine)
    };
    let reason = DrainReason::Asked;
    match random.random_range(0..12) {
        0..3 => keys.extend(fleet.join(worker, info(&format!("e{worker}")), NOW)),
        3 => drop(fleet.drain(worker, reason)),
        4 => drop(fleet.undrain(worker, reason)),
        5 if random.random_range(0..6) == 0 => fleet.remove(worker),
        _ => {}
    }
    let Some(&key) = keys.get(random.random_range(0..keys.len().max(1))) else {
        return;
    };
    let second = Duration::from_secs(1);
    match random.random_range(0..10) {
        0 => fleet.leave(key),
        1 => drop(fleet.check_silence(key, NOW + second, second, 2 * second)),
        2 => drop(fleet.on_info(key, info(&format!("e{}", key.worker)))),
        3..6 => {
            let load = LoadReport {
                running_sequences: random.random_range(0..5),
                waiting_prefill_tokens: random.random_range(0..500),
                ..idle()
            };
            fleet.on_report(key, Some(&load), NOW);
        }
        6..8 => {
            let slot = fleet.on_dispatched(key, &spec(LegKind::Colocated, 10));
            legs.extend(slot.map(|slot| (key, slot)));
        }
        _ => {
            if let Some((key, slot)) = legs.pop() {
                fleet.on_ended(key, slot, None);
                fleet.recount(key);
            }
        }
    }
}

/// A policy that is told now what is known gives the same answers.
fn check(fleet: &FleetState, random: &mut StdRng) {
    let mut policy = fleet.config.kind.build();
    for WorkerState { model, view, .. } in fleet.workers() {
        if let Some(model) = *model {
            policy.update(model, view);
        }
    }
    let two_choices = RequestView {
        choices: 2,
        ..RequestView::new(10, 5)
    };
    for request in [
        RequestView::new(10, 5),
        RequestView::new(30, 20),
        two_choices,
    ] {
        let prefill = WorkerId(random.random_range(0..WORKERS));
        let how = fleet.choosing();
        assert_eq!(
            fleet.policy.place(&request, how),
            policy.place(&request, how)
        );
        assert_eq!(
            fleet.policy.place_decode(&request, prefill, &[], how),
            policy.place_decode(&request, prefill, &[], how)
        );
    }
}
