//! The link against a real gRPC server, and the registry's bookkeeping.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tasuki_core::{Health, RequestView, WorkerId, WorkerView};
use tasuki_policy::PolicyConfig;
use tasuki_wire::v1::worker_message::Message;
use tasuki_wire::v1::{self, Role};
use tokio::sync::{mpsc, watch};

use super::registry::{JoinError, NotReady};
use super::testing::{FakeWorker, idle, info, soon, until};
use super::{Liveness, Mail, Registry, Seat, keep_connected};

struct Linked {
    registry: Arc<Registry>,
    _shutdown: watch::Sender<bool>,
}

fn link(addresses: &[String], liveness: Liveness) -> Linked {
    let registry = registry(addresses.len());
    let (shutdown, down) = watch::channel(false);
    for (id, address) in (0..).zip(addresses) {
        let registry = Arc::clone(&registry);
        let (address, down) = (address.clone(), down.clone());
        tokio::spawn(keep_connected(
            WorkerId(id),
            address,
            registry,
            liveness,
            down,
        ));
    }
    Linked {
        registry,
        _shutdown: shutdown,
    }
}

fn registry(workers: usize) -> Arc<Registry> {
    let policy = PolicyConfig::default();
    Arc::new(Registry::new(workers, policy, Instant::now()))
}

fn view(registry: &Registry, worker: usize) -> WorkerView {
    registry.read(|slots| slots[worker].view.clone())
}

fn health(registry: &Registry, worker: usize) -> Health {
    view(registry, worker).health
}

fn submit(attempt: &str, leg: v1::Leg, prompt: usize) -> v1::Submit {
    v1::Submit {
        request_id: attempt.to_owned(),
        leg: leg.into(),
        prompt_tokens: vec![0; prompt],
        choices: vec![0],
        sampling: Some(v1::SamplingParams {
            max_tokens: 1_000,
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn load_report() -> v1::StepReport {
    v1::StepReport {
        load: Some(idle(Role::Mixed)),
        ..Default::default()
    }
}

#[tokio::test]
async fn a_worker_that_comes_back_is_another_engine_and_its_legs_are_lost() {
    let mut worker = FakeWorker::start().await;
    let linked = link(&[worker.address.to_string()], Liveness::default());
    let registry = &linked.registry;
    let mut session = worker.session().await;
    session.say(Message::Info(info("a", Role::Mixed)));
    until("the worker", || registry.readiness(Instant::now()).is_ok()).await;

    let (Seat { key, peer }, _) = registry.place(&RequestView::new(10, 5)).expect("a seat");
    assert_eq!(
        (peer.engine_id.as_str(), peer.kv_endpoint.as_str()),
        ("a", "a:1")
    );
    let (sender, mut mail) = mpsc::unbounded_channel();
    assert!(registry.submit(key, submit("r.0", v1::Leg::Colocated, 10), &sender));
    assert_eq!(session.submit().await.request_id, "r.0");
    session.output("r.0", 0, &[5], v1::FinishReason::FinishNone);
    let heard = soon("an output", mail.recv()).await;
    assert!(matches!(heard, Some(Mail::Output(from, output))
        if from == key && output.tokens == [5]));

    let address = worker.address;
    drop((worker, session));
    assert!(matches!(soon("the loss", mail.recv()).await, Some(Mail::Lost(lost)) if lost == key));
    assert_eq!(health(registry, 0), Health::Down);
    assert!(!registry.submit(key, submit("r.1", v1::Leg::Colocated, 10), &sender));

    let mut worker = FakeWorker::start_at(address).await;
    let back = Instant::now();
    let session = worker.session().await;
    assert!(
        back.elapsed() < Duration::from_secs(2),
        "{:?}",
        back.elapsed()
    );
    session.say(Message::Info(info("b", Role::Mixed)));
    until("the worker again", || {
        registry.readiness(Instant::now()).is_ok()
    })
    .await;
    let (seat, _) = registry.place(&RequestView::new(10, 5)).expect("a seat");
    assert_eq!(seat.peer.engine_id, "b");
    assert_ne!(seat.key, key);
    assert!(!registry.submit(key, submit("r.2", v1::Leg::Colocated, 10), &sender));
}

#[tokio::test]
async fn readiness_waits_for_every_workers_first_answer() {
    let mut prefill = FakeWorker::start().await;
    let mut decode = FakeWorker::start().await;
    let gone = FakeWorker::start().await.address.to_string();
    let addresses = [
        prefill.address.to_string(),
        decode.address.to_string(),
        gone,
    ];
    let began = Instant::now();
    let linked = link(&addresses, Liveness::default());
    let registry = &linked.registry;
    let readiness = || registry.readiness(began);
    let session = prefill.session().await;
    session.say(Message::Info(info("p", Role::Prefill)));
    // The prefill worker could serve alone, and nobody listens at the third address.
    let waits = NotReady::Starting {
        waiting: 1,
        workers: 3,
    };
    until("the prefill worker", || readiness() == Err(waits)).await;
    let later = began + Duration::from_secs(10);
    assert_eq!(
        registry.readiness(later),
        Ok(()),
        "it waits, but not for ever"
    );
    let session = decode.session().await;
    session.say(Message::Info(info("d", Role::Decode)));
    until("the decode worker", || readiness().is_ok()).await;
    drop(session);
    until("its end", || health(registry, 1) == Health::Down).await;
    assert_eq!(readiness(), Ok(()), "only first answers are waited for");
}

#[tokio::test]
async fn another_protocol_is_not_taken_in() {
    let mut worker = FakeWorker::start().await;
    let linked = link(&[worker.address.to_string()], Liveness::default());
    let mut session = worker.session().await;
    let mut stranger = info("a", Role::Mixed);
    stranger.protocol_version += 1;
    session.say(Message::Info(stranger));
    assert!(session.next().await.is_none(), "the router hangs up");
    assert!(linked.registry.readiness(Instant::now()).is_err());
    assert!(linked.registry.read(|slots| slots[0].info.is_none()));
    // It dials again: the worker may be replaced by one of the right version.
    let session = worker.session().await;
    session.say(Message::Info(info("a", Role::Mixed)));
    until("the right version", || {
        linked.registry.readiness(Instant::now()).is_ok()
    })
    .await;
}

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

#[tokio::test]
async fn one_engine_is_taken_in_once() {
    let mut worker = FakeWorker::start().await;
    let address = worker.address.to_string();
    let linked = link(&[address.clone(), address], Liveness::default());
    let first = worker.session().await;
    first.say(Message::Info(info("a", Role::Mixed)));
    until("the worker", || {
        linked.registry.readiness(Instant::now()).is_ok()
    })
    .await;
    let mut second = worker.session().await;
    second.say(Message::Info(info("a", Role::Mixed)));
    assert!(second.next().await.is_none());
    let up = |registry: &Registry| {
        (0..2)
            .filter(|&at| health(registry, at) == Health::Ready)
            .count()
    };
    assert_eq!(up(&linked.registry), 1);
}

#[tokio::test]
async fn silence_is_doubted_then_ended() {
    let liveness = Liveness {
        suspect_after: Duration::from_millis(100),
        lost_after: Duration::from_secs(3),
        ..Liveness::default()
    };
    let mut worker = FakeWorker::start().await;
    let linked = link(&[worker.address.to_string()], liveness);
    let registry = &linked.registry;
    let mut session = worker.session().await;
    session.say(Message::Info(info("a", Role::Mixed)));
    until("doubt", || health(registry, 0) == Health::Suspect).await;
    assert!(registry.readiness(Instant::now()).is_err());
    let mut changes = registry.changes();
    session.report(load_report());
    // Only a worker that is trusted again is announced.
    soon("the recovery's notice", changes.changed())
        .await
        .expect("a registry");
    assert!(session.next().await.is_none(), "given up in the end");
    until("the end", || health(registry, 0) == Health::Down).await;
}

#[tokio::test]
async fn role_and_load_follow_the_worker() {
    let mut worker = FakeWorker::start().await;
    let linked = link(&[worker.address.to_string()], Liveness::default());
    let registry = &linked.registry;
    let session = worker.session().await;
    session.say(Message::Info(info("a", Role::Prefill)));
    until("the worker", || registry.readiness(Instant::now()).is_ok()).await;
    session.report(v1::StepReport {
        load: Some(v1::Load {
            running_requests: 3,
            waiting_prefill_tokens: 70,
            free_blocks: 40,
            prefill_tokens_per_s: 500.0,
            decode_step_s: 0.011,
            ..idle(Role::Decode)
        }),
        ..Default::default()
    });
    until("the load", || view(registry, 0).load.running_requests == 3).await;
    let view = view(registry, 0);
    assert_eq!(view.role, tasuki_core::Role::Decode);
    assert_eq!(view.load.waiting_prefill_tokens, 70);
    assert_eq!(view.load.free_blocks, 40);
    // 11 ms with three in the batch, at a slope of 5% for each further one.
    assert!((view.load.single_step_s - 0.01).abs() < 1e-9);
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
