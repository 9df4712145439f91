//! `tasuki bench serve`, from its options to the report and the result file.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tasuki_text::{ModelText, TextError};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::args::WorkloadKind;
use crate::arrivals::Arrival;
use crate::client::{
    Client, ClientOptions, Failure, Network, ProbeError, RequestOptions, Stop, Target, TargetError,
    api_path, served_model, wait_ready,
};
use crate::console::{PrintError, print, warn};
use crate::error::PlanError;
use crate::live::{Counters, LiveView};
use crate::load::{Load, Sending};
use crate::machine::{Machine, cpu_s, git_revision};
use crate::options::ServeArgs;
use crate::pacer::Pacer;
use crate::plan::Workload;
use crate::recorder::{Record, Recorder};
use crate::report::{Heading, report};
use crate::result::{ClientCost, Requests, RunResult, SCHEMA, WriteError, check_writable};
use crate::summary::{Measuring, Summary, summarize};

/// Warm-up requests in flight at most.
const WARMUP_AT_ONCE: usize = 8;
/// Requests of a run that only time limits.
const ENDLESS: u32 = 100_000_000;
/// Draws other prompts for warm-up than for the run.
const WARMUP_SEED: u64 = 0x7761_726d;

/// The exit code of an interrupt, as a shell has it.
pub const INTERRUPTED: i32 = 130;

/// How a run ended that began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    Measured,
    /// Not one request was answered in full.
    NothingAnswered,
    Interrupted,
}

/// Why there is nothing to report.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Probe(#[from] ProbeError),
    #[error("--tokenizer {path}: {source}")]
    Tokenizer { path: PathBuf, source: TextError },
    #[error("--api-key has characters that no header may have")]
    ApiKey,
    #[error("the {what} failed, so the run was not begun: {failure}")]
    Warmup {
        what: &'static str,
        failure: Failure,
    },
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    Print(#[from] PrintError),
    #[error("cannot run: {0}")]
    System(#[from] std::io::Error),
}

/// Runs the benchmark; prints the report and writes the result file. A dry run ends when all
/// is made that needs no server, and prints the workload.
///
/// # Errors
/// What kept the run from being made.
pub fn serve(args: &ServeArgs, command: &[String]) -> Result<Ended, RunError> {
    let run = Run::new(args, command)?;
    if args.output.dry_run {
        print(&format!("{}\n", run.described))?;
        return Ok(Ended::Measured);
    }
    if !args.output.no_output {
        check_writable(&run.path)?;
    }
    let threads = args.measuring.threads;
    let mut builder = match threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    let runtime = builder
        .worker_threads(threads.into())
        .enable_all()
        .build()?;
    let ended = runtime.block_on(run.run());
    runtime.shutdown_background();
    ended
}

struct Run<'a> {
    args: &'a ServeArgs,
    command: &'a [String],
    created: chrono::DateTime<chrono::Utc>,
    /// Of the result.
    path: PathBuf,
    target: Target,
    arrival: Arrival,
    /// Until it is sent.
    workload: Option<Box<dyn Workload>>,
    described: serde_json::Value,
    counters: Arc<Counters>,
}

impl<'a> Run<'a> {
    /// Everything that needs no server.
    fn new(args: &'a ServeArgs, command: &'a [String]) -> Result<Self, RunError> {
        let target = Target::parse(&args.server.base_url)?;
        let mut wanted = args.workload.clone();
        if args.measuring.duration_s.is_some() && is_made_up(wanted.workload) {
            wanted.num_requests = wanted.num_requests.or(Some(ENDLESS));
        }
        let plan = wanted.plan(args.server.endpoint)?;
        let arrival = args.arrival.arrival(plan.has_times())?;
        let created = chrono::Utc::now();
        let default = || format!("bench-{}.json", created.format("%Y%m%d-%H%M%S")).into();
        Ok(Self {
            args,
            command,
            created,
            path: args.output.output.clone().unwrap_or_else(default),
            target,
            arrival,
            described: plan.describe(),
            workload: Some(plan.build()?),
            counters: Arc::new(Counters::default()),
        })
    }

    async fn run(mut self) -> Result<Ended, RunError> {
        let stop = stop_on_signals()?;
        let mut stopped = stop.clone();
        let prepared = tokio::select! {
            prepared = self.prepare(&stop) => prepared,
            _ = stopped.wait_for(|stop| *stop) => return Ok(Ended::Interrupted),
        };
        let (client, model) = match prepared {
            Err(RunError::Warmup {
                failure: Failure::Interrupted,
                ..
            }) => return Ok(Ended::Interrupted),
            prepared => prepared?,
        };
        self.counters.reset();
        let (sending, cpu_s) = self.measure(client, stop).await;
        self.tell(sending, &model, cpu_s)
    }

    /// Waits for the server, learns its model, warms it up.
    async fn prepare(&mut self, stop: &Stop) -> Result<(Arc<Client>, String), RunError> {
        let server = &self.args.server;
        let ready = Duration::from_secs_f64(server.ready_timeout_s);
        let probe = self.client(String::new())?;
        wait_ready(&probe, &self.target, ready).await?;
        let model = match &server.model {
            Some(model) => model.clone(),
            None => served_model(&probe, &self.target, ready).await?,
        };
        let client = Arc::new(self.client(model.clone())?);
        if let Some(mut warmup) = self.warmup()? {
            let mut requests = std::iter::from_fn(|| warmup.next());
            Load::send_unmeasured(&client, &mut requests, WARMUP_AT_ONCE, stop)
                .await
                .map_err(|failure| RunError::Warmup {
                    what: "warm-up",
                    failure,
                })?;
        }
        let mut own = std::iter::from_fn(|| self.workload.as_mut()?.warm_up());
        Load::send_unmeasured(&client, &mut own, WARMUP_AT_ONCE, stop)
            .await
            .map_err(|failure| RunError::Warmup {
                what: "workload's preparation of the prefix cache",
                failure,
            })?;
        Ok((client, model))
    }

    fn client(&self, model: String) -> Result<Client, RunError> {
        let server = &self.args.server;
        let options = ClientOptions {
            request: RequestOptions {
                api: server.endpoint,
                model,
                usage: server.usage_stats,
                temperature: server.temperature.0,
                extra: server
                    .extra_body
                    .clone()
                    .map_or_else(Default::default, |f| f.0),
            },
            api_key: server.api_key.clone().filter(|key| !key.is_empty()),
            headers: server.header.clone(),
            timeout: Duration::from_secs_f64(server.timeout_s),
        };
        let transport = Arc::new(Network::new(self.target.clone()));
        Client::new(&self.target, transport, options, Arc::clone(&self.counters))
            .map_err(|_| RunError::ApiKey)
    }

    /// Requests like those of the run, but others.
    fn warmup(&self) -> Result<Option<Box<dyn Workload>>, RunError> {
        let requests = self.args.measuring.warmup;
        if requests == 0 {
            return Ok(None);
        }
        let mut wanted = self.args.workload.clone();
        if wanted.workload == WorkloadKind::Prompts {
            wanted.workload = WorkloadKind::Fixed; // its prompts are not to be cached
            wanted.prompts_file = None;
            wanted.lengths = Some((64, wanted.output_tokens.take().unwrap_or(16)));
        }
        wanted.seed ^= WARMUP_SEED;
        wanted.num_requests = Some(requests);
        wanted.distinct_prompts = None;
        Ok(Some(wanted.plan(self.args.server.endpoint)?.build()?))
    }

    async fn measure(&mut self, client: Arc<Client>, stop: Stop) -> (Sending, f64) {
        let duration = self.args.measuring.duration_s.map(Duration::from_secs_f64);
        let total = self.workload.as_ref().and_then(|w| w.total());
        let total = total.filter(|_| duration.is_none());
        let load = Load {
            client,
            workload: self.workload.take().expect("a run is measured once"),
            arrival: self.arrival,
            seed: self.args.workload.seed,
            duration,
            pacer: Pacer::precise(),
            stop,
        };
        let ready = load.ready();
        let view =
            (!self.args.output.quiet).then(|| LiveView::start(Arc::clone(&self.counters), total));
        let before_s = cpu_s();
        let sending = ready.run().await;
        let used_s = cpu_s() - before_s;
        drop(view);
        (sending, used_s)
    }

    fn tell(self, sending: Sending, model: &str, cpu_s: f64) -> Result<Ended, RunError> {
        let (args, measuring) = (self.args, &self.args.measuring);
        let interrupted = sending.interrupted;
        let steady_s = self.steady_s(&sending);
        let records = self.records(sending)?;
        let limited = self.arrival.max_concurrency.is_some();
        let summary = summarize(
            &records,
            Measuring {
                steady_s,
                slo: measuring.slo.as_ref(),
                paced: !limited && !self.arrival.is_closed(),
            },
        );
        let heading = Heading {
            backend: &args.server.backend,
            arrival: &self.arrival,
            slo: measuring.slo.as_ref(),
            cpu_s,
            threads: measuring.threads.into(),
        };
        let printed = print(&report(&heading, &summary));
        if !args.output.no_output {
            self.write(&records, &summary, model, cpu_s, interrupted)?;
            print(&format!("Result file: {}\n", self.path.display()))?;
        }
        printed?;
        Ok(match (interrupted, summary.metrics.completed) {
            (true, _) => Ended::Interrupted,
            (false, 0) => Ended::NothingAnswered,
            (false, _) => Ended::Measured,
        })
    }

    /// Begin and end of the steady state, if that is what to measure.
    fn steady_s(&self, sending: &Sending) -> Option<(f64, f64)> {
        let measuring = &self.args.measuring;
        let begin_s = measuring.settle_s.unwrap_or(0.0).max(self.arrival.ramp_s);
        let end_s = (sending.last_due - sending.start).as_secs_f64();
        if !measuring.steady && begin_s <= 0.0 {
            return None;
        }
        if end_s <= begin_s {
            warn(&format!(
                "the last request was due after {end_s:.1} s, before the steady state begins \
                 ({begin_s:.1} s): the whole run is measured; make it longer"
            ));
            return None;
        }
        Some((begin_s, end_s))
    }

    fn records(&self, sending: Sending) -> Result<Vec<Record>, RunError> {
        let uncounted = sending.answers.iter().any(|(_, a)| a.usage.is_none());
        let path = self.args.workload.tokenizer.as_ref();
        let tokenizer = path.filter(|_| uncounted).map(|path| {
            ModelText::load(path).map_err(|source| RunError::Tokenizer {
                path: path.clone(),
                source,
            })
        });
        let recorder = Recorder::new(sending.start, tokenizer.transpose()?);
        let answers = sending.answers.into_iter();
        Ok(answers
            .map(|(sent, answer)| recorder.record(&sent, answer))
            .collect())
    }

    fn write(
        &self,
        records: &[Record],
        summary: &Summary,
        model: &str,
        cpu_s: f64,
        interrupted: bool,
    ) -> Result<(), RunError> {
        let (server, output) = (&self.args.server, &self.args.output);
        let topology = output
            .topology
            .clone()
            .map(|f| serde_json::Value::Object(f.0));
        let tokens = summary.metrics.output_tokens as f64;
        let result = RunResult {
            schema: SCHEMA,
            kind: "serve",
            created: self
                .created
                .to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
            command: self.command,
            label: output.label.as_deref(),
            topology: topology.as_ref(),
            model,
            base_url: &server.base_url,
            endpoint: api_path(server.endpoint),
            git_revision: git_revision(),
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::this(),
            workload: self.described.clone(),
            arrival: self.arrival.describe(),
            slo: self.args.measuring.slo.as_ref(),
            window: summary.window,
            token_count_source: summary.token_count_source,
            interrupted,
            metrics: &summary.metrics,
            failures: &summary.failures,
            client: ClientCost {
                cpu_s,
                tokens_per_cpu_s: if cpu_s > 0.0 { tokens / cpu_s } else { 0.0 },
                threads: self.args.measuring.threads.into(),
            },
            simulated: None,
            requests: Requests::new(records, summary, !output.no_chunks),
        };
        Ok(result.write(&self.path)?)
    }
}

/// Whether requests can be made without end.
fn is_made_up(kind: WorkloadKind) -> bool {
    use WorkloadKind as K;
    matches!(
        kind,
        K::Random | K::Fixed | K::PrefillOnly | K::SharedPrefix | K::MultiTurn
    )
}

/// Becomes true at the first SIGINT or SIGTERM; the second ends the process.
fn stop_on_signals() -> Result<Stop, RunError> {
    let (sender, stop) = watch::channel(false);
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::spawn(async move {
        let mut signals = async || {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        };
        signals().await;
        let _ = sender.send(true);
        signals().await;
        std::process::exit(INTERRUPTED);
    });
    Ok(stop)
}
