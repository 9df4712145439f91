//! `tasuki simulate`, from its options to the report and the result file.

use std::path::Path;
use std::time::Instant;

use clap::{ArgMatches, CommandFactory, FromArgMatches};
use serde_json::{Value, json};
use tasuki_bench::args::WorkloadKind;
use tasuki_bench::console::{print, warn};
use tasuki_bench::machine::{Machine, git_revision};
use tasuki_bench::recorder::Record;
use tasuki_bench::report::{Heading, report};
use tasuki_bench::result::{ClientCost, Requests, RunResult, SCHEMA, check_writable};
use tasuki_bench::summary::{Measuring, Summary, summarize};
use tasuki_sim::{Config, Run, simulate};

use crate::args::{SimulateArgs, TopologyArgs};
use crate::clients::BenchClients;
use crate::deployment::Deployment;
use crate::error::SimulateError;
use crate::faults;
use crate::hardware::Hardware;
use crate::replay::replay;
use crate::result::{records, told};

/// Requests of a run that only time limits.
const ENDLESS: u32 = 100_000_000;

/// Runs `tasuki simulate` with these arguments; returns the exit code: 1 if nothing could be
/// simulated or no request was answered.
pub fn run_simulate(arguments: Vec<String>) -> i32 {
    let words = ["tasuki", "simulate"].map(str::to_owned).into_iter();
    let command: Vec<String> = words.chain(arguments.iter().cloned()).collect();
    let program = std::iter::once("tasuki simulate".to_owned());
    let matches = SimulateArgs::command().try_get_matches_from(program.chain(arguments));
    let parsed = matches
        .and_then(|matches| SimulateArgs::from_arg_matches(&matches).map(|args| (args, matches)));
    let (args, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            let _ = error.print();
            return error.exit_code();
        }
    };
    let answer = || {
        if let Some(path) = &args.output.output {
            check_writable(path)?;
        }
        match &args.replay.log {
            Some(log) => replayed(&args, &matches, log, &command),
            None => run(&args, &command),
        }
    };
    match answer() {
        Ok(completed) if completed > 0 => 0,
        Ok(_) => 1,
        Err(error) => {
            warn(&format!("tasuki simulate: {error}"));
            1
        }
    }
}

/// A run, and what its result file needs.
pub struct Simulated {
    pub run: Run,
    pub hardware: Hardware,
    pub topology: TopologyArgs,
    /// GPUs of a worker; 0: they have none.
    pub gpus_each: u32,
    pub last_due_s: f64,
}

impl Simulated {
    fn summary(&self, args: &SimulateArgs) -> Result<(Vec<Record>, Summary), SimulateError> {
        // As of `tasuki bench serve`.
        let from = [
            ("--settle-s", args.output.settle_s),
            (
                "--ramp-s",
                args.arrival.ramp_s.filter(|ramp_s| *ramp_s > 0.0),
            ),
        ];
        let given = from.into_iter().filter_map(|(name, s)| Some((name, s?)));
        let from = given.max_by(|a, b| a.1.total_cmp(&b.1));
        let last_s = self.last_due_s;
        if let Some((option, from_s)) = from.filter(|(_, from_s)| *from_s >= last_s) {
            return Err(SimulateError::Settle {
                option,
                from_s,
                last_s,
            });
        }
        let records = records(&self.run);
        let measuring = Measuring {
            steady_s: from.map(|(_, from_s)| (from_s, last_s)),
            slo: args.output.slo.as_ref(),
            paced: false,
        };
        let summary = summarize(&records, measuring);
        Ok((records, summary))
    }
}

/// Requests that were answered in a replay of a log.
fn replayed(
    args: &SimulateArgs,
    matches: &ArgMatches,
    log: &Path,
    command: &[String],
) -> Result<usize, SimulateError> {
    let began = Instant::now();
    let (simulated, text) = replay(args, matches, log)?;
    let (records, summary) = simulated.summary(args)?;
    let file = ResultFile {
        command,
        workload: json!({"kind": "log", "file": log.display().to_string()}),
        arrival: json!({"kind": "log", "speed": args.replay.speed}),
        cpu_s: began.elapsed().as_secs_f64(),
    };
    file.write(args, &simulated, &records, &summary, text)?;
    Ok(completed(&summary))
}

/// Requests that were answered.
fn run(args: &SimulateArgs, command: &[String]) -> Result<usize, SimulateError> {
    let began = Instant::now();
    let hardware = Hardware::new(&args.hardware)?;
    let workload = workload(args)?;
    let arrival = args.arrival.arrival(workload.has_times())?;
    let described = workload.describe();
    let mut clients = BenchClients::new(
        workload.build()?,
        arrival,
        args.workload.seed,
        args.output.duration_s,
    );
    let limit = arrival.max_concurrency.filter(|_| !arrival.is_closed());
    let deployment = deployment(args, &hardware)?;
    let config = Config {
        max_in_flight: limit,
        ..deployment.config(&hardware)
    };
    let simulated = Simulated {
        run: simulate(config, &mut clients),
        gpus_each: match hardware.on_gpus {
            true => args.hardware.tensor_parallel,
            false => 0,
        },
        hardware,
        topology: deployment.topology,
        last_due_s: clients.last_due.as_s(),
    };
    let (records, summary) = simulated.summary(args)?;
    let told = told(&simulated.run, &simulated.hardware.source);
    let cpu_s = began.elapsed().as_secs_f64();
    let text = if args.output.json {
        format!(
            "{}\n",
            json!({"metrics": summary.metrics, "simulated": told})
        )
    } else {
        let heading = Heading {
            backend: "tasuki, simulated",
            arrival: &arrival,
            slo: args.output.slo.as_ref(),
            cpu_s,
            threads: 1,
        };
        report(&heading, &summary) + &below(&simulated.run, &told, cpu_s)
    };
    let file = ResultFile {
        command,
        workload: described,
        arrival: arrival.describe(),
        cpu_s,
    };
    file.write(args, &simulated, &records, &summary, text)?;
    Ok(completed(&summary))
}

/// What a result file says of how it came about.
struct ResultFile<'a> {
    command: &'a [String],
    workload: Value,
    arrival: Value,
    cpu_s: f64,
}

impl ResultFile<'_> {
    /// Writes it, if there is to be one, and prints the report.
    fn write(
        self,
        args: &SimulateArgs,
        simulated: &Simulated,
        records: &[Record],
        summary: &Summary,
        report: String,
    ) -> Result<(), SimulateError> {
        let printed = print(&report);
        let Some(path) = &args.output.output else {
            return Ok(printed?);
        };
        let topology = topology(&simulated.topology, simulated.gpus_each);
        let result = RunResult {
            schema: SCHEMA,
            kind: "serve",
            created: chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
            command: self.command,
            label: args.output.label.as_deref(),
            topology: Some(&topology),
            model: &simulated.hardware.name,
            base_url: "simulated",
            endpoint: "/v1/completions",
            git_revision: git_revision(),
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::this(),
            workload: self.workload,
            arrival: self.arrival,
            slo: args.output.slo.as_ref(),
            window: summary.window,
            token_count_source: summary.token_count_source,
            interrupted: false,
            metrics: &summary.metrics,
            failures: &summary.failures,
            client: ClientCost {
                cpu_s: self.cpu_s,
                tokens_per_cpu_s: summary.metrics.output_tokens as f64 / self.cpu_s,
                threads: 1,
            },
            simulated: Some(told(&simulated.run, &simulated.hardware.source)),
            requests: Requests::new(records, summary, !args.output.no_chunks),
        };
        result.write(path)?;
        if !args.output.json {
            print(&format!("result: {}\n", path.display()))?;
        }
        Ok(printed?)
    }
}

fn completed(summary: &Summary) -> usize {
    summary.metrics.completed
}

fn workload(args: &SimulateArgs) -> Result<tasuki_bench::workload::WorkloadPlan, SimulateError> {
    let mut wanted = args.workload.clone();
    match wanted.workload {
        WorkloadKind::Prompts => return Err(SimulateError::Content("prompts")),
        WorkloadKind::DecodeOnly => return Err(SimulateError::Content("decode-only")),
        WorkloadKind::Trace => {}
        _ if args.output.duration_s.is_some() => {
            wanted.num_requests = wanted.num_requests.or(Some(ENDLESS));
        }
        _ => {}
    }
    Ok(wanted.plan_lengths()?)
}

fn deployment(args: &SimulateArgs, hardware: &Hardware) -> Result<Deployment, SimulateError> {
    let workers = hardware.workers(&args.topology)?;
    let count = workers.len() as u32;
    let faults = args.faults.fault.iter();
    let faults: Result<Vec<_>, _> = faults.map(|fault| faults::parse(fault, count)).collect();
    Ok(Deployment {
        workers,
        topology: args.topology.clone(),
        router: args.router.clone(),
        faults: faults?,
    })
}

/// As `tasuki bench sweep` writes it. `gpus`: of a worker.
fn topology(topology: &TopologyArgs, gpus: u32) -> Value {
    let (prefill, decode, mixed) = (topology.prefill, topology.decode, topology.mixed());
    let parts = [(prefill, 'p'), (decode, 'd'), (mixed, 'm')];
    let name: String = parts
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, role)| format!("{count}{role}"))
        .collect();
    let workers = prefill + decode + mixed;
    json!({
        "name": format!("{name} (simulated)"),
        "prefill": prefill,
        "decode": decode,
        "mixed": mixed,
        "strict_roles": topology.strict_roles,
        "workers": workers,
        "gpus": workers * gpus,
    })
}

/// What a server could not tell.
fn below(run: &Run, told: &Value, took_s: f64) -> String {
    use std::fmt::Write;
    let mut text = String::new();
    let over_s = run.ended.as_s().max(1e-9);
    let _ = writeln!(
        text,
        "Simulated: {}.",
        told["steps"].as_str().unwrap_or_default()
    );
    let _ = writeln!(
        text,
        "{} of {} requests were split, {} retries; {:.2} s simulated in {:.2} s.",
        told["split_requests"],
        run.outcomes.len(),
        told["retries"],
        over_s,
        took_s,
    );
    for change in &run.role_changes {
        let (at_s, worker) = (change.at.as_s(), change.worker);
        let (from, to, reason) = (change.from, change.to, &change.reason);
        let _ = writeln!(
            text,
            "{at_s:.1} s: worker {worker} from {from} to {to}: {reason}"
        );
    }
    const SHOWN: usize = 16;
    for (index, worker) in run.workers.iter().take(SHOWN).enumerate() {
        let _ = writeln!(
            text,
            "worker {index}: busy {:.0}%, {:.0}% with prompts; {} steps, {} preemptions",
            100.0 * worker.busy_s / over_s,
            100.0 * worker.prompt_steps_s / over_s,
            worker.steps,
            worker.preemptions,
        );
    }
    if run.workers.len() > SHOWN {
        let _ = writeln!(text, "and {} workers more", run.workers.len() - SHOWN);
    }
    text
}
