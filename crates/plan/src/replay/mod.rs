//! `tasuki simulate LOG`: a router's request log, first before the deployment that really served it,
//! then before another one.
//!
//! The first run says how far the simulation is off what was measured; only beyond that does the
//! second one say anything. Options of workers (`--steps`, `--max-batched-tokens`, …) hold in both
//! runs, as they correct what the log does not know. Options of topology, router and faults, and
//! `--speed`, make the second.

mod clients;
mod compare;
mod logged;
mod notes;

use std::fmt::Write;
use std::time::Instant;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command};
use serde::Serialize;
use serde_json::{Map, Value, json};
use tasuki_bench::args::{ArrivalArgs, WorkloadArgs};
use tasuki_sim::{Run, Time, simulate};

pub use self::clients::LogClients;
use self::compare::{Figure, Trust, difference, figures, table};
pub use self::compare::{is_met, most_missed};
pub use self::logged::Logged;
use crate::args::{RouterArgs, SimulateArgs, TopologyArgs};
use crate::deployment::Deployment;
use crate::error::SimulateError;
use crate::faults;
use crate::hardware::Hardware;
use crate::simulate::Simulated;

const UNTOLD_STEPS: &str = "the workers told the router of no steps, as vLLM's and SGLang's; the \
                            replay takes a small CPU's: give --steps, --rates or --gpu";

/// Replays a log. Returns the run that the result file is of, and the report.
///
/// # Errors
///
/// The log cannot be read or replayed, or options contradict it.
pub fn replay(
    args: &SimulateArgs,
    matches: &ArgMatches,
    path: &std::path::Path,
) -> Result<(Simulated, String), SimulateError> {
    let began = Instant::now();
    refuse_workload(matches)?;
    let mut log = Logged::read(path)?;
    let given = args.hardware.steps.is_some() || args.hardware.rates.is_some();
    if !given && args.hardware.gpu.is_none() && !log.tells_steps() {
        log.notes.push(UNTOLD_STEPS.to_owned());
    }
    let hardware = Hardware::or(&args.hardware, log.source())?;
    let real = real(args, &log, &hardware);
    let what_if = what_if(args, matches, &log, &hardware)?;
    let slo = args.output.slo.as_ref();
    let untold = log.without_gaps();
    if untold > 0 && slo.is_some_and(|slo| slo.itl_s.is_some()) {
        return Err(SimulateError::NoGaps {
            path: path.to_owned(),
            count: untold,
        });
    }
    let first = run(&log, &hardware, &real, 1.0);
    let speed = args.replay.speed.unwrap_or(1.0);
    let measured = figures(&log.measured, slo);
    let replayed = figures(&first.outcomes, slo);
    let second = what_if
        .as_ref()
        .map(|then| (then, run(&log, &hardware, then, speed)));
    let then = second.as_ref().map(|(_, run)| figures(&run.outcomes, slo));
    let trust = Trust::of(&measured, &replayed);
    let mut text = String::new();
    if args.output.json {
        let report = Report {
            log: path.display().to_string(),
            requests: log.requests.len(),
            steps: &hardware.source,
            notes: &log.notes,
            measured: object(&measured),
            replayed: object(&replayed),
            off_percent: differences(&measured, &replayed),
            trust,
            what_if: then.as_ref().map(|then| object(then)),
            change_percent: then.as_ref().map(|then| differences(&replayed, then)),
        };
        let _ = writeln!(text, "{}", json!(report));
    } else {
        let _ = writeln!(
            text,
            "{}: {} requests in {:.1} s, before {}, policy {}",
            path.display(),
            log.requests.len(),
            log.span_s(),
            named(&real.topology),
            real.router.policy,
        );
        for note in &log.notes {
            let _ = writeln!(text, "note: {note}");
        }
        if let Some((then, _)) = &second {
            let _ = writeln!(text, "what if: {}", told(args, then, &real));
        }
        text += &table(&measured, &replayed, then.as_deref());
        let _ = writeln!(
            text,
            "The replay is off by {:.1}% in the median and {:.1}% at most, over TTFT, TPOT and throughput: \
             smaller changes mean nothing.",
            trust.median_percent, trust.worst_percent
        );
        let _ = writeln!(
            text,
            "Simulated: {}; {:.2} s.",
            hardware.source,
            began.elapsed().as_secs_f64()
        );
    }
    let (deployment, run) = match second {
        Some((then, run)) => (then.topology.clone(), run),
        None => (real.topology, first),
    };
    let gpus_each = match (hardware.on_gpus, &args.hardware.gpu) {
        (false, _) => 0,
        (true, Some(_)) => args.hardware.tensor_parallel,
        (true, None) => log.tensor_parallel(),
    };
    let simulated = Simulated {
        run,
        hardware,
        gpus_each,
        topology: deployment,
        last_due_s: log.span_s(),
    };
    Ok((simulated, text))
}

fn real(args: &SimulateArgs, log: &Logged, hardware: &Hardware) -> Deployment {
    Deployment {
        workers: log.workers(hardware, &args.hardware),
        topology: log.topology(),
        router: log.router.clone(),
        faults: log.faults.clone(),
    }
}

/// What the options change; `None`: nothing.
fn what_if(
    args: &SimulateArgs,
    matches: &ArgMatches,
    log: &Logged,
    hardware: &Hardware,
) -> Result<Option<Deployment>, SimulateError> {
    let given = |id: &str| is_given(matches, id);
    let real = real(args, log, hardware);
    let logged = &log.router;
    let router = RouterArgs {
        policy: if given("policy") {
            args.router.policy
        } else {
            logged.policy
        },
        roles: args.router.roles,
        role_preference: if given("role_preference") {
            args.router.role_preference
        } else {
            logged.role_preference
        },
        ttft_target_ms: args.router.ttft_target_ms.or(logged.ttft_target_ms),
        tpot_target_ms: args.router.tpot_target_ms.or(logged.tpot_target_ms),
        no_admission: args.router.no_admission || logged.no_admission,
        no_prefix_index: args.router.no_prefix_index || logged.no_prefix_index,
    };
    let others = ["prefill", "decode", "mixed"].iter().any(|id| given(id));
    // What ran by strict roles stays so: another topology is one change, not two.
    let strict_roles = log.strict_roles || args.topology.strict_roles;
    let mut then = Deployment { router, ..real };
    then.topology.strict_roles = strict_roles;
    // Where the load grew, workers were added for it: they come as much earlier as it does.
    let speed = args.replay.speed.unwrap_or(1.0);
    for fault in &mut then.faults {
        fault.at = Time::from_s(fault.at.as_s() / speed);
    }
    if others {
        then.topology = TopologyArgs {
            strict_roles,
            ..args.topology.clone()
        };
        then.workers = hardware.workers(&then.topology)?;
        // Its workers are there all the time.
        then.faults.clear();
    } else if given("workers_per_host") {
        then.topology.workers_per_host = args.topology.workers_per_host;
        let hosts = (then.workers.len() as u32).div_ceil(args.topology.workers_per_host);
        for (index, worker) in (0..).zip(&mut then.workers) {
            worker.host = index % hosts;
        }
    }
    let count = then.workers.len() as u32;
    for fault in &args.faults.fault {
        then.faults.push(faults::parse(fault, count)?);
    }
    let router = ids::<RouterArgs>();
    let ids = ["strict_roles", "workers_per_host", "fault", "speed"].map(str::to_owned);
    let changes = router.into_iter().chain(ids).any(|id| given(&id));
    Ok((others || changes).then_some(then))
}

/// `speed`: how many times as fast as they came requests come.
fn run(log: &Logged, hardware: &Hardware, deployment: &Deployment, speed: f64) -> Run {
    let mut clients = LogClients::new(log, log.requests.len(), speed);
    simulate(deployment.config(hardware), &mut clients)
}

/// The log says what is sent.
fn refuse_workload(matches: &ArgMatches) -> Result<(), SimulateError> {
    let mut ids = ids::<WorkloadArgs>();
    ids.extend(self::ids::<ArrivalArgs>());
    ids.extend(["duration_s", "settle_s"].map(str::to_owned));
    match ids.iter().find(|id| is_given(matches, id)) {
        Some(id) => Err(SimulateError::TwoWorkloads {
            option: format!("--{}", id.replace('_', "-")),
        }),
        None => Ok(()),
    }
}

/// The options of a group.
pub fn ids<A: Args>() -> Vec<String> {
    let command = A::augment_args(Command::new("options"));
    let ids = command.get_arguments().map(|arg| arg.get_id().to_string());
    ids.collect()
}

/// Whether an option was on the command line.
pub fn is_given(matches: &ArgMatches, id: &str) -> bool {
    matches.value_source(id) == Some(ValueSource::CommandLine)
}

#[derive(Serialize)]
struct Report<'a> {
    log: String,
    requests: usize,
    steps: &'a str,
    notes: &'a [String],
    measured: Value,
    replayed: Value,
    off_percent: Value,
    trust: Trust,
    what_if: Option<Value>,
    change_percent: Option<Value>,
}

fn object(figures: &[Figure]) -> Value {
    let pairs = figures.iter().map(|f| (f.name.to_owned(), json!(f.value)));
    Value::Object(pairs.collect::<Map<_, _>>())
}

fn differences(from: &[Figure], to: &[Figure]) -> Value {
    let pairs = from.iter().filter_map(|figure| {
        let other = to.iter().find(|other| other.name == figure.name)?;
        let by = difference(figure.name, figure.value, other.value)?;
        Some((figure.name.to_owned(), json!(by)))
    });
    Value::Object(pairs.collect::<Map<_, _>>())
}

fn named(topology: &TopologyArgs) -> String {
    let parts = [
        (topology.prefill, "prefill"),
        (topology.decode, "decode"),
        (topology.mixed(), "mixed"),
    ];
    let parts = parts.iter().filter(|(count, _)| *count > 0);
    let parts: Vec<String> = parts
        .map(|(count, role)| format!("{count} {role}"))
        .collect();
    let name = parts.join(" + ");
    let strict = if topology.strict_roles {
        ", strict roles"
    } else {
        ""
    };
    format!("{name}{strict}")
}

/// What differs from what really ran.
fn told(args: &SimulateArgs, then: &Deployment, real: &Deployment) -> String {
    let mut told = vec![named(&then.topology)];
    let per_host = then.topology.workers_per_host;
    if per_host != real.topology.workers_per_host {
        told.push(format!("{per_host} workers on a machine"));
    }
    if then.router != real.router {
        told.push(format!("policy {}", then.router.policy));
    }
    if let Some(speed) = args.replay.speed {
        told.push(format!("requests {speed} times as fast"));
    }
    if !args.faults.fault.is_empty() {
        told.push("with faults".to_owned());
    }
    told.join(", ")
}

#[cfg(test)]
mod limits_given;
#[cfg(test)]
mod odd_values;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod what_ifs;
