use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake};
use std::time::{Duration, Instant};

use tasuki_core::{FailureKind, ModelId, RequestView, WorkerId};
use tasuki_flow::fleet::{CacheEvents, WorkerInfo};
use tasuki_flow::roles::Demand;
use tasuki_flow::{Input, LegEnd, LegEndReason, LegId, LegKind, Output, Peer};
use tokio::sync::mpsc;

use super::super::connection::Joined;
use super::super::legs::{Dispatched, Report};
use super::super::local_leg::Reports;
use super::super::registry::Registry;
use super::super::testing::{LocalWorker, ToWorker, local_info};
use super::{registry, spec, view};

fn joined(registry: &Registry) -> (Joined, LocalWorker) {
    let (link, worker) = LocalWorker::new();
    let joined = registry
        .join(WorkerId(0), local_info("a"), Arc::new(link), Instant::now())
        .expect("joined");
    (joined, worker)
}

fn finished() -> LegEnd {
    LegEnd {
        reason: LegEndReason::Finished,
        failure: FailureKind::Device,
        message: String::new(),
        answer: None,
        ticket: None,
        timings: None,
    }
}

/// A report of one leg's output, its end, or both.
fn report(registry: &Registry, from: &Joined, output: Option<&str>, ended: Option<&str>) {
    let output = output.map(|name| (name.to_owned(), Output::default()));
    let ended = ended.map(|name| (name.to_owned(), finished()));
    let report = Report {
        load: None,
        exported: None,
        cache: None,
        outputs: output.into_iter(),
        ended: ended.into_iter(),
    };
    registry.on_report(from, report, Instant::now());
}

#[test]
fn messages_of_a_leg_go_to_its_worker_and_to_its_request() {
    let registry = registry(1);
    let (joined, mut worker) = joined(&registry);
    let key = joined.key;
    let legs = [0, 1].map(|attempt| LegId {
        worker: key,
        attempt,
    });
    let (sender, mut inbox) = mpsc::unbounded_channel();
    for (leg, name) in legs.into_iter().zip(["r.0", "r.1"]) {
        let dispatched = registry.dispatch(leg, name.to_owned(), spec(LegKind::Prefill), &sender);
        assert!(matches!(dispatched, Dispatched::Sent));
    }
    registry.abort(key, "r.0", vec![3]);
    registry.retarget(key, "r.1", Peer::default());
    let name = str::to_owned;
    for expected in [
        ToWorker::Dispatch(name("r.0"), 1, spec(LegKind::Prefill)),
        ToWorker::Dispatch(name("r.1"), 2, spec(LegKind::Prefill)),
        ToWorker::Abort(name("r.0"), vec![3]),
        ToWorker::Retarget(name("r.1"), Peer::default()),
    ] {
        assert_eq!(worker.received(), Some(expected));
    }
    let promised = || view(&registry, 0).outstanding.promised_blocks;
    assert_eq!(promised(), 2);
    report(&registry, &joined, Some("r.1"), Some("r.0"));
    assert_eq!(promised(), 0);
    report(&registry, &joined, Some("r.0"), Some("r.1"));
    let mut next = || inbox.try_recv().ok();
    assert!(matches!(next(), Some(Input::Output(from, _)) if from == legs[1]));
    assert!(matches!(next(), Some(Input::Ended(from, _)) if from == legs[0]));
    assert!(matches!(next(), Some(Input::Ended(from, _)) if from == legs[1]));
    assert!(next().is_none(), "an ended leg has no output");
}

/// Notes whether the registry's lock is free when a request's task is woken.
struct LockProbe {
    registry: Arc<Registry>,
    was_free: AtomicBool,
}

impl Wake for LockProbe {
    fn wake(self: Arc<Self>) {
        let is_free = self.registry.state.try_lock().is_ok();
        self.was_free.store(is_free, Ordering::Relaxed);
    }
}

#[test]
fn requests_are_woken_after_the_lock() {
    let registry = Arc::new(registry(1));
    let (joined, _worker) = joined(&registry);
    let key = joined.key;
    let (sender, mut inbox) = mpsc::unbounded_channel();
    let leg = LegId {
        worker: key,
        attempt: 0,
    };
    registry.dispatch(leg, "r.0".to_owned(), spec(LegKind::Prefill), &sender);
    for (output, ended) in [(Some("r.0"), None), (None, Some("r.0"))] {
        let probe = Arc::new(LockProbe {
            registry: Arc::clone(&registry),
            was_free: AtomicBool::default(),
        });
        let waker = Arc::clone(&probe).into();
        let mut context = Context::from_waker(&waker);
        assert!(inbox.poll_recv(&mut context).is_pending());
        report(&registry, &joined, output, ended);
        assert!(probe.was_free.load(Ordering::Relaxed));
        assert!(inbox.try_recv().is_ok());
    }
}

#[test]
fn a_report_finds_its_requests_beside_the_lock() {
    let registry = registry(1);
    let (joined, _worker) = joined(&registry);
    let (sender, _inbox) = mpsc::unbounded_channel();
    let leg = LegId {
        worker: joined.key,
        attempt: 0,
    };
    registry.dispatch(leg, "r.0".to_owned(), spec(LegKind::Prefill), &sender);
    let held = registry.lock();
    let outputs = [("r.0", Output::default()), ("r.1", Output::default())];
    let ended = std::iter::empty::<(&str, LegEnd)>();
    let routed = joined.legs.route(joined.key, outputs.into_iter(), ended);
    drop(held);
    assert_eq!(routed.len(), 1);
    assert!(matches!(&routed[0].input, Input::Output(from, _) if *from == leg));
}

#[test]
fn a_part_of_a_stream_waits_for_no_lock_and_is_counted_in_the_end() {
    let registry = registry(1);
    let (joined, _worker) = joined(&registry);
    let start = registry.since_start(Instant::now());
    for _ in 0..100 {
        let view = RequestView::new(10, 300);
        registry.lock().fleet.on_arrival(&view, start);
    }
    let (sender, _inbox) = mpsc::unbounded_channel();
    let leg = LegId {
        worker: joined.key,
        attempt: 0,
    };
    registry.dispatch(leg, "r.0".to_owned(), spec(LegKind::Colocated), &sender);
    let slot = joined.legs.lock()["r.0"].slot;
    let reports = Reports::new(Arc::clone(&registry), leg, slot, "r.0");
    let tokens = |count| Output {
        tokens: vec![1; count],
        ..Output::default()
    };
    let now = Instant::now();
    reports.output_at(tokens(1), now);
    let held = registry.lock();
    let (done, is_done) = std::sync::mpsc::channel();
    let streaming = reports.clone();
    let thread = std::thread::spawn(move || {
        streaming.output_at(tokens(199), now + Duration::from_millis(99));
        let _ = done.send(());
    });
    let went_on = is_done.recv_timeout(Duration::from_secs(20));
    drop(held);
    thread.join().expect("it ended");
    assert!(went_on.is_ok(), "it waited for the lock");
    reports.end(finished());
    let mut wanted = Demand::default();
    (0..100).for_each(|_| wanted.on_arrival(10, start));
    let prompt_tokens = spec(LegKind::Colocated).prompt.len() as u64;
    wanted.on_output(prompt_tokens, 0, 1);
    wanted.on_output(prompt_tokens, 1, 200);
    wanted.on_ended(prompt_tokens, 200);
    let fleet = &registry.lock().fleet;
    let demand = fleet.demand(ModelId(0)).expect("a demand");
    let lengths = demand.lengths(start).expect("arrivals");
    assert_eq!(Some(lengths), wanted.lengths(start));
}

#[test]
fn legs_without_a_task_are_aborted() {
    let registry = registry(1);
    let (joined, mut worker) = joined(&registry);
    let key = joined.key;
    let (kept, _inbox) = mpsc::unbounded_channel();
    let (gone, _) = mpsc::unbounded_channel();
    for (attempt, name, inbox) in [(0, "kept", &kept), (1, "gone", &gone)] {
        let leg = LegId {
            worker: key,
            attempt,
        };
        registry.dispatch(leg, name.to_owned(), spec(LegKind::Colocated), inbox);
        worker.received();
    }
    assert_eq!(registry.abort_orphans(), 1);
    let aborted = ToWorker::Abort("gone".to_owned(), Vec::new());
    assert_eq!(worker.received(), Some(aborted));
    assert_eq!(view(&registry, 0).outstanding.requests, 1);
}

#[test]
fn a_worker_whose_events_were_missed_is_asked_for_all_of_its_cache() {
    let registry = registry(1);
    let (joined, mut worker) = joined(&registry);
    let tell = |number, reset| {
        let cache = CacheEvents {
            number,
            reset,
            stored: vec![number],
            ..CacheEvents::default()
        };
        let report = Report {
            load: None,
            exported: None,
            cache: Some(cache),
            outputs: std::iter::empty::<(&str, Output)>(),
            ended: std::iter::empty::<(&str, LegEnd)>(),
        };
        registry.on_report(&joined, report, Instant::now());
    };
    let known = || registry.read(|known| known.chunks)[0];
    tell(1, true);
    tell(2, false);
    assert_eq!((known(), worker.received()), (2, None));
    tell(4, false);
    assert_eq!(
        (known(), worker.received()),
        (0, Some(ToWorker::ResyncCache))
    );
    tell(5, false);
    assert_eq!(
        (known(), worker.received()),
        (0, None),
        "on its way already"
    );
    tell(6, true);
    assert_eq!((known(), worker.received()), (1, None));
}

#[test]
fn the_catalog_follows_the_workers() {
    let registry = registry(1);
    let limits = || registry.catalog().limits(ModelId(0));
    assert!(limits().is_none());
    let (link, _worker) = LocalWorker::new();
    let info = local_info("a");
    let joined = registry
        .join(WorkerId(0), info.clone(), Arc::new(link), Instant::now())
        .expect("joined");
    let longest = || limits().map(|limits| limits.max_model_len);
    assert_eq!(longest(), Some(info.max_model_len));
    let longer = WorkerInfo {
        max_model_len: info.max_model_len + 1,
        ..info.clone()
    };
    assert!(registry.on_info(joined.key, longer));
    assert_eq!(longest(), Some(info.max_model_len + 1));
    registry.remove(WorkerId(0));
    assert!(limits().is_none());
}
