//! Retries within the budget of all requests, and spread in time.

use std::time::Duration;

use tasuki_core::{Capabilities, Chunks, FailureKind, Identity, ModelId, RequestView, WorkerId};
use tasuki_policy::NoPlacement;

use crate::generation::{Event, Generation, ServeError};
use crate::leg::{LegEnd, LegEndReason as R, LegKind};
use crate::machine::{Effect, Fleet, Input, Machine, MachineConfig, Placed};
use crate::sampling::SamplingParams;
use crate::worker_ref::{LegId, Peer, WorkerKey, WorkerRef};

/// One worker after another, and a budget of so many retries.
#[derive(Default)]
struct Budgeted {
    placed: u32,
    retries_left: u32,
    asked: u32,
}

fn key(worker: u32) -> WorkerKey {
    WorkerKey {
        worker: WorkerId(worker),
        connection: 0,
    }
}

impl Fleet for Budgeted {
    fn place(&mut self, _: &RequestView) -> Result<Placed, NoPlacement> {
        let worker = WorkerRef {
            key: key(self.placed),
            peer: Peer {
                engine_id: self.placed.to_string(),
                kv_endpoint: String::new(),
            },
            capabilities: Capabilities::default(),
            identity: Identity::default(),
        };
        self.placed += 1;
        Ok(Placed {
            prefill: worker.clone(),
            decode: worker,
            why: None,
        })
    }

    fn place_decode(&mut self, _: &RequestView, _: WorkerKey, _: &[WorkerId]) -> Option<WorkerRef> {
        None
    }

    fn may_retry(&mut self) -> bool {
        self.asked += 1;
        let may = self.retries_left > 0;
        self.retries_left = self.retries_left.saturating_sub(1);
        may
    }
}

struct Request {
    machine: Machine,
    fleet: Budgeted,
    now: Duration,
    error: Option<ServeError>,
    dispatched: u32,
}

impl Request {
    fn start(id: &str, retries_left: u32) -> Self {
        let generation = Generation {
            model: ModelId(0),
            request_id: id.to_owned(),
            prompt: (0..10).collect(),
            n: 1,
            sampling: SamplingParams {
                max_tokens: 8,
                ..Default::default()
            },
            cache_salt: String::new(),
            tenant: "".into(),
            priority: 0,
            opaque: None,
        };
        let fleet = Budgeted {
            retries_left,
            ..Default::default()
        };
        let mut request = Self {
            machine: Machine::new(generation, Chunks::default(), MachineConfig::default()),
            fleet,
            now: Duration::ZERO,
            error: None,
            dispatched: 0,
        };
        request
            .machine
            .start(false, &[], request.now, &mut request.fleet);
        request.take_effects();
        request
    }

    fn input(&mut self, input: Input) {
        self.machine.handle(input, self.now, &mut self.fleet);
        self.take_effects();
    }

    fn take_effects(&mut self) {
        while let Some(effect) = self.machine.next_effect() {
            match effect {
                Effect::Dispatch { spec, .. } => {
                    assert_eq!(spec.kind, LegKind::Colocated);
                    self.dispatched += 1;
                }
                Effect::Emit(Event::Failed(error)) => self.error = Some(error),
                _ => {}
            }
        }
    }

    /// The running leg ends so; how long until the next one runs, `None` if the request fails.
    fn end(&mut self, reason: R) -> Option<Duration> {
        let attempt = self.dispatched - 1;
        let leg = LegId {
            worker: key(attempt),
            attempt,
        };
        let ended = LegEnd {
            reason,
            failure: reason.usual_failure(),
            message: String::new(),
            answer: None,
            ticket: None,
            timings: None,
        };
        self.until_next(Input::Ended(leg, ended))
    }

    fn until_next(&mut self, input: Input) -> Option<Duration> {
        let (before, began) = (self.dispatched, self.now);
        self.input(input);
        while self.dispatched == before {
            if self.machine.is_over() {
                return None;
            }
            self.now = self.machine.deadline().expect("it waits");
            self.input(Input::Tick);
        }
        Some(self.now - began)
    }
}

#[test]
fn a_lost_worker_s_requests_need_no_budget() {
    let mut request = Request::start("r", 0);
    for worker in 0..4 {
        let pause = request.until_next(Input::Lost(key(worker)));
        assert!(pause.expect("placed again") < MachineConfig::default().spread);
    }
    assert_eq!(request.fleet.asked, 0);
}

#[test]
fn failures_refusals_and_returns_take_from_the_budget() {
    for reason in [R::Failed, R::Refused, R::Returned] {
        let mut request = Request::start("r", 1);
        let pause = request.end(reason).expect("placed again");
        assert!(pause <= Duration::from_millis(75), "{reason:?} {pause:?}");
        assert_eq!((request.fleet.asked, request.fleet.retries_left), (1, 0));
    }
}

#[test]
fn without_budget_a_retry_waits_ever_longer_and_fails_in_the_end() {
    let mut request = Request::start("r", 0);
    assert_eq!(request.end(R::Failed), None);
    let error = request.error.expect("an error");
    assert_eq!(error.kind(), FailureKind::Overload);
    let ServeError::Unavailable { retry_after_s, .. } = error else {
        panic!("{error}")
    };
    assert!(
        retry_after_s > 0
            && error
                .to_string()
                .contains("no further one, the limit is 120 s")
    );
    let limit = MachineConfig::default().refused_limit;
    assert!(request.now > limit && request.now < limit + Duration::from_secs(2));
    assert!((90..150).contains(&request.fleet.asked), "a second apart");
}

#[test]
fn budget_that_comes_back_in_time_is_used() {
    let mut request = Request::start("r", 0);
    let leg = LegId {
        worker: key(0),
        attempt: 0,
    };
    let ended = LegEnd {
        reason: R::Failed,
        failure: FailureKind::Device,
        message: String::new(),
        answer: None,
        ticket: None,
        timings: None,
    };
    request.input(Input::Ended(leg, ended));
    while request.fleet.asked < 5 {
        request.now = request.machine.deadline().expect("it waits");
        request.input(Input::Tick);
    }
    assert_eq!(request.dispatched, 1);
    request.fleet.retries_left = 1;
    let pause = request.until_next(Input::Tick).expect("placed again");
    assert!(
        pause > Duration::from_millis(500),
        "pauses have grown: {pause:?}"
    );
}

#[test]
fn requests_of_one_worker_do_not_come_back_in_one_instant() {
    let spread = MachineConfig::default().spread;
    let pauses = (0..100).map(|number| {
        let mut request = Request::start(&format!("request-{number}"), 0);
        let pause = request.until_next(Input::Lost(key(0)));
        pause.expect("placed again").as_secs_f64() / spread.as_secs_f64()
    });
    let mut pauses: Vec<f64> = pauses.collect();
    pauses.sort_by(f64::total_cmp);
    assert!(pauses[0] >= 0.0 && pauses[99] < 1.0);
    let gaps = pauses.windows(2).map(|pair| pair[1] - pair[0]);
    assert!(
        gaps.fold(0.0, f64::max) < 0.15,
        "spread over all of it: {pauses:?}"
    );
}
