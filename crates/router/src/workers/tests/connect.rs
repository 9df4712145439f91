use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tasuki_core::{Health, ModelId, RequestView, WorkerId};
use tasuki_flow::fleet::NotReady;
use tasuki_flow::{Fleet, Input, LegId, LegKind, LegSpec, WorkerRef};
use tasuki_wire::v1::worker_message::Message;
use tasuki_wire::v1::{self, Role};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::super::connect::keep_connected;
use super::super::grpc_link::MOST_BACKLOG_BYTES;
use super::super::testing::{FakeWorker, idle, info, soon, until};
use super::super::{Dialling, Dispatched, Liveness, Registry};
use super::{registry, spec, view};
use crate::access_log::tests::Lines;
use crate::config::AccessLog;
use crate::tls::fleet::WorkerTransport;

const MODEL: ModelId = ModelId(0);

struct Linked {
    registry: Arc<Registry>,
    _tasks: JoinSet<Infallible>,
}

fn link(addresses: &[String], liveness: Liveness) -> Linked {
    let registry = registry(addresses.len());
    let mut tasks = JoinSet::new();
    for (id, address) in (0..).zip(addresses) {
        let registry = Arc::clone(&registry);
        tasks.spawn(keep_connected(
            WorkerId(id),
            address.clone(),
            registry,
            Dialling {
                liveness,
                transport: WorkerTransport::Plain,
            },
        ));
    }
    Linked {
        registry,
        _tasks: tasks,
    }
}

/// The worker that gets both legs of a short request.
fn placed(registry: &Registry) -> WorkerRef {
    let mut fleet = registry;
    let placed = fleet.place(&RequestView::new(10, 5)).expect("a placement");
    placed.prefill
}

fn dispatch(registry: &Registry, leg: LegId, inbox: &mpsc::UnboundedSender<Input>) -> bool {
    let name = format!("r.{}", leg.attempt);
    let dispatched = registry.dispatch(leg, name, spec(LegKind::Colocated), inbox);
    matches!(dispatched, Dispatched::Sent)
}

fn health(registry: &Registry, worker: usize) -> Health {
    view(registry, worker).health
}

#[tokio::test]
async fn a_worker_that_comes_back_is_another_engine_and_its_legs_are_lost() {
    let mut worker = FakeWorker::start().await;
    let linked = link(&[worker.address.to_string()], Liveness::default());
    let registry = &linked.registry;
    let mut session = worker.session().await;
    session.send(Message::Info(info("a", Role::Mixed)));
    until("the worker", || {
        registry.readiness(MODEL, Instant::now()).is_ok()
    })
    .await;

    let WorkerRef { key, peer, .. } = placed(registry);
    assert_eq!(
        (peer.engine_id.as_str(), peer.kv_endpoint.as_str()),
        ("a", "a:1")
    );
    let (sender, mut inbox) = mpsc::unbounded_channel();
    let leg = |attempt| LegId {
        worker: key,
        attempt,
    };
    assert!(dispatch(registry, leg(0), &sender));
    assert_eq!(session.submit().await.request_id, "r.0");
    session.output("r.0", 0, &[5], v1::FinishReason::FinishNone);
    let input = soon("an output", inbox.recv()).await;
    assert!(matches!(input, Some(Input::Output(from, output))
        if from == leg(0) && output.tokens == [5]));

    let address = worker.address;
    drop((worker, session));
    let input = soon("the loss", inbox.recv()).await;
    assert!(matches!(input, Some(Input::Lost(lost)) if lost == key));
    assert_eq!(health(registry, 0), Health::Down);
    assert!(!dispatch(registry, leg(1), &sender));

    let mut worker = FakeWorker::start_at(address).await;
    let back = Instant::now();
    let session = worker.session().await;
    assert!(
        back.elapsed() < Duration::from_secs(10),
        "{:?}",
        back.elapsed()
    );
    session.send(Message::Info(info("b", Role::Mixed)));
    until("the worker again", || {
        registry.readiness(MODEL, Instant::now()).is_ok()
    })
    .await;
    let back = placed(registry);
    assert_eq!(back.peer.engine_id, "b");
    assert_ne!(back.key, key);
    assert!(!dispatch(registry, leg(2), &sender));
}

#[tokio::test]
async fn a_worker_that_does_not_read_is_lost_when_too_much_waits_for_it() {
    let mut worker = FakeWorker::start().await;
    let linked = link(&[worker.address.to_string()], Liveness::default());
    let registry = &linked.registry;
    let is_ready = || registry.readiness(MODEL, Instant::now()).is_ok();
    let unread = worker.session().await;
    unread.send(Message::Info(info("a", Role::Mixed)));
    until("the worker", is_ready).await;

    let key = placed(registry).key;
    let (sender, mut inbox) = mpsc::unbounded_channel();
    let prompt: Arc<[u32]> = vec![7; 4 << 20].into();
    for attempt in 0..=MOST_BACKLOG_BYTES / size_of_val(&prompt[..]) {
        let attempt = attempt as u32;
        let leg = LegId {
            worker: key,
            attempt,
        };
        let spec = LegSpec {
            prompt: Arc::clone(&prompt),
            ..spec(LegKind::Colocated)
        };
        registry.dispatch(leg, format!("r.{attempt}"), spec, &sender);
    }
    let input = soon("the loss", inbox.recv()).await;
    assert!(matches!(input, Some(Input::Lost(lost)) if lost == key));

    let session = worker.session().await;
    session.send(Message::Info(info("a", Role::Mixed)));
    until("the worker again", is_ready).await;
}

#[tokio::test]
async fn an_error_is_logged_again_after_a_loss() {
    let (lines, _guard) = Lines::keep("info", AccessLog::Off);
    let refused = |lines: &Lines| {
        let text = lines.text();
        let logged = text.lines().filter(|line| line.contains("not reached"));
        logged.filter(|line| line.contains("refused")).count()
    };
    let address = FakeWorker::start().await.address;
    let linked = link(&[address.to_string()], Liveness::default());
    for losses in 0..2 {
        until("the error", || refused(&lines) == losses + 1).await;
        let mut worker = FakeWorker::start_at(address).await;
        let session = worker.session().await;
        session.send(Message::Info(info("a", Role::Mixed)));
        let is_ready = || linked.registry.readiness(MODEL, Instant::now()).is_ok();
        until("the worker", is_ready).await;
    }
}

#[tokio::test]
async fn a_worker_that_joins_and_ends_at_once_is_asked_ever_more_seldom() {
    let mut worker = FakeWorker::start().await;
    let _linked = link(&[worker.address.to_string()], Liveness::default());
    let began = Instant::now();
    for _ in 0..5 {
        let session = worker.session().await;
        session.send(Message::Info(info("a", Role::Mixed)));
    }
    let pauses = [50, 100, 200, 400].map(Duration::from_millis);
    assert!(
        began.elapsed() >= pauses.iter().sum::<Duration>(),
        "{:?}",
        began.elapsed()
    );
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
    let readiness = || registry.readiness(MODEL, began);
    let session = prefill.session().await;
    session.send(Message::Info(info("p", Role::Prefill)));
    // The prefill worker could serve alone, and nobody listens at the third address.
    let waits = NotReady::Starting {
        waiting: 1,
        workers: 3,
    };
    until("the prefill worker", || readiness() == Err(waits)).await;
    let later = began + Duration::from_secs(10);
    assert_eq!(
        registry.readiness(MODEL, later),
        Ok(()),
        "it waits, but not for ever"
    );
    let session = decode.session().await;
    session.send(Message::Info(info("d", Role::Decode)));
    until("the decode worker", || readiness().is_ok()).await;
    drop(session);
    until("its end", || health(registry, 1) == Health::Down).await;
    assert_eq!(readiness(), Ok(()), "only first answers are waited for");
}

#[tokio::test]
async fn another_protocol_is_not_admitted() {
    let mut worker = FakeWorker::start().await;
    let linked = link(&[worker.address.to_string()], Liveness::default());
    let mut session = worker.session().await;
    let mut stranger = info("a", Role::Mixed);
    stranger.protocol_version += 1;
    session.send(Message::Info(stranger));
    assert!(session.next().await.is_none(), "the router hangs up");
    assert!(linked.registry.readiness(MODEL, Instant::now()).is_err());
    let admitted = linked.registry.read(|known| known.state.info.is_some());
    assert_eq!(admitted, [false]);
    // It dials again: the worker may be replaced by one of the right version.
    let session = worker.session().await;
    session.send(Message::Info(info("a", Role::Mixed)));
    until("the right version", || {
        linked.registry.readiness(MODEL, Instant::now()).is_ok()
    })
    .await;
}

#[tokio::test]
async fn one_engine_is_admitted_once() {
    let mut worker = FakeWorker::start().await;
    let address = worker.address.to_string();
    let linked = link(&[address.clone(), address], Liveness::default());
    let first = worker.session().await;
    first.send(Message::Info(info("a", Role::Mixed)));
    until("the worker", || {
        linked.registry.readiness(MODEL, Instant::now()).is_ok()
    })
    .await;
    let mut second = worker.session().await;
    second.send(Message::Info(info("a", Role::Mixed)));
    assert!(second.next().await.is_none());
    let up = |registry: &Registry| {
        (0..2)
            .filter(|&at| health(registry, at) == Health::Ready)
            .count()
    };
    assert_eq!(up(&linked.registry), 1);
}

#[tokio::test]
async fn a_silent_worker_is_suspected_and_then_lost() {
    let liveness = Liveness {
        suspect_after: Duration::from_millis(100),
        lost_after: Duration::from_secs(3),
        ..Liveness::default()
    };
    let mut worker = FakeWorker::start().await;
    let linked = link(&[worker.address.to_string()], liveness);
    let registry = &linked.registry;
    let mut session = worker.session().await;
    session.send(Message::Info(info("a", Role::Mixed)));
    until("suspicion", || health(registry, 0) == Health::Suspect).await;
    assert!(registry.readiness(MODEL, Instant::now()).is_err());
    let mut changes = registry.changes();
    session.report(v1::StepReport {
        load: Some(idle()),
        ..Default::default()
    });
    // Only a worker that is trusted again is announced.
    soon("the recovery's notice", changes.changed())
        .await
        .expect("a registry");
    assert!(session.next().await.is_none(), "given up in the end");
    until("the end", || health(registry, 0) == Health::Down).await;
}

#[tokio::test]
async fn a_worker_that_was_told_to_end_gets_nothing_new_until_it_is_back() {
    let mut worker = FakeWorker::start().await;
    let linked = link(&[worker.address.to_string()], Liveness::default());
    let registry = &linked.registry;
    let session = worker.session().await;
    session.send(Message::Info(info("a", Role::Mixed)));
    let is_ready = || registry.readiness(MODEL, Instant::now()).is_ok();
    until("the worker", is_ready).await;
    session.report(v1::StepReport {
        load: Some(v1::Load {
            draining: true,
            ..idle()
        }),
        ..Default::default()
    });
    until("the drain", || health(registry, 0) == Health::Draining).await;
    assert!(!is_ready());
    drop(session);
    let session = worker.session().await;
    session.send(Message::Info(info("b", Role::Mixed)));
    until("its next life", is_ready).await;
}

#[tokio::test]
async fn role_and_load_follow_the_worker() {
    let mut worker = FakeWorker::start().await;
    let linked = link(&[worker.address.to_string()], Liveness::default());
    let registry = &linked.registry;
    let session = worker.session().await;
    session.send(Message::Info(info("a", Role::Prefill)));
    until("the worker", || {
        registry.readiness(MODEL, Instant::now()).is_ok()
    })
    .await;
    session.report(v1::StepReport {
        load: Some(v1::Load {
            running_requests: 3,
            waiting_prefill_tokens: 70,
            free_blocks: 40,
            running_kv_tokens: 900,
            waiting_kv_tokens: Some(700),
            ..idle()
        }),
        applied_submits: 0,
        ..Default::default()
    });
    session.send(Message::Info(info("a", Role::Decode)));
    let decodes = || view(registry, 0).role == tasuki_core::Role::Decode;
    until("the load and the role", decodes).await;
    let view = view(registry, 0);
    assert_eq!(view.load.running_requests, 3);
    assert_eq!(view.load.waiting_prefill_tokens, 70);
    assert_eq!(view.load.free_blocks, 40);
    assert_eq!(view.load.running_kv_tokens, 900);
    assert_eq!(view.load.waiting_kv_tokens, Some(700));
    // A worker that was built before the field.
    session.report(v1::StepReport {
        load: Some(idle()),
        ..Default::default()
    });
    let unknown = || super::view(registry, 0).load.waiting_kv_tokens.is_none();
    until("the load of an older worker", unknown).await;
}
