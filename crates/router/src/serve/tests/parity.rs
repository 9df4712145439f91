//! The router and the simulator take the same decisions.
//!
//! A simulated run keeps what its core was told (arrivals, reports of workers, drains) and which
//! legs it sent where. Here the router's registry and its tasks, one for each request, are told
//! the same by workers inside the process; every leg that they send must be the simulator's, in
//! its order. What the workers report was the consequence of the simulator's decisions, so a
//! router that decides otherwise soon reports about legs that it does not have.
//!
//! Nothing waits in admission and nothing is retried, where time would count.

use std::sync::Arc;
use std::time::Instant;

use tasuki_core::{ChunkScheme, Chunks, Identity, ModelId, Rates, Role, WorkerId};
use tasuki_flow::admission::AdmissionConfig;
use tasuki_flow::fleet::DrainReason;
use tasuki_flow::{LegEnd, LegKind, MachineConfig, Output, SamplingParams};
use tasuki_policy::PolicyConfig;
use tasuki_sim::steps::StepModel;
use tasuki_sim::{Config, Fault, FaultKind, Limits, Request, ShellEvent, Time, WorkerConfig};
use tasuki_sim::{simulate, worker_info};
use tokio::sync::{mpsc, watch};

use crate::metrics::Metrics;
use crate::serve::api::{Account, Generation};
use crate::serve::driver::{ClientEnds, Shared, drive};
use crate::serve::events::{self, EventReceiver};
use crate::workers::testing::{LocalWorker, ToWorker};
use crate::workers::{Joined, Registry, Report};

/// A task needs a few to get from one message to the next.
const TURNS: usize = 50;

/// Request, attempt, half, worker.
type Decision = (usize, u32, LegKind, u32);

const ROLES: [Role; 5] = [
    Role::Mixed,
    Role::Mixed,
    Role::Prefill,
    Role::Decode,
    Role::Decode,
];

fn config() -> Config {
    let rates = Rates {
        step_s: 0.02,
        sequence_s: 5e-4,
        kv_token_s: 1e-6,
        prompt_step_s: 0.02,
        prompt_token_s: 1e-4,
        prompt_square_s: 1e-9,
    };
    let workers = ROLES
        .into_iter()
        .zip(0..)
        .map(|(role, index)| WorkerConfig {
            role,
            host: index / 2,
            class: "test".into(),
            steps: Arc::new(StepModel::Rates(rates)),
            limits: Limits::gpu(600, 4_096),
        });
    let fault = |at_s, worker, kind| Fault {
        at: Time::from_s(at_s),
        worker,
        kind,
    };
    Config {
        workers: workers.collect(),
        kv_bytes_per_token: 1e5,
        message_s: 1e-4,
        handoff_s: 1e-3,
        prefix_index: true,
        record: true,
        admission: at_once(),
        warm_router: true,
        faults: vec![
            fault(4.0, 1, FaultKind::Drain),
            fault(8.0, 1, FaultKind::Undrain),
            fault(9.0, 3, FaultKind::Slow { factor: 3.0 }),
        ],
        ..Config::default()
    }
}

/// Nothing waits to be placed.
fn at_once() -> AdmissionConfig {
    AdmissionConfig {
        off: true,
        ..AdmissionConfig::default()
    }
}

/// The prompt of a request: every third one begins like one of two others.
fn prompt(index: usize, tokens: u32) -> Arc<[u32]> {
    let shared = if index.is_multiple_of(3) {
        1_000 + index as u32 % 2
    } else {
        index as u32
    };
    let first = (0..tokens)
        .take(512)
        .map(|token| token.wrapping_mul(31) ^ shared);
    let rest = (512..tokens).map(|token| token.wrapping_mul(17) ^ index as u32);
    first.chain(rest).collect()
}

fn scheme() -> ChunkScheme {
    ChunkScheme::of_blocks(Identity::default(), 32)
}

/// Requests of 100 to 1,600 tokens: so many at once, and at uneven times if they come alone.
fn requests(burst: usize) -> impl Iterator<Item = Request> {
    (0..160).map(move |index: usize| {
        let tokens = 100 + (index * 379 % 1_500) as u32;
        let first = index / burst * burst;
        let at_s = 0.09 * first as f64 + 0.03 * (first * 7 % 3) as f64;
        let names = Chunks::new(&[scheme()], "", &prompt(index, tokens));
        Request {
            chunks: names.by(&scheme()).into(),
            ..Request::new(
                index,
                Time::from_s(at_s),
                tokens,
                2 + (index * 13 % 90) as u32,
            )
        }
    })
}

/// The router without its HTTP side, before workers that say what they are told to say.
struct Router {
    shared: Arc<Shared>,
    began: Instant,
    joined: Vec<Joined>,
    workers: Vec<LocalWorker>,
    clients: Vec<(EventReceiver, mpsc::UnboundedSender<u32>)>,
    decisions: Vec<Decision>,
}

impl Router {
    fn new(config: &Config, seed: u64) -> Self {
        let (began, policy) = (
            Instant::now(),
            PolicyConfig {
                seed,
                ..config.policy
            },
        );
        let models = vec![Vec::new()];
        let registry = Registry::new(models, policy, at_once(), began);
        let registry = Arc::new(registry);
        let (mut joined, mut workers) = (Vec::new(), Vec::new());
        for (worker, index) in config.workers.iter().zip(0..) {
            let id = registry.add(&format!("worker-{index}"));
            let (link, local) = LocalWorker::new();
            let info = worker_info(worker, index, u64::from(index) + 1, config.prefix_index);
            joined.push(
                registry
                    .join(id, info, Arc::new(link), began)
                    .expect("it joins"),
            );
            workers.push(local);
        }
        let metrics = Arc::new(Metrics::new(&registry));
        let shared = Shared {
            request_log: std::sync::OnceLock::new(),
            registry,
            metrics,
            machine: MachineConfig::default(),
            cancel: watch::Sender::new(false),
        };
        Self {
            shared: Arc::new(shared),
            began,
            joined,
            workers,
            clients: Vec::new(),
            decisions: Vec::new(),
        }
    }

    fn at(&self, at: Time) -> Instant {
        self.began + at.since_start()
    }

    fn arrive(&mut self, at: Time, index: usize, tokens: u32, output_tokens: u32) {
        let (sender, receiver) = events::channel(1);
        let (stop, stops) = mpsc::unbounded_channel();
        let generation = Generation {
            model: ModelId::default(),
            request_id: index.to_string(),
            prompt: prompt(index, tokens),
            n: 1,
            sampling: SamplingParams {
                max_tokens: output_tokens,
                ..SamplingParams::default()
            },
            cache_salt: String::new(),
            tenant: "".into(),
            priority: 0,
            opaque: None,
        };
        let client = ClientEnds {
            events: sender,
            stop: stops,
            account: Arc::new(Account::default()),
        };
        let arrival = self.at(at).into();
        tokio::spawn(drive(generation, arrival, client, Arc::clone(&self.shared)));
        self.clients.push((receiver, stop));
    }

    fn report(&self, at: Time, report: tasuki_sim::Report) {
        let named = |(index, attempt): (usize, u32)| format!("{index}.{attempt}");
        let outputs = report.outputs.into_iter();
        let outputs: Vec<(String, Output)> = outputs
            .map(|(index, attempt, output)| (named((index, attempt)), output))
            .collect();
        let ended = report.ended.into_iter();
        let ended: Vec<(String, LegEnd)> = ended
            .map(|(index, attempt, end)| (named((index, attempt)), end))
            .collect();
        let told = Report {
            load: Some(report.load),
            exported: None,
            cache: report.cache,
            outputs: outputs.into_iter(),
            ended: ended.into_iter(),
        };
        let joined = &self.joined[report.worker as usize];
        self.shared.registry.on_report(joined, told, self.at(at));
    }

    fn drain(&self, worker: u32, drain: bool) {
        let registry = &self.shared.registry;
        if drain {
            registry.drain(WorkerId(worker), DrainReason::Asked);
        } else {
            registry.undrain(WorkerId(worker), DrainReason::Asked);
        }
    }

    /// Lets all tasks run until none can, and takes the legs that they sent.
    async fn settle(&mut self) {
        // One thread: each turn lets every task run that can.
        for _ in 0..TURNS {
            tokio::task::yield_now().await;
        }
        let mut sent: Vec<(Decision, u64)> = Vec::new();
        for (worker, index) in self.workers.iter_mut().zip(0..) {
            while let Some(message) = worker.received() {
                if let ToWorker::Dispatch(name, number, spec) = message {
                    let (request, attempt) = name.split_once('.').expect("REQUEST.ATTEMPT");
                    let request = request.parse().expect("an index");
                    let attempt = attempt.parse().expect("a number");
                    sent.push(((request, attempt, spec.kind, index), number));
                }
            }
        }
        // Each worker has its own order: both legs of a request count as one moment.
        sent.sort_by_key(|((request, attempt, kind, _), _)| {
            (*request, *attempt, *kind == LegKind::Decode)
        });
        self.decisions
            .extend(sent.into_iter().map(|(decision, _)| decision));
    }
}

/// What the simulator decided, and what the router decides when it is told the same.
async fn both(seed: u64, burst: usize) -> (Vec<Decision>, Vec<Decision>) {
    let config = config();
    let run = simulate(config.clone(), &mut requests(burst));
    let admitted = run
        .outcomes
        .iter()
        .all(|outcome| outcome.admitted == Some(outcome.sent));
    assert!(admitted, "a request waited: time would count");
    let mut router = Router::new(&config, seed);
    let mut simulated = Vec::new();
    for event in run.record {
        match event {
            ShellEvent::Arrived {
                at,
                index,
                prompt_tokens,
                output_tokens,
                ..
            } => {
                router.arrive(at, index, prompt_tokens, output_tokens);
            }
            ShellEvent::Reported { at, report } => router.report(at, report),
            ShellEvent::Drained { worker, drain, .. } => router.drain(worker, drain),
            ShellEvent::Dispatched {
                index,
                attempt,
                kind,
                worker,
                ..
            } => {
                simulated.push((index, attempt, kind, worker));
                continue;
            }
            ShellEvent::Joined { .. } => continue,
            other => panic!("not part of this trace: {other:?}"),
        }
        router.settle().await;
    }
    (simulated, router.decisions)
}

#[tokio::test]
async fn the_router_decides_as_the_simulator_does() {
    same(1).await;
}

#[tokio::test]
async fn they_decide_alike_when_many_requests_come_at_once() {
    same(20).await;
}

async fn same(burst: usize) {
    let (simulated, decided) = both(0, burst).await;
    // Both kinds of placement and all workers occur.
    let kinds = [LegKind::Colocated, LegKind::Prefill, LegKind::Decode];
    for kind in kinds {
        let count = simulated
            .iter()
            .filter(|decision| decision.2 == kind)
            .count();
        assert!(count > 5, "{count} {}", kind.as_str());
    }
    for worker in 0..ROLES.len() as u32 {
        assert!(
            simulated.iter().any(|decision| decision.3 == worker),
            "worker {worker}"
        );
    }
    let differs = simulated
        .iter()
        .zip(&decided)
        .position(|(one, other)| one != other);
    assert_eq!(
        differs,
        None,
        "{:?}",
        differs.map(|at| (simulated[at], decided[at]))
    );
    assert_eq!(simulated.len(), decided.len());
}

#[tokio::test]
async fn a_router_of_another_seed_decides_otherwise() {
    let (simulated, decided) = both(1, 1).await;
    assert_ne!(simulated, decided);
}
