use std::time::Instant;

use tasuki_core::WorkerId;
use tasuki_wire::v1::{self, Role};
use tokio::sync::mpsc;

use super::super::registry::JoinError;
use super::super::testing::{idle, info};
use super::{load_report, registry, submit, view};

#[test]
fn a_router_keeps_the_model_of_its_first_worker_though_that_is_gone() {
    let registry = registry(1);
    let join = |info| {
        let (messages, _) = mpsc::unbounded_channel();
        registry.join(WorkerId(0), info, messages, Instant::now())
    };
    let first = join(info("a", Role::Mixed)).expect("the first one is taken in");
    registry.leave(first);
    let other = v1::WorkerInfo {
        model: "large".to_owned(),
        identity: vec![8; 16],
        ..info("b", Role::Mixed)
    };
    let refused = join(other).expect_err("another model");
    assert!(matches!(refused, JoinError::OtherModel { .. }), "{refused}");
    assert!(refused.to_string().contains("\"large\""), "{refused}");
    let bfloat16 = v1::WorkerInfo {
        identity: vec![9; 16],
        ..info("c", Role::Mixed)
    };
    join(bfloat16).expect("the same model in another dtype is taken in");
}

#[test]
fn what_we_sent_counts_until_the_worker_counts_it() {
    let registry = registry(1);
    let (messages, mut sent) = mpsc::unbounded_channel();
    let now = Instant::now();
    let key = registry
        .join(WorkerId(0), info("a", Role::Mixed), messages, now)
        .expect("joined");
    let (sender, _mail) = mpsc::unbounded_channel();
    assert!(registry.submit(key, submit("p.0", v1::Leg::Prefill, 100), &sender));
    assert!(registry.submit(key, submit("d.0", v1::Leg::Decode, 33), &sender));
    assert!(sent.try_recv().is_ok() && sent.try_recv().is_ok());
    let outstanding = || view(&registry, 0).outstanding;
    assert_eq!(outstanding().prefill_tokens, 100);
    assert_eq!(outstanding().requests, 2);
    // 7 blocks of prompt; 3 of prompt and 4 for growth.
    assert_eq!(outstanding().promised_blocks, 14);

    // A report that was under way tells nothing yet, the second one counts.
    registry.report(key, load_report(), now);
    assert_eq!(outstanding().prefill_tokens, 100);
    registry.report(key, load_report(), now);
    assert_eq!(outstanding().prefill_tokens, 0);
    assert_eq!(outstanding().requests, 0);
    assert_eq!(outstanding().promised_blocks, 14);

    let output = v1::Output {
        request_id: "d.0".to_owned(),
        ..Default::default()
    };
    let report = v1::StepReport {
        outputs: vec![output],
        ..Default::default()
    };
    registry.report(key, report, now);
    assert_eq!(outstanding().promised_blocks, 7);
    let ended = v1::LegEnd {
        request_id: "p.0".to_owned(),
        ..Default::default()
    };
    let report = v1::StepReport {
        ended: vec![ended],
        ..Default::default()
    };
    registry.report(key, report, now);
    assert_eq!(outstanding(), tasuki_core::Outstanding::default());
}

#[test]
fn what_workers_say_of_themselves_is_checked() {
    let registry = registry(2);
    let now = Instant::now();
    let join = |worker, info| {
        let (messages, _) = mpsc::unbounded_channel();
        registry.join(WorkerId(worker), info, messages, now)
    };
    let mut short = info("a", Role::Mixed);
    short.identity = vec![1; 15];
    assert_eq!(join(0, short), Err(JoinError::Identity(15)));
    let key = join(0, info("a", Role::Mixed)).expect("joined");
    assert_eq!(
        join(1, info("a", Role::Mixed)),
        Err(JoinError::Twice(WorkerId(0)))
    );
    assert_eq!(
        registry.update_info(key, info("a", Role::Prefill)),
        Ok(true)
    );
    assert_eq!(
        registry.update_info(key, info("b", Role::Prefill)),
        Ok(false)
    );
    registry.leave(key);
    assert!(join(1, info("a", Role::Mixed)).is_ok());
}

#[test]
fn one_router_serves_one_model() {
    let registry = registry(2);
    let join = |worker, name: &str, model: &str, identity| {
        let (messages, _) = mpsc::unbounded_channel();
        let mut info = info(name, Role::Mixed);
        info.model = model.to_owned();
        info.identity = vec![identity; 16];
        registry.join(WorkerId(worker), info, messages, Instant::now())
    };
    let first = join(0, "a", "m", 1).expect("joined");
    let error = join(1, "b", "other", 2).expect_err("another model");
    assert!(
        error
            .to_string()
            .contains("\"other\", worker 0 serves \"m\""),
        "{error}"
    );
    let same_under_another_name = join(1, "b", "other", 1).expect("joined");
    registry.leave(same_under_another_name);
    let another_dtype = join(1, "b", "m", 2).expect("joined");
    registry.leave(another_dtype);
    registry.leave(first);
    assert!(join(1, "b", "other", 2).is_ok());
}

#[test]
fn an_idle_workers_speeds_are_forgotten_in_time() {
    let registry = registry(1);
    let (messages, _sent) = mpsc::unbounded_channel();
    let now = Instant::now();
    let key = registry
        .join(WorkerId(0), info("a", Role::Mixed), messages, now)
        .expect("joined");
    let report = |running_requests| v1::StepReport {
        load: Some(v1::Load {
            running_requests,
            prefill_tokens_per_s: 500.0,
            decode_step_s: 0.01,
            ..idle(Role::Mixed)
        }),
        ..Default::default()
    };
    let speeds = || {
        let load = view(&registry, 0).load;
        (load.prefill_tokens_per_s, load.single_step_s)
    };
    registry.report(key, report(1), now);
    for _ in 0..8 {
        registry.report(key, report(0), now);
    }
    assert_eq!(speeds(), (500.0, 0.01));
    registry.report(key, report(0), now);
    registry.report(key, report(0), now);
    assert_eq!(speeds(), (0.0, 0.0));
    registry.report(key, report(1), now);
    assert_eq!(speeds(), (500.0, 0.01));
}
