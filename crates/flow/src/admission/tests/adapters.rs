//! Requests for adapters, and for one kind of workers, that wait for room on the only workers that
//! may serve them, and those behind them.

use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::fleet::{LoadReport, WorkerInfo};
use crate::testing::{domain, info};
use crate::{Effect, FleetState, Generation, Machine, MachineConfig, SamplingParams, WorkerKey};
use tasuki_core::{Chunks, Payload};
use tasuki_policy::PolicyConfig;

const NOW: Duration = Duration::ZERO;

/// Busy workers with adapters, each with so many prompt tokens before it and so many free blocks.
fn fleet(workers: &[(&[&str], u64, u32)]) -> (FleetState, Vec<WorkerKey>) {
    let mut fleet = FleetState::new(Vec::new(), PolicyConfig::default());
    let keys = workers.iter().enumerate().map(|(at, (adapters, ..))| {
        let id = fleet.add();
        let info = worker(&format!("w{at}"), adapters);
        fleet.join(id, info, NOW).expect("it joins")
    });
    let keys: Vec<_> = keys.collect();
    for (key, &(_, tokens, free_blocks)) in keys.iter().zip(workers) {
        report(&mut fleet, *key, tokens, free_blocks);
    }
    (fleet, keys)
}

fn worker(name: &str, adapters: &[&str]) -> WorkerInfo {
    let mut info = WorkerInfo {
        adapters: adapters.iter().map(|&name| name.to_owned()).collect(),
        num_blocks: 100_000,
        ..info(name)
    };
    info.capabilities.payload = Payload::Opaque;
    info
}

fn report(fleet: &mut FleetState, key: WorkerKey, waiting_prefill_tokens: u64, free_blocks: u32) {
    let load = LoadReport {
        running_requests: 1,
        waiting_prefill_tokens,
        free_blocks,
        ..LoadReport::default()
    };
    fleet.on_report(key, Some(&load), NOW);
}

fn named(adapter: &str) -> Vec<Arc<str>> {
    let adapter = (!adapter.is_empty()).then(|| adapter.into());
    adapter.into_iter().collect()
}

/// Requests by their adapters ("": none) and prompt tokens.
fn enter<const N: usize>(
    admission: &mut Admission,
    fleet: &FleetState,
    requests: [(&str, u32); N],
) -> [EntrantId; N] {
    requests.map(|(adapter, prompt_tokens)| {
        let view = RequestView {
            adapters: named(adapter),
            ..RequestView::new(prompt_tokens, 10)
        };
        admission.enter(entrant("a", view), fleet)
    })
}

/// All that are let in before anything changes, in their order. None is placed.
fn let_in(admission: &mut Admission, now: Duration, fleet: &FleetState) -> Vec<EntrantId> {
    let mut ids = Vec::new();
    loop {
        match admission.settle(now, fleet)[..] {
            [] => return ids,
            [(id, Verdict::Admitted(..))] => {
                admission.passed(id);
                ids.push(id);
            }
            ref verdicts => panic!("{verdicts:?}"),
        }
    }
}

const FULL: u64 = 1_000_000;
const BLOCKS: u32 = 90_000;

#[test]
fn those_behind_a_request_that_waits_for_its_adapter_go_to_other_workers() {
    let (mut fleet, keys) = fleet(&[(&["x"], FULL, BLOCKS), (&[], 0, BLOCKS)]);
    let mut admission = Admission::new(AdmissionConfig::default());
    let requests = [("x", 100), ("", 100), ("x", 50), ("", 100)];
    let [first, base, second, further] = enter(&mut admission, &fleet, requests);
    assert_eq!(let_in(&mut admission, NOW, &fleet), [base, further]);
    report(&mut fleet, keys[0], 0, BLOCKS);
    assert_eq!(let_in(&mut admission, NOW, &fleet), [first, second]);
}

#[test]
fn those_behind_a_request_for_one_kind_of_workers_go_to_others() {
    let (mut fleet, keys) = fleet(&[(&["x"], FULL, BLOCKS), (&["x"], 0, BLOCKS)]);
    fleet.leave(keys[0]);
    let other = WorkerInfo {
        domain: domain(8),
        ..worker("w0", &["x"])
    };
    let full = fleet.join(keys[0].worker, other, NOW).expect("it joins");
    report(&mut fleet, full, FULL, BLOCKS);
    for adapter in ["", "x"] {
        let mut admission = Admission::new(AdmissionConfig::default());
        let view = RequestView {
            adapters: named(adapter),
            bound_to: Some(domain(8).identity),
            ..RequestView::new(100, 10)
        };
        let bound = admission.enter(entrant("a", view), &fleet);
        let others = enter(&mut admission, &fleet, [("", 100), ("x", 100)]);
        assert_eq!(let_in(&mut admission, NOW, &fleet), others);
        report(&mut fleet, full, 0, BLOCKS);
        assert_eq!(let_in(&mut admission, NOW, &fleet), [bound]);
        report(&mut fleet, full, FULL, BLOCKS);
    }
}

#[test]
fn none_takes_the_room_that_a_request_for_an_adapter_waits_for() {
    // The worker with the adapter has room for a short prompt, the other one has none.
    let (mut fleet, keys) = fleet(&[(&["x", "y"], 0, 10), (&[], FULL, BLOCKS)]);
    let mut alone = Admission::new(AdmissionConfig::default());
    let short = enter(&mut alone, &fleet, [("y", 50), ("", 50)]);
    assert_eq!(let_in(&mut alone, NOW, &fleet), short);
    let mut admission = Admission::new(AdmissionConfig::default());
    let all = enter(&mut admission, &fleet, [("x", 5_000), ("y", 50), ("", 50)]);
    assert_eq!(let_in(&mut admission, NOW, &fleet), []);
    report(&mut fleet, keys[0], 0, BLOCKS);
    assert_eq!(let_in(&mut admission, NOW, &fleet), all);
}

#[test]
fn a_request_that_prefers_an_awaited_worker_goes_to_another_one_with_room() {
    // The first worker computes sooner what it has, and has no room for a long prompt.
    let (mut fleet, keys) = fleet(&[(&["x"], 0, 10), (&[], 1_000, BLOCKS)]);
    let mut admission = Admission::new(AdmissionConfig::default());
    let generation = Generation {
        model: ModelId(0),
        request_id: "r".to_owned(),
        prompt: (0..50).collect(),
        n: 1,
        sampling: SamplingParams::default(),
        cache_salt: String::new(),
        tenant: "a".into(),
        priority: 0,
        opaque: None,
    };
    let mut machine = Machine::new(generation, Chunks::default(), MachineConfig::default());
    let [first] = enter(&mut admission, &fleet, [("x", 5_000)]);
    let second = admission.enter(entrant("a", machine.request()), &fleet);
    let [third] = enter(&mut admission, &fleet, [("", 50)]);
    let preferred = fleet.places_on(&RequestView::new(50, 10), &[keys[0].worker].into());
    assert!(
        preferred,
        "alone it would be placed where the first one waits"
    );
    let verdicts = admission.settle(NOW, &fleet);
    let [(id, Verdict::Admitted(forecast, ref avoid))] = verdicts[..] else {
        panic!("{verdicts:?}");
    };
    assert_eq!(id, second);
    machine.start(forecast.waited, avoid, NOW, &mut fleet);
    let Some(Effect::Dispatch { leg, .. }) = machine.next_effect() else {
        panic!("it is not placed");
    };
    assert_eq!(leg.worker, keys[1]);
    admission.passed(second);
    assert_eq!(let_in(&mut admission, NOW, &fleet), [third]);
    report(&mut fleet, keys[0], 0, BLOCKS);
    assert_eq!(let_in(&mut admission, NOW, &fleet), [first]);
}

#[test]
fn a_request_for_another_adapter_passes_too_or_keeps_its_place_likewise() {
    for (tokens, has_room) in [(0, true), (FULL, false)] {
        let workers: [(&[&str], _, _); 3] = [
            (&["x", "y"], FULL, BLOCKS),
            (&["y"], tokens, BLOCKS),
            (&[], 0, BLOCKS),
        ];
        let (mut fleet, keys) = fleet(&workers);
        let mut admission = Admission::new(AdmissionConfig::default());
        let requests = [("x", 100), ("y", 100), ("", 100)];
        let [first, other, base] = enter(&mut admission, &fleet, requests);
        let passed = let_in(&mut admission, NOW, &fleet);
        let expected = [other, base];
        assert_eq!(passed, expected[usize::from(!has_room)..], "{tokens}");
        report(&mut fleet, keys[0], 0, BLOCKS);
        let rest = let_in(&mut admission, NOW, &fleet);
        assert_eq!(
            rest,
            [first, other][..2 - usize::from(has_room)],
            "{tokens}"
        );
    }
}

#[test]
fn one_whose_worker_is_down_waits_no_longer_behind_one_whose_worker_is_full() {
    let workers: [(&[&str], _, _); 2] = [(&["x"], FULL, BLOCKS), (&["z"], 0, BLOCKS)];
    let (mut fleet, keys) = fleet(&workers);
    let mut admission = Admission::new(AdmissionConfig::default());
    let [_, down] = enter(&mut admission, &fleet, [("x", 100), ("z", 100)]);
    fleet.leave(keys[1]);
    for (seconds, expected) in [(1, vec![]), (5, vec![]), (10, vec![]), (11, vec![down])] {
        let now = Duration::from_secs(seconds);
        assert_eq!(let_in(&mut admission, now, &fleet), expected, "{seconds} s");
    }
}

/// Adapters of workers and requests, room and new requests at random: each that is let in leaves
/// alone what requests before it wait for, and all are let in once there is room.
#[test]
fn random_requests_take_no_room_from_those_before_them() {
    const NAMES: [&str; 3] = ["x", "y", "z"];
    tasuki_searches::run(300, &[], |seed| {
        let mut random = StdRng::seed_from_u64(seed);
        let sets: Vec<Vec<&str>> = (0..random.random_range(2..6))
            .map(|at| {
                let has = |_: &&str| at == 0 || random.random_range(0..3) == 0;
                NAMES.into_iter().filter(has).collect()
            })
            .collect();
        let workers: Vec<_> = sets.iter().map(|set| (&set[..], FULL, BLOCKS)).collect();
        let (mut fleet, keys) = fleet(&workers);
        let mut admission = Admission::new(AdmissionConfig::default());
        let mut waiting: Vec<(EntrantId, RequestView)> = Vec::new();
        for _ in 0..30 {
            let adapter = ["", "", "x", "y", "z"][random.random_range(0..5)];
            let tokens = [50, 5_000][random.random_range(0..2)];
            let [id] = enter(&mut admission, &fleet, [(adapter, tokens)]);
            let view = RequestView {
                adapters: named(adapter),
                ..RequestView::new(tokens, 10)
            };
            waiting.push((id, view));
            let key = keys[random.random_range(0..keys.len())];
            let tokens = [0, 1_000, FULL][random.random_range(0..3)];
            report(
                &mut fleet,
                key,
                tokens,
                [10, BLOCKS][random.random_range(0..2)],
            );
            for id in let_in(&mut admission, NOW, &fleet) {
                let at = waiting.iter().position(|(of, _)| *of == id);
                let (_, view) = waiting.remove(at.expect("it waits"));
                let mut awaited = BTreeSet::new();
                for (before, other) in waiting.iter().take_while(|(before, _)| *before < id) {
                    let only = fleet.only(other);
                    let only = only.unwrap_or_else(|| panic!("{id:?} passes {before:?}"));
                    awaited.extend(only.iter());
                }
                let view = RequestView {
                    avoid: awaited.iter().copied().collect(),
                    ..view
                };
                assert!(!fleet.places_on(&view, &awaited), "{id:?} takes their room");
            }
        }
        for key in keys {
            report(&mut fleet, key, 0, BLOCKS);
        }
        let rest: Vec<_> = waiting.into_iter().map(|(id, _)| id).collect();
        assert_eq!(let_in(&mut admission, NOW, &fleet), rest);
    });
}
