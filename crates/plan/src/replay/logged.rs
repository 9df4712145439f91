//! What a request log says, in the simulator's terms: the requests, the workers, how the router
//! decided, and what the requests saw.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use clap::ValueEnum;
use tasuki_core::{Rates, Role, WorkerId};
use tasuki_reqlog::{Class, Fleet, Handoff, Log, Outcome as Ended, Record, Request, Worker};
use tasuki_sim::steps::StepModel;
use tasuki_sim::{Fault, FaultKind, Limits, LinkSpec, NetworkSpec, Outcome, Time, WorkerConfig};

use super::notes::notes;
use crate::args::{HardwareArgs, PolicyName, RolesName, RouterArgs, TopologyArgs};
use crate::error::SimulateError;
use crate::hardware::{Hardware, PerStep, Source};

/// A transfer of no more than so many times what was not hidden of it did not wait for its prompt.
const UNHIDDEN: f64 = 1.2;

/// A log that can be replayed.
pub struct Logged {
    /// In the order of arrival; the first is due at 0.
    pub requests: Vec<Request>,
    /// Whether any two of them begin alike.
    pub shares: bool,
    /// What they saw.
    pub measured: Vec<Outcome>,
    pub strict_roles: bool,
    pub router: RouterArgs,
    pub faults: Vec<Fault>,
    /// For the reader: what the replay cannot be.
    pub notes: Vec<String>,
    fleet: Fleet,
    /// Requests of the model that a worker could have served.
    arrived: usize,
}

impl Logged {
    /// # Errors
    ///
    /// The file is no log, or has no request or worker that could be replayed.
    pub fn read(path: &Path) -> Result<Self, SimulateError> {
        let mut log = Log::read(path)?;
        let no_fleet = || SimulateError::NoFleet {
            path: path.to_owned(),
        };
        let mut fleet = log.fleet().ok_or_else(no_fleet)?;
        let model = busiest_model(&log.requests);
        fleet
            .workers
            .retain(|worker| worker.ready && worker.model == model);
        if fleet.workers.is_empty() {
            return Err(no_fleet());
        }
        let requests = std::mem::take(&mut log.requests);
        let count = requests.len();
        let (mut requests, others): (Vec<Request>, Vec<Request>) = requests
            .into_iter()
            .partition(|r| r.record.output_tokens > 0 && r.record.model == model);
        let Some(first) = requests.first() else {
            return Err(SimulateError::NoOutput {
                path: path.to_owned(),
                requests: count,
            });
        };
        let began_s = first.record.arrived_s;
        for request in &mut requests {
            request.record.arrived_s -= began_s;
        }
        let places: HashMap<u32, u32> = fleet.workers.iter().map(|w| w.id).zip(0..).collect();
        let measured =
            |(index, request): (usize, &Request)| measured(index, &request.record, &places);
        Ok(Self {
            shares: requests.iter().any(|request| !request.chunks.is_empty()),
            measured: requests.iter().enumerate().map(measured).collect(),
            strict_roles: log.header.router.strict_roles,
            router: router(&log, &fleet),
            faults: absences(&log.fleets, &fleet, began_s),
            notes: notes(&log, &requests, &others, &fleet),
            arrived: requests.len() + others.iter().filter(|r| is_wanted(r, model)).count(),
            requests,
            fleet,
        })
    }

    /// Of each request, prompt and answer together.
    pub fn tokens(&self) -> Vec<u32> {
        let records = self.requests.iter().map(|request| &request.record);
        records
            .map(|r| r.prompt_tokens.saturating_add(r.output_tokens))
            .collect()
    }

    /// Answers of several tokens whose longest gap the log does not tell.
    pub fn without_gaps(&self) -> usize {
        let records = self.requests.iter().map(|request| &request.record);
        let untold = |r: &&Record| r.output_tokens > 1 && r.longest_gap_ms.is_none();
        records.filter(untold).count()
    }

    /// Seconds from the first arrival to the last, and a mean gap more.
    pub fn span_s(&self) -> f64 {
        let last_s = self
            .requests
            .last()
            .map_or(0.0, |last| last.record.arrived_s);
        let gaps = (self.requests.len() - 1).max(1) as f64;
        last_s.max(1e-3) * (1.0 + 1.0 / gaps)
    }

    /// Requests a second that were served: of n requests, n - 1 in the time from the first arrival
    /// to the last.
    /// `None`: all came at one time, or there is one request, so the log does not tell.
    pub fn rate(&self) -> Option<f64> {
        let last = self.requests.last()?;
        (last.record.arrived_s > 0.0).then(|| self.replay_rate())
    }

    /// Requests a second that came, with those that got no answer: refused ones, for example.
    pub fn arrival_rate(&self) -> Option<f64> {
        let all = self.arrived as f64 / self.requests.len() as f64;
        self.rate().map(|rate| all * rate)
    }

    /// Requests a second of a replay that begins again after [`Logged::span_s`].
    pub fn replay_rate(&self) -> f64 {
        self.requests.len() as f64 / self.span_s()
    }

    /// When a request of a replay is due: beyond its end the log begins again.
    pub fn due_s(&self, index: usize) -> f64 {
        let round = (index / self.requests.len()) as f64;
        let request = &self.requests[index % self.requests.len()];
        round * self.span_s() + request.record.arrived_s
    }

    /// Requests a second of a replay's first so many: a log's load changes.
    pub fn rate_of(&self, requests: usize) -> f64 {
        requests as f64 / self.due_s(requests).max(1e-3)
    }

    /// The kind that most of its workers are.
    fn usual_class(&self) -> u32 {
        let mut counts: BTreeMap<u32, u32> = BTreeMap::new();
        for worker in &self.fleet.workers {
            *counts.entry(worker.class).or_default() += 1;
        }
        let most = counts.into_iter().max_by_key(|(_, count)| *count);
        most.map_or(0, |(class, _)| class)
    }

    /// Whether the router learnt from workers of that kind how long steps take: vLLM's and SGLang's
    /// do not tell.
    pub fn tells_steps(&self) -> bool {
        let class = self.fleet.classes.get(self.usual_class() as usize);
        class.is_some_and(|class| class.rates() != Class::new("", 1, &Rates::default()).rates())
    }

    /// GPUs of a worker of that kind.
    pub fn tensor_parallel(&self) -> u32 {
        let class = self.fleet.classes.get(self.usual_class() as usize);
        class.map_or(1, |class| class.tensor_parallel.max(1))
    }

    /// How fast workers of that kind are.
    pub fn source(&self) -> Source {
        let number = self.usual_class();
        let class = self.fleet.classes.get(number as usize);
        // The newest: an upgrade may have changed the limits.
        let worker = self.fleet.workers.iter().rfind(|w| w.class == number);
        let (link, bytes, handoff_s) = self.link();
        let device = class.map_or("unknown", |class| class.device.as_str());
        Source {
            steps: StepModel::Rates(class.map(Class::rates).unwrap_or_default()),
            name: device.to_owned(),
            told: format!(
                "steps as {} told them to the router, fitted by it ({device})",
                if self.fleet.classes.len() > 1 {
                    "workers of each kind"
                } else {
                    "the workers"
                }
            ),
            model: None,
            // As workers name themselves.
            cpu: device.ends_with(" threads"),
            block_size: worker.map(|w| w.block_size_tokens),
            num_blocks: worker.map(|w| w.num_blocks),
            max_model_len: worker.map(|w| w.max_model_len_tokens),
            kv_bytes_per_token: bytes,
            link,
            handoff_s,
            lead: None,
            between: PerStep::default(),
            message_s: None,
        }
    }

    /// The workers that there were. `hardware`: of [`Logged::source`], or what replaces it.
    /// What `given` has replaces what the log says of each: with step times, those of the hardware
    /// hold on workers of other kinds, too.
    pub fn workers(&self, hardware: &Hardware, given: &HardwareArgs) -> Vec<WorkerConfig> {
        let refit = given.steps.is_some() || given.rates.is_some() || given.gpu.is_some();
        let workers = self.fleet.workers.iter().map(|worker| {
            let class = self.fleet.classes.get(worker.class as usize);
            let mut limits = hardware.limits;
            if !refit {
                limits = own_limits(worker, limits, given);
            }
            let steps = match class.filter(|_| !refit) {
                Some(class) => Arc::new(StepModel::Rates(class.rates())),
                None => Arc::clone(&hardware.steps),
            };
            WorkerConfig {
                role: role(&worker.role),
                host: worker.machine,
                class: format!("{} {}", hardware.name, worker.class).into(),
                steps,
                limits,
            }
        });
        workers.collect()
    }

    /// The same as options, for names and result files.
    pub fn topology(&self) -> TopologyArgs {
        let count = |wanted| {
            let roles = self.fleet.workers.iter().map(|worker| role(&worker.role));
            roles.filter(|role| *role == wanted).count() as u32
        };
        TopologyArgs {
            prefill: count(Role::Prefill),
            decode: count(Role::Decode),
            mixed: Some(count(Role::Mixed)),
            strict_roles: self.strict_roles,
            workers_per_host: 8,
        }
    }

    /// How fast KV moves, bytes of a token, and what follows the last block; by the handoffs.
    fn link(&self) -> (Option<LinkSpec>, Option<f64>, Option<f64>) {
        let handoffs = || {
            self.requests
                .iter()
                .filter_map(|r| Some((r, r.record.handoff?)))
        };
        // A handoff that moved no bytes does not tell how fast the link is.
        let moved = |Handoff(bytes, ..): &Handoff| *bytes > 0;
        let largest = handoffs()
            .filter(|(_, handoff)| moved(handoff))
            .max_by_key(|(_, handoff)| handoff.0);
        let bytes = largest.map(|(request, Handoff(bytes, ..))| {
            bytes as f64 / f64::from(request.record.prompt_tokens.max(1))
        });
        // Where most of a transfer was hidden, it waited for chunks of the prompt, and its time says
        // nothing of the link.
        let alone =
            handoffs()
                .map(|(_, handoff)| handoff)
                .filter(|Handoff(_, transfer_ms, exposed_ms)| {
                    *transfer_ms > 0.0 && *transfer_ms <= UNHIDDEN * exposed_ms
                });
        let mut rates: Vec<f64> = alone
            .clone()
            .filter(moved)
            .map(|Handoff(bytes, transfer_ms, _)| 1e3 * bytes as f64 / transfer_ms)
            .collect();
        let mut after: Vec<f64> = alone
            .map(|Handoff(_, transfer_ms, exposed_ms)| 1e-3 * (exposed_ms - transfer_ms))
            .collect();
        let mut exposed: Vec<f64> = handoffs().map(|(_, handoff)| 1e-3 * handoff.2).collect();
        let latency_s = NetworkSpec::default().within_host.latency_s;
        let link = at(&mut rates, 0.9).map(|bytes_per_s| LinkSpec {
            bytes_per_s,
            latency_s,
        });
        let rest = at(&mut exposed, 0.5).map(|exposed_s| exposed_s - latency_s);
        let handoff_s = at(&mut after, 0.5).or(rest).map(|s| s.max(0.0));
        (link, bytes, handoff_s)
    }
}

/// A worker's limits: those that are given, else those of the log. Its KV has as many tokens in
/// blocks of another size.
fn own_limits(worker: &Worker, limits: Limits, given: &HardwareArgs) -> Limits {
    let block_size = given.block_size.unwrap_or(worker.block_size_tokens);
    let tokens = u64::from(worker.num_blocks) * u64::from(worker.block_size_tokens);
    let logged = u32::try_from(tokens / u64::from(block_size)).unwrap_or(u32::MAX);
    let num_blocks = given.num_blocks.unwrap_or(logged);
    let half = u64::from(num_blocks / 2) * u64::from(block_size);
    let half = u32::try_from(half).unwrap_or(u32::MAX);
    let longest = given.max_model_len.unwrap_or(worker.max_model_len_tokens);
    Limits {
        num_blocks,
        block_size,
        max_model_len: longest.min(half),
        ..limits
    }
}

/// The value that a share of all are below.
fn at(values: &mut [f64], share: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let place = share * (values.len().max(1) - 1) as f64;
    values.get(place.round() as usize).copied()
}

fn busiest_model(requests: &[Request]) -> u32 {
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    for request in requests {
        *counts.entry(request.record.model).or_default() += 1;
    }
    let most = counts.into_iter().max_by_key(|(_, count)| *count);
    most.map_or(0, |(model, _)| model)
}

/// Whether a request without output needs a worker.
fn is_wanted(request: &Request, model: u32) -> bool {
    let record = &request.record;
    record.model == model && record.outcome != Ended::Rejected
}

fn role(word: &str) -> Role {
    match word {
        "prefill" => Role::Prefill,
        "decode" => Role::Decode,
        _ => Role::Mixed,
    }
}

fn router(log: &Log, fleet: &Fleet) -> RouterArgs {
    let logged = &log.header.router;
    RouterArgs {
        policy: PolicyName::from_str(&logged.policy, true).unwrap_or(PolicyName::Cost),
        roles: RolesName::Fixed,
        role_preference: logged.role_preference,
        ttft_target_ms: logged.ttft_target_ms,
        tpot_target_ms: logged.tpot_target_ms,
        no_admission: !logged.admission,
        no_prefix_index: !fleet.workers.iter().any(|worker| worker.reports_cache),
    }
}

fn measured(index: usize, record: &Record, places: &HashMap<u32, u32>) -> Outcome {
    let due = Time::from_s(record.arrived_s);
    let after = |ms: f64| due.plus_s(1e-3 * ms);
    let place = |id: u32| places.get(&id).copied().unwrap_or(u32::MAX);
    let (prefill, decode) = record.workers.unwrap_or((u32::MAX, u32::MAX));
    let mut request = tasuki_sim::Request::new(index, due, record.prompt_tokens, 0);
    request.priority = record.priority;
    Outcome {
        admitted: record.admitted_ms.map(after),
        first: record.first_token_ms.map(after),
        second: record.second_token_ms.map(after),
        end: after(record.end_ms),
        cached_tokens: record.cached_tokens,
        output_tokens: record.output_tokens,
        prefill: place(prefill),
        decode: place(decode),
        retries: record.retries,
        queue_s: 1e-3 * record.queue_ms.unwrap_or(0.0),
        exposed_s: record.handoff.map_or(0.0, |handoff| 1e-3 * handoff.2),
        transfer_s: record.handoff.map_or(0.0, |handoff| 1e-3 * handoff.1),
        measured_gap_s: record.longest_gap_ms.map(|ms| 1e-3 * ms),
        ..Outcome::new(&request, due)
    }
}

/// When workers of the fleet got no new work, or were not there.
pub(super) fn absences(fleets: &[Fleet], fleet: &Fleet, began_s: f64) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (worker, place) in fleet.workers.iter().map(|w| WorkerId(w.id)).zip(0..) {
        let mut was_there = true;
        // What was known when the first request came holds from its start.
        let since = fleets.iter().rposition(|f| f.t <= began_s).unwrap_or(0);
        for known in &fleets[since..] {
            let is_there = known.workers.iter().any(|w| w.id == worker.0 && w.ready);
            if is_there != was_there {
                faults.push(Fault {
                    at: Time::from_s((known.t - began_s).max(0.0)),
                    worker: place,
                    kind: if is_there {
                        FaultKind::Undrain
                    } else {
                        FaultKind::Drain
                    },
                });
            }
            was_there = is_there;
        }
    }
    faults
}
