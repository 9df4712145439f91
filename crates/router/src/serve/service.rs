//! The handle that the HTTP side holds.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use axum::http::Method;
use futures::FutureExt;
use futures::future::join_all;
use tasuki_core::{Health, ModelId};
use tasuki_flow::fleet::{NotReady, WorkerState};
use tasuki_policy::NoPlacement;
use tasuki_reqlog::RequestLog;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::api::{Arrival, Event, Generating, Generation, ModelLimits, ServeError, Unready};
use super::config::{Config, Tuning};
use super::driver::{ClientEnds, Shared, drive};
use super::events;
use crate::attached::attach;
use crate::dashboard::{Objectives, Recorder};
use crate::discovery::{Address, Discovery, Engine, ForeignAddress, union};
use crate::foreign::native::Asked;
use crate::metrics::Metrics;
use crate::request_log;
use crate::tls::fleet::WorkerTransport;
use crate::workers::foreign::Client;
use crate::workers::{Catalog, Dialling, Registry, follow};

/// Serving, from now until the last handle is gone. Cheap to clone.
#[derive(Clone)]
pub struct Service {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    /// Connections end when it turns true or is dropped.
    shutdown: watch::Sender<bool>,
    /// Requests running, and whether new ones are refused.
    running: watch::Sender<RunState>,
    /// Of each model, the last answer to whether there is a placement, and when it was found.
    readiness: Mutex<BTreeMap<ModelId, Option<Readiness>>>,
}

/// An answer, and when it was found.
type Readiness = (Instant, Result<(), NotReady>);

/// Of what operators ask of workers.
const ASK_LIMIT: Duration = Duration::from_secs(10);

/// Probes within this time get the same answer: the placement behind it takes long with
/// hundreds of workers.
const READINESS_AGE: Duration = Duration::from_millis(250);

#[derive(Debug, Clone, Copy, Default)]
struct RunState {
    requests: usize,
    draining: bool,
}

/// One request counted as running.
struct Ticket(watch::Sender<RunState>);

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.send_modify(|running| running.requests -= 1);
    }
}

impl Service {
    /// Begins to connect to the workers. Call it on a Tokio runtime.
    pub fn start(config: Config) -> Self {
        let tuning = Tuning::from(&config);
        let transport = config.transport;
        Self::start_by(config.models, config.workers.open(), tuning, transport)
    }

    /// With workers on plain connections.
    #[cfg(test)]
    pub(crate) fn start_tuned(
        models: Vec<Vec<String>>,
        workers: Vec<Box<dyn Discovery>>,
        tuning: Tuning,
    ) -> Self {
        Self::start_by(models, workers, tuning, WorkerTransport::Plain)
    }

    fn start_by(
        models: Vec<Vec<String>>,
        workers: Vec<Box<dyn Discovery>>,
        tuning: Tuning,
        transport: WorkerTransport,
    ) -> Self {
        let readiness = (0u32..).zip(&models).map(|(id, _)| (ModelId(id), None));
        let readiness = Mutex::new(readiness.collect());
        let count = models.len() as u32;
        let registry = Arc::new(Registry::new(
            models,
            tuning.policy,
            tuning.admission,
            Instant::now(),
        ));
        let (shutdown, mut down) = watch::channel(false);
        let connections = follow(
            union(workers),
            Arc::clone(&registry),
            Dialling {
                liveness: tuning.liveness,
                transport,
            },
            tuning.worker_drain,
        );
        let name = format!("{:016x}", rand::random::<u64>());
        registry.follow_roles(count, &name, tuning.roles);
        let settling = Arc::clone(&registry);
        tokio::spawn(async move {
            tokio::select! {
                never = connections => match never {},
                never = settling.keep_settling() => match never {},
                never = settling.keep_roles() => match never {},
                // Also when its sender is gone.
                _ = down.wait_for(|&down| down) => {}
            }
        });
        let seconds = |objective: Option<Duration>| objective.map(|time| time.as_secs_f64());
        let objectives = Objectives {
            ttft_s: seconds(tuning.admission.ttft),
            tpot_s: seconds(tuning.admission.tpot),
        };
        let mut metrics = Metrics::new(&registry);
        metrics.recorder = Recorder::new(objectives);
        let metrics = Arc::new(metrics);
        let shared = Shared {
            registry,
            metrics,
            machine: tuning.machine,
            request_log: OnceLock::new(),
            cancel: watch::Sender::new(false),
        };
        Self {
            inner: Arc::new(Inner {
                shared: Arc::new(shared),
                shutdown,
                running: watch::Sender::new(RunState::default()),
                readiness,
            }),
        }
    }

    /// Begins a generation. Its end, good or bad, comes as an event.
    pub fn generate(&self, generation: Generation, arrival: impl Into<Arrival>) -> Generating {
        let (events, for_client) = events::channel(generation.n);
        // Each of the `n` choices is stopped once at most: 4 bytes for each, and `n` is limited.
        let (stop, stops) = mpsc::unbounded_channel();
        let mut generating = Generating {
            events: for_client,
            stop,
            account: Arc::default(),
            work: None,
        };
        let admitted = self.inner.running.send_if_modified(|running| {
            running.requests += usize::from(!running.draining);
            !running.draining
        });
        if !admitted {
            events.send(Event::Failed(ServeError::Unavailable {
                reason: "the server is shutting down".to_owned(),
                retry_after_s: 5,
            }));
            return generating;
        }
        let ticket = Ticket(self.inner.running.clone());
        let shared = Arc::clone(&self.inner.shared);
        let arrival = arrival.into();
        let client = ClientEnds {
            events,
            stop: stops,
            account: Arc::clone(&generating.account),
        };
        generating.work = attach(async move {
            let _ticket = ticket;
            let request_id = generation.request_id.clone();
            let task = drive(generation, arrival, client, Arc::clone(&shared));
            let task = AssertUnwindSafe(task);
            if task.catch_unwind().await.is_err() {
                // Its machine is gone, so nothing else would stop its workers.
                let aborted = shared.registry.abort_orphans();
                tracing::error!(request_id, aborted, "the task of a request panicked");
            }
        });
        generating
    }

    /// Keeps a request log from now on.
    pub fn keep_log(&self, log: RequestLog) {
        let _ = self.inner.shared.request_log.set(log);
    }

    /// Writes what the request log has still to write. Blocks for a moment.
    pub fn close_log(&self) {
        if let Some(log) = self.inner.shared.request_log.get() {
            log.close(request_log::CLOSING);
        }
    }

    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.inner.shared.metrics
    }

    /// What a model's workers take; `None` while none was ever seen.
    pub fn limits(&self, model: ModelId) -> Option<ModelLimits> {
        self.catalog().limits(model)
    }

    /// What the workers serve, known so far.
    pub fn catalog(&self) -> Arc<Catalog> {
        self.inner.shared.registry.catalog()
    }

    /// Asks every SGLang worker that is connected.
    pub async fn ask_sglang(&self, method: Method, paths: &[&str]) -> Vec<Asked> {
        let workers = self.of_sglang(|state, address| {
            let up = !matches!(state.view.health, Health::Down);
            up.then_some((state.view.id, address))
        });
        let client = Client::new(ASK_LIMIT);
        let asked = workers.into_iter().map(|(worker, address)| {
            let (client, method) = (client.clone(), &method);
            async move {
                let answer = client.call_first(method, &address.authority, paths, ASK_LIMIT);
                Asked {
                    worker,
                    role: address.role,
                    answer: answer.await.map_err(|_| "it does not answer".to_owned()),
                }
            }
        });
        join_all(asked).await
    }

    /// Lets all of our workers that are connected empty their prefix caches. How many they are.
    pub fn flush_caches(&self) -> usize {
        self.inner.shared.registry.flush_caches()
    }

    fn of_sglang<T>(
        &self,
        mut read: impl FnMut(&WorkerState, ForeignAddress) -> Option<T>,
    ) -> Vec<T> {
        let found = self
            .inner
            .shared
            .registry
            .read(|known| match Address::parse(known.address) {
                Ok(Address::Foreign(address)) if address.engine == Engine::Sglang => {
                    read(known.state, address)
                }
                _ => None,
            });
        found.into_iter().flatten().collect()
    }

    pub fn count_resumed(&self) {
        self.inner.shared.metrics.resumed.inc();
    }

    /// Whether a request would find a placement now, among all workers that answer: one for
    /// a model, or for any of them if `None`.
    ///
    /// # Errors
    ///
    /// [`Unready`]: no worker takes one, or the server is shutting down.
    pub fn readiness(&self, model: Option<ModelId>) -> Result<(), Unready> {
        if self.inner.running.borrow().draining {
            return Err(Unready::ShuttingDown);
        }
        let now = Instant::now();
        let mut last = self
            .inner
            .readiness
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for foreign in &*self.catalog().foreign {
            last.entry(foreign.id).or_default();
        }
        let mut answer = Err(NotReady::NoPlacement(NoPlacement::NoWorker));
        for (&id, last) in last.iter_mut() {
            if model.is_some_and(|model| model != id) {
                continue;
            }
            answer = match *last {
                Some((found, placed)) if now < found + READINESS_AGE => placed,
                _ => {
                    let placed = self.inner.shared.registry.readiness(id, now);
                    *last = Some((now, placed));
                    placed
                }
            };
            if answer.is_ok() {
                break;
            }
        }
        answer.map_err(Unready::from)
    }

    /// The workers, for the admin API.
    pub fn registry(&self) -> &Arc<Registry> {
        &self.inner.shared.registry
    }

    /// Counts an answer with an error status, from the router or from a worker. `reason`: the
    /// error's code in the answer, or empty.
    pub fn count_http_error(&self, path: &str, status: u16, reason: &str) {
        self.inner.shared.metrics.http_error(path, status, reason);
    }

    /// All metrics, in the OpenMetrics text format.
    pub fn metrics_text(&self) -> String {
        self.inner.shared.metrics.text()
    }

    /// Refuses new requests, lets the running ones finish until the deadline,
    /// ends the rest, and disconnects.
    pub async fn drain(&self, deadline: Duration) {
        self.inner
            .running
            .send_modify(|running| running.draining = true);
        let mut running = self.inner.running.subscribe();
        let mut idle = async || {
            let _ = running.wait_for(|running| running.requests == 0).await;
        };
        if timeout(deadline, idle()).await.is_err() {
            self.inner.shared.cancel.send_replace(true);
            // Their tasks have nothing left to wait for.
            let _ = timeout(Duration::from_secs(1), idle()).await;
        }
        self.inner.shutdown.send_replace(true);
    }
}
