//! What a request does that waits for one worker while another has time.

use super::*;
use crate::fleet::{DrainReason, LoadReport, WorkerInfo};
use crate::testing::info;

use crate::{Effect, FleetState, Generation, Machine, MachineConfig, SamplingParams, WorkerKey};
use tasuki_core::{Chunks, HandoffKind, Identity, Indivisible, Payload, Role};
use tasuki_policy::PolicyConfig;

#[test]
fn no_request_waits_for_a_worker_while_one_that_costs_hardly_more_has_time() {
    let mut fleet = FleetState::new(vec![Vec::new()], PolicyConfig::default());
    // One with prompts, and one where a prompt would stall some that decode.
    for (name, waiting_prefill_tokens, running_sequences) in [("a", 1_850, 0), ("b", 0, 10)] {
        let id = fleet.add();
        let mut info = info(name);
        info.num_blocks = 100_000;
        let key = fleet.join(id, info, Duration::ZERO).expect("it joins");
        let load = LoadReport {
            running_requests: 1,
            waiting_prefill_tokens,
            running_sequences,
            running_kv_tokens: 500 * u64::from(running_sequences),
            free_blocks: 90_000,
            ..LoadReport::default()
        };
        fleet.on_report(key, Some(&load), Duration::ZERO);
        fleet.recount(key);
    }
    let generation = Generation {
        model: ModelId(0),
        request_id: "r".to_owned(),
        prompt: (0..200).collect(),
        n: 1,
        sampling: SamplingParams {
            max_tokens: 20,
            ..SamplingParams::default()
        },
        cache_salt: String::new(),
        tenant: "a".into(),
        priority: 0,
        opaque: None,
    };
    let mut machine = Machine::new(generation, Chunks::default(), MachineConfig::default());
    let mut admission = Admission::new(AdmissionConfig::default());
    let entrant = Entrant {
        view: machine.request(),
        tenant: "a".into(),
        priority: 0,
        arrived: Duration::from_secs(1),
    };
    let id = admission.enter(entrant, &fleet);
    for waited_ms in [0, 9] {
        let now = Duration::from_millis(1_000 + waited_ms);
        assert_eq!(admission.settle(now, &fleet), [], "after {waited_ms} ms");
    }
    let now = Duration::from_millis(1_010);
    let verdicts = admission.settle(now, &fleet);
    let [(let_in, Verdict::Admitted(forecast, ref avoid))] = verdicts[..] else {
        panic!("{verdicts:?}");
    };
    assert_eq!((let_in, forecast.waited), (id, true));
    // It is placed as it was let in.
    machine.start(forecast.waited, avoid, now, &mut fleet);
    let Some(Effect::Dispatch { leg, .. }) = machine.next_effect() else {
        panic!("it is not placed");
    };
    assert_eq!(leg.worker.worker, WorkerId(1));
}

/// A fleet with a worker for short requests and one for long ones, both busy; a long request that
/// waits, a short one and another long one behind it.
fn behind_a_long_one() -> (FleetState, [WorkerKey; 2], Admission, [EntrantId; 3]) {
    let mut fleet = FleetState::new(vec![Vec::new()], PolicyConfig::default());
    let keys = [("small", 1_000), ("large", 100_000)].map(|(name, max_model_len)| {
        let id = fleet.add();
        let mut info = info(name);
        info.max_model_len = max_model_len;
        info.num_blocks = 100_000;
        let key = fleet.join(id, info, Duration::ZERO).expect("it joins");
        fleet.on_report(key, Some(&load(1_000_000)), Duration::ZERO);
        key
    });
    let mut admission = Admission::new(AdmissionConfig::default());
    let ids = [5_000, 100, 6_000].map(|prompt_tokens| {
        admission.enter(entrant("a", RequestView::new(prompt_tokens, 10)), &fleet)
    });
    assert_eq!(admission.settle(Duration::ZERO, &fleet), []);
    (fleet, keys, admission, ids)
}

fn load(waiting_prefill_tokens: u64) -> LoadReport {
    LoadReport {
        running_requests: 1,
        waiting_prefill_tokens,
        free_blocks: 90_000,
        ..LoadReport::default()
    }
}

#[test]
fn a_request_that_no_worker_will_ever_take_holds_nobody_up() {
    let (mut fleet, _, mut admission, ids) = behind_a_long_one();
    fleet.remove(WorkerId(1));
    let verdicts = admission.settle(Duration::ZERO, &fleet);
    assert!(
        matches!(verdicts[..], [(id, Verdict::Admitted(..))] if id == ids[0]),
        "{verdicts:?}"
    );
}

#[test]
fn a_request_whose_only_worker_that_serves_it_whole_is_down_holds_nobody_up() {
    let config = PolicyConfig {
        strict_roles: true,
        ..PolicyConfig::default()
    };
    let mut fleet = FleetState::new(vec![Vec::new()], config);
    let keys = [Role::Mixed, Role::Prefill, Role::Decode].map(|role| {
        let id = fleet.add();
        let mut info = WorkerInfo {
            role,
            ..info(&role.to_string())
        };
        info.capabilities.handoff = HandoffKind::Ticket;
        let key = fleet.join(id, info, Duration::ZERO).expect("it joins");
        fleet.on_report(key, Some(&load(0)), Duration::ZERO);
        key
    });
    let mut admission = Admission::new(AdmissionConfig::default());
    let ids = [Some(Indivisible::PromptLogprobs), None].map(|indivisible| {
        let view = RequestView {
            indivisible,
            ..RequestView::new(100, 10)
        };
        admission.enter(entrant("a", view), &fleet)
    });
    fleet.leave(keys[0]);
    let verdicts = admission.settle(Duration::ZERO, &fleet);
    assert!(
        matches!(verdicts[..], [(id, Verdict::Admitted(..))] if id == ids[1]),
        "{verdicts:?}"
    );
}

#[test]
fn a_request_whose_adapter_or_engine_is_down_holds_nobody_up() {
    let adapter = RequestView {
        adapters: vec!["x".into()],
        ..RequestView::new(100, 10)
    };
    let engine = RequestView {
        bound_to: Some(Identity([9; 16])),
        ..RequestView::new(100, 10)
    };
    for (view, drains) in [(&adapter, false), (&adapter, true), (&engine, false)] {
        let mut fleet = FleetState::new(Vec::new(), PolicyConfig::default());
        let [with, _] = [("a", vec!["x".to_owned()], 9), ("b", Vec::new(), 1)].map(
            |(engine, adapters, identity)| {
                let id = fleet.add();
                let mut info = WorkerInfo {
                    adapters,
                    ..info(engine)
                };
                info.capabilities.payload = Payload::Opaque;
                info.domain.identity = Identity([identity; 16]);
                let key = fleet.join(id, info, Duration::ZERO).expect("it joins");
                fleet.on_report(key, Some(&load(0)), Duration::ZERO);
                key
            },
        );
        let mut admission = Admission::new(AdmissionConfig::default());
        let ids = [view.clone(), RequestView::new(100, 10)]
            .map(|view| admission.enter(entrant("a", view), &fleet));
        if drains {
            fleet.drain(WorkerId(0), DrainReason::Asked);
        } else {
            fleet.leave(with);
        }
        let verdicts = admission.settle(Duration::ZERO, &fleet);
        assert!(
            matches!(verdicts[..], [(id, Verdict::Admitted(..))] if id == ids[1]),
            "{view:?}, drains: {drains}: {verdicts:?}"
        );
    }
}

#[test]
fn a_request_whose_worker_is_down_holds_up_no_shorter_one() {
    let (mut fleet, [small, large], mut admission, [long, short, longer]) = behind_a_long_one();
    let seconds = Duration::from_secs;
    fleet.leave(large);
    assert_eq!(admission.settle(seconds(1), &fleet), []);
    fleet.on_report(small, Some(&load(0)), seconds(2));
    let let_in = |verdicts: &[_]| match *verdicts {
        [(id, Verdict::Admitted(..))] => id,
        _ => panic!("{verdicts:?}"),
    };
    assert_eq!(let_in(&admission.settle(seconds(2), &fleet)), short);
    admission.passed(short);
    // Those that are long wait for their worker, and no longer than that may take.
    assert_eq!(admission.settle(seconds(10), &fleet), []);
    for id in [long, longer] {
        assert_eq!(let_in(&admission.settle(seconds(11), &fleet)), id);
        admission.passed(id);
    }
    assert_eq!(admission.waiting(), (0, 0, 0));
}
