//! Who is admitted, and what is counted of our own legs.

mod awaited;
mod decoded;
mod failing;
mod herding;
mod index;
mod limits;
mod models;
mod prefixes;

use std::time::Duration;

use tasuki_core::{
    Capabilities, Health, Identity, ModelId, Outstanding, Payload, RequestView, Role, StepSample,
    WorkerId, WorkerView,
};
use tasuki_policy::{NoPlacement, PolicyConfig, PolicyKind};

use super::{DrainReason, FleetState, JoinError, LegSlot, LoadReport, WorkerInfo};
use crate::leg::{Handoff, LegKind, LegSpec, LegTimings};
use crate::machine::{Fleet, Placed};
use crate::testing::{domain, info, leg_spec};
use crate::worker_ref::WorkerKey;

const NOW: Duration = Duration::ZERO;

fn fleet(workers: usize) -> FleetState {
    fleet_by(PolicyKind::Cost, workers)
}

fn fleet_by(kind: PolicyKind, workers: usize) -> FleetState {
    let config = PolicyConfig {
        kind,
        ..PolicyConfig::default()
    };
    let mut fleet = FleetState::new(vec![Vec::new()], config);
    for id in 0..workers {
        assert_eq!(fleet.add().0 as usize, id);
    }
    fleet
}

fn view(fleet: &FleetState, worker: u32) -> &WorkerView {
    &fleet.worker(WorkerId(worker)).expect("a worker").view
}

fn spec(kind: LegKind, prompt_tokens: u32) -> LegSpec {
    leg_spec(kind, prompt_tokens, 1_000)
}

fn idle() -> LoadReport {
    LoadReport {
        free_blocks: 100,
        ..LoadReport::default()
    }
}

#[test]
fn what_we_sent_counts_until_the_worker_counts_it() {
    let mut fleet = fleet(1);
    let key = fleet.join(WorkerId(0), info("a"), NOW).expect("joined");
    let prefill = fleet.on_dispatched(key, &spec(LegKind::Prefill, 100));
    let decode = fleet.on_dispatched(key, &spec(LegKind::Decode, 33));
    let (prefill, decode) = prefill.zip(decode).expect("the worker is there");
    let report = |fleet: &mut FleetState, applied| {
        let load = LoadReport {
            applied_legs: applied,
            ..idle()
        };
        fleet.on_report(key, Some(&load), NOW);
        fleet.recount(key);
        view(fleet, 0).outstanding
    };
    // 7 blocks of prompt; 3 of prompt and 4 for growth.
    let all = Outstanding {
        prefill_tokens: 100,
        requests: 2,
        sequences: 1,
        awaited_sequences: 1,
        kv_tokens: 33,
        promised_blocks: 14,
        waiting_kv_tokens: 0,
    };
    assert_eq!(view(&fleet, 0).outstanding, all);
    // Many reports may come before the worker's engine has the legs.
    for applied in [None, Some(0), Some(0), Some(0)] {
        assert_eq!(report(&mut fleet, applied), all);
    }
    assert_eq!((prefill.number, decode.number), (1, 2));
    let only_decode = Outstanding {
        prefill_tokens: 0,
        requests: 1,
        promised_blocks: 14,
        ..all
    };
    assert_eq!(report(&mut fleet, Some(1)), only_decode);
    let promised = |promised_blocks| Outstanding {
        promised_blocks,
        ..Outstanding::default()
    };
    // This worker reports the sequence as one that waits, and not its KV.
    let waits = Outstanding {
        kv_tokens: 33,
        ..promised(14)
    };
    assert_eq!(report(&mut fleet, Some(2)), waits);
    fleet.on_output(key, decode, 0, 0);
    assert_eq!(report(&mut fleet, Some(2)), promised(7));
    fleet.on_ended(key, prefill, None);
    assert_eq!(report(&mut fleet, Some(2)), promised(0));
}

#[test]
fn the_kv_of_a_sequence_that_waits_is_counted_once() {
    let mut fleet = fleet(1);
    let key = fleet.join(WorkerId(0), info("a"), NOW).expect("joined");
    let leg = fleet.on_dispatched(key, &spec(LegKind::Decode, 33));
    let leg = leg.expect("the worker is there");
    let mut report = |applied, reported, running_kv_tokens, waiting_kv_tokens| {
        let load = LoadReport {
            applied_legs: Some(applied),
            running_kv_tokens,
            waiting_kv_tokens,
            ..idle()
        };
        if reported {
            fleet.on_report(key, Some(&load), NOW);
        } else {
            fleet.on_output(key, leg, 0, 0);
        }
        fleet.recount(key);
        view(&fleet, 0).kv_tokens()
    };
    // By us, by us as the worker does not know, by the worker, and when it decodes.
    assert_eq!(report(0, true, 0, Some(0)), 33);
    assert_eq!(report(1, true, 0, None), 33);
    assert_eq!(report(1, true, 0, Some(33)), 33);
    assert_eq!(report(1, true, 33, Some(0)), 33);
    assert_eq!(report(1, false, 33, Some(0)), 33);
    // With what other routers have sent there.
    assert_eq!(report(1, true, 33, Some(500)), 533);
}

#[test]
fn a_router_that_placed_nothing_avoids_the_kv_that_others_wait_with() {
    let shares = |knows: bool| {
        let mut fleet = fleet(2);
        for (worker, waiting_kv_tokens) in [(0, 6_000), (1, 300)] {
            let engine = format!("e{worker}");
            let key = fleet.join(WorkerId(worker), info(&engine), NOW);
            let load = LoadReport {
                waiting_requests: 6,
                waiting_sequences: 6,
                waiting_kv_tokens: knows.then_some(waiting_kv_tokens),
                ..idle()
            };
            let key = key.expect("joined");
            fleet.on_report(key, Some(&load), NOW);
            fleet.recount(key);
        }
        let placed = |_| {
            let placed = fleet.place(&RequestView::new(100, 100)).expect("a worker");
            placed.decode.key.worker
        };
        let workers: Vec<WorkerId> = (0..20).map(placed).collect();
        [0, 1].map(|id| workers.iter().filter(|worker| worker.0 == id).count())
    };
    assert_eq!(shares(true), [0, 20]);
    // Of workers that do not report it: the same number of sequences waits at each.
    assert!(shares(false).iter().all(|share| *share > 0));
}

#[test]
fn of_a_worker_without_load_reports_our_legs_count_until_they_end() {
    let mut fleet = fleet(1);
    let silent = WorkerInfo {
        capabilities: Capabilities {
            reports_load: false,
            ..Capabilities::default()
        },
        ..info("a")
    };
    let key = fleet.join(WorkerId(0), silent, NOW).expect("joined");
    let leg = fleet.on_dispatched(key, &spec(LegKind::Colocated, 100));
    let leg = leg.expect("the worker is there");
    let mut counted = |event: fn(&mut FleetState, WorkerKey, LegSlot)| {
        event(&mut fleet, key, leg);
        fleet.on_report(key, None, NOW);
        fleet.recount(key);
        view(&fleet, 0).outstanding
    };
    let all = counted(|_, _, _| {});
    assert_eq!((all.prefill_tokens, all.requests), (100, 1));
    let decoding = counted(|fleet, key, slot| fleet.on_output(key, slot, 0, 0));
    assert_eq!((decoding.prefill_tokens, decoding.requests), (0, 1));
    assert_eq!(decoding.promised_blocks, all.promised_blocks);
    let ended = counted(|fleet, key, leg| fleet.on_ended(key, leg, None));
    assert_eq!(ended, Outstanding::default());
}

#[test]
fn the_bookkeeping_of_an_ended_leg_is_used_again() {
    let mut fleet = fleet(1);
    let key = fleet.join(WorkerId(0), info("a"), NOW).expect("joined");
    let mut dispatch = || fleet.on_dispatched(key, &spec(LegKind::Colocated, 16));
    let (first, second) = (dispatch().expect("a slot"), dispatch().expect("a slot"));
    assert_ne!(first, second);
    fleet.on_ended(key, first, None);
    let third = fleet.on_dispatched(key, &spec(LegKind::Colocated, 16));
    let third = third.expect("a slot");
    assert_eq!((third.index, third.number), (first.index, 3));
    assert_eq!(view(&fleet, 0).outstanding.requests, 2);
    fleet.leave(key);
    let late = fleet.on_dispatched(key, &spec(LegKind::Colocated, 16));
    assert_eq!(late, None, "the connection is gone");
    assert_eq!(
        view(&fleet, 0).outstanding,
        Outstanding::default(),
        "and its legs with it"
    );
}

#[test]
fn one_engine_is_admitted_once_and_does_not_change_on_a_connection() {
    let mut fleet = fleet(2);
    let key = fleet.join(WorkerId(0), info("a"), NOW).expect("joined");
    assert_eq!(
        fleet.join(WorkerId(1), info("a"), NOW),
        Err(JoinError::Twice(WorkerId(0)))
    );
    let prefill = WorkerInfo {
        role: Role::Prefill,
        ..info("a")
    };
    assert!(fleet.on_info(key, prefill));
    assert_eq!(view(&fleet, 0).role, Role::Prefill);
    assert!(!fleet.on_info(key, info("b")), "another engine");
    fleet.leave(key);
    assert!(fleet.join(WorkerId(1), info("a"), NOW).is_ok());
}

#[test]
fn reported_steps_and_handoffs_teach_the_cost_model() {
    let mut fleet = fleet(2);
    let key = fleet.join(WorkerId(0), info("a"), NOW).expect("joined");
    let other = fleet.join(WorkerId(1), info("b"), NOW).expect("joined");
    let load = |number| LoadReport {
        last_decode: Some(StepSample {
            number,
            duration_s: 0.01,
            sequences: 4,
            kv_tokens: 400,
            ..StepSample::default()
        }),
        ..idle()
    };
    let step_s = |fleet: &FleetState| fleet.costs.hardware.rates()[0].decode_s(4.0, 400.0);
    for number in 1..10 {
        fleet.on_report(key, Some(&load(number)), NOW);
    }
    let learnt_s = step_s(&fleet);
    assert!((learnt_s / 0.01 - 1.0).abs() < 0.05, "{learnt_s}");
    fleet.on_report(key, Some(&load(9)), NOW);
    assert_eq!(step_s(&fleet), learnt_s, "a repeated sample counts once");
    assert_eq!(view(&fleet, 0).hardware, view(&fleet, 1).hardware);

    let handoff_s = |fleet: &FleetState| fleet.costs.links.handoff_s(false, 100.0);
    let before_s = handoff_s(&fleet);
    let timings = LegTimings {
        transfer_exposed: Duration::from_millis(300),
        transfer_bytes: 1,
        ..LegTimings::default()
    };
    let decode = LegSpec {
        handoff: Some(Handoff::With(info("a").peer)),
        ..spec(LegKind::Decode, 100)
    };
    let first = LegTimings {
        handshake: Duration::from_millis(200),
        ..timings.clone()
    };
    let mut teach = |timings: &LegTimings| {
        let leg = fleet.on_dispatched(other, &decode).expect("a slot");
        fleet.on_ended(other, leg, Some(timings));
        handoff_s(&fleet)
    };
    for _ in 0..10 {
        assert_eq!(teach(&first), before_s, "they met first");
    }
    for _ in 0..9 {
        teach(&timings);
    }
    assert!(teach(&timings) > 10.0 * before_s, "a's host is not b's");
}

#[test]
fn a_draining_worker_gets_nothing_new_and_keeps_its_legs() {
    let mut fleet = fleet(2);
    let first = fleet.join(WorkerId(0), info("a"), NOW).expect("joined");
    fleet.join(WorkerId(1), info("b"), NOW).expect("joined");
    let leg = fleet.on_dispatched(first, &spec(LegKind::Colocated, 16));
    assert!(leg.is_some());
    let placed = |fleet: &mut FleetState| {
        let Placed {
            prefill, decode, ..
        } = fleet.place(&RequestView::new(10, 5)).ok()?;
        Some([prefill.key.worker.0, decode.key.worker.0])
    };
    assert!(fleet.drain(WorkerId(0), DrainReason::Asked));
    assert!(fleet.drain(WorkerId(0), DrainReason::Unlisted));
    // Reports do not change that.
    assert!(!fleet.on_report(first, Some(&idle()), NOW));
    for _ in 0..4 {
        assert_eq!(placed(&mut fleet), Some([1, 1]));
    }
    assert_eq!(view(&fleet, 0).health, Health::Draining);
    assert_eq!(fleet.worker(WorkerId(0)).map(|w| w.running_legs()), Some(1));

    // Nor does a new connection.
    fleet.leave(first);
    fleet.join(WorkerId(0), info("a"), NOW).expect("joined");
    assert!(!fleet.undrain(WorkerId(0), DrainReason::Unlisted));
    assert_eq!(placed(&mut fleet), Some([1, 1]));
    assert!(fleet.undrain(WorkerId(0), DrainReason::Asked));
    assert!(fleet.drain(WorkerId(1), DrainReason::Asked));
    assert_eq!(placed(&mut fleet), Some([0, 0]));
    assert!(!fleet.drain(WorkerId(7), DrainReason::Asked), "nobody");
}

#[test]
fn a_worker_that_says_it_ends_gets_nothing_new_until_it_is_another_one() {
    let mut fleet = fleet(2);
    let first = fleet.join(WorkerId(0), info("a"), NOW).expect("joined");
    fleet.join(WorkerId(1), info("b"), NOW).expect("joined");
    let leg = fleet.on_dispatched(first, &spec(LegKind::Colocated, 16));
    assert!(leg.is_some());
    let ending = LoadReport {
        is_draining: true,
        ..idle()
    };
    assert!(!fleet.on_report(first, Some(&ending), NOW));
    assert!(
        fleet
            .worker(WorkerId(0))
            .is_some_and(|w| { w.drains_because(DrainReason::Ending) && w.running_legs() == 1 })
    );
    // A report without a load says nothing about it.
    assert!(!fleet.on_report(first, None, NOW));
    for _ in 0..4 {
        let placed = fleet.place(&RequestView::new(10, 5)).expect("a placement");
        assert_eq!(placed.decode.key.worker, WorkerId(1));
    }
    fleet.leave(first);
    fleet.join(WorkerId(0), info("c"), NOW).expect("joined");
    assert_eq!(view(&fleet, 0).health, Health::Ready);
}

#[test]
fn ids_are_not_used_again_and_a_removed_workers_key_is_dead() {
    let mut fleet = fleet(1);
    let key = fleet.join(WorkerId(0), info("a"), NOW).expect("joined");
    fleet.remove(WorkerId(0));
    assert_eq!(fleet.workers().count(), 0);
    assert!(fleet.place(&RequestView::new(10, 5)).is_err());
    assert_eq!(fleet.on_dispatched(key, &spec(LegKind::Decode, 1)), None);
    let again = fleet.join(WorkerId(0), info("a"), NOW);
    assert_eq!(again, Err(JoinError::Removed(WorkerId(0))));
    let next = fleet.add();
    assert_eq!(next, WorkerId(1));
    let back = fleet.join(next, info("a"), NOW).expect("the same engine");
    assert!(back.connection > key.connection);
}
