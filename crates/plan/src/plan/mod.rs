//! `tasuki plan`: which topology serves a workload best within objectives.

mod args;
mod degrees;
mod design;
mod hosts;
mod lengths;
mod planner;
mod probe;
mod run_length;
mod screen;
mod start;
#[cfg(test)]
mod tests;
mod until_missed;
mod variations;

use std::fmt::Write;
use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser};
use tasuki_bench::args::WorkloadArgs;
use tasuki_bench::console::{print, warn};
use tasuki_bench::result::{check_writable, write_whole};

use self::args::PlanArgs;
pub use self::planner::STEP_SHARE;
use self::planner::{Loss, Plan, Planner};
use self::probe::{Found, Seeing};
use self::start::decimal;
use crate::error::SimulateError;
use crate::replay::{ids, is_given};

/// Designs in the table, beside the one that is taken.
const SHOWN: usize = 16;

/// Runs `tasuki plan` with these arguments; returns the exit code: 1 if there is no plan, or no
/// design meets the objectives.
pub fn run_plan(arguments: Vec<String>) -> i32 {
    let program = std::iter::once("tasuki plan".to_owned());
    let matches = PlanArgs::command().try_get_matches_from(program.chain(arguments));
    let parsed = matches
        .and_then(|matches| PlanArgs::from_arg_matches(&matches).map(|args| (args, matches)));
    let (args, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            let _ = error.print();
            return error.exit_code();
        }
    };
    match refuse_workload(&args, &matches).and_then(|()| run(&args)) {
        Ok(true) => 0,
        Ok(false) => 1,
        Err(error) => {
            warn(&format!("tasuki plan: {error}"));
            1
        }
    }
}

/// The plan for these arguments, as JSON and as `tasuki plan` prints it; nothing is printed.
///
/// # Errors
///
/// What `tasuki plan` would say.
pub fn plan_quietly(arguments: Vec<String>) -> Result<(String, String), String> {
    let began = Instant::now();
    let program = std::iter::once("tasuki plan".to_owned());
    let args = PlanArgs::try_parse_from(program.chain(arguments)).map_err(|e| e.to_string())?;
    let plan = Planner::new(&args).and_then(|mut planner| planner.plan());
    let plan = plan.map_err(|error| error.to_string())?;
    let json = serde_json::to_string(&plan).map_err(|error| error.to_string())?;
    Ok((json, text(&plan, began.elapsed().as_secs_f64())))
}

/// A log says what is sent.
fn refuse_workload(args: &PlanArgs, matches: &ArgMatches) -> Result<(), SimulateError> {
    let mut ids = ids::<WorkloadArgs>();
    ids.retain(|id| id != "num_requests");
    let second = ids.iter().find(|id| is_given(matches, id));
    match second.filter(|_| args.goal.from.is_some()) {
        Some(id) => Err(SimulateError::TwoWorkloads {
            option: format!("--{}", id.replace('_', "-")),
        }),
        None => Ok(()),
    }
}

fn run(args: &PlanArgs) -> Result<bool, SimulateError> {
    let began = Instant::now();
    let mut planner = Planner::new(args)?;
    args.goal.refuse_one_path()?;
    for path in [&args.goal.output, &args.goal.values].into_iter().flatten() {
        check_writable(path)?;
    }
    let plan = planner.plan()?;
    let mut printed = print(&text(&plan, began.elapsed().as_secs_f64()));
    if let Some(path) = &args.goal.output {
        let content = serde_json::to_string_pretty(&plan).unwrap_or_default();
        write(path, &(content + "\n"))?;
        printed = printed.and_then(|()| print(&format!("plan: {}\n", path.display())));
    }
    let is_met = plan.best.rate > 0.0;
    if let Some(path) = &args.goal.values {
        let said = if is_met {
            write(path, &plan.helm_values)?;
            format!("values: {}\n", path.display())
        } else {
            "values: not written, as no design meets the objectives\n".to_owned()
        };
        printed = printed.and_then(|()| print(&said));
    }
    printed?;
    Ok(is_met)
}

fn write(path: &Path, content: &str) -> Result<(), SimulateError> {
    let written = write_whole(path, |file| file.write_all(content.as_bytes()));
    written.map_err(|error| SimulateError::NotWritten {
        path: path.to_owned(),
        reason: error.to_string(),
    })
}

fn text(plan: &Plan, took_s: f64) -> String {
    let mut text = String::new();
    for note in &plan.notes {
        let _ = writeln!(text, "note: {note}");
    }
    let _ = writeln!(
        text,
        "{:<38} {:>9} {:>9} {:>9} {:>18} {:>18} {:>6}",
        "design", "step", "estimate", "requests", "TTFT p50/p95 ms", "TPOT p50/p95 ms", "split"
    );
    let is_shown =
        |(rank, found): &(usize, &Found)| *rank < SHOWN || found.design == plan.best.design;
    let shown: Vec<&Found> = plan
        .simulated
        .iter()
        .enumerate()
        .filter(is_shown)
        .map(|(_, found)| found)
        .collect();
    for found in &shown {
        row(&mut text, found);
    }
    let _ = writeln!(
        text,
        "requests: the highest rate a second within the objectives; the other columns are at it. Rates \
         within {:.0}% count as equal, and the design with the fewest kinds of workers is taken.",
        100.0 * (plan.precision - 1.0)
    );
    if shown
        .iter()
        .any(|f| f.design.prefill_max_batched_tokens.is_some())
    {
        text +=
            "step: its largest size in tokens; with two, the first one is of prefill workers.\n";
    }
    if plan.itl_target_ms > 0.0 {
        let _ = writeln!(
            text,
            "A step that decodes takes about {} ms at most with prompts in it (--itl-target-ms).",
            decimal(plan.itl_target_ms)
        );
    }
    let cached = match plan.lengths.cached {
        cached if cached >= 0.5 => format!(", {cached:.0} of them cached,"),
        _ => String::new(),
    };
    let _ = writeln!(
        text,
        "workload: prompts of {:.0} tokens{cached} and answers of {:.0} in the mean",
        plan.lengths.prompt, plan.lengths.output
    );
    if plan.best.rate <= 0.0 {
        let _ = writeln!(
            text,
            "\nno design meets the objectives at any rate that was tried; the nearest is shown at the \
             lowest: {} ({})",
            plan.best.name, plan.best.binds
        );
        expected(&mut text, "  expected", &plan.expected);
        return text + &ended(plan, took_s);
    }
    let _ = writeln!(text, "\nbest: {}", plan.best.name);
    let _ = writeln!(text, "  binds: {}", plan.best.binds);
    expected(&mut text, "  expected", &plan.expected);
    match (&plan.best_colocated, &plan.expected_colocated) {
        (Some(found), Some(seen)) if found.design != plan.best.design => {
            let _ = writeln!(text, "best colocated: {}", found.name);
            let _ = writeln!(text, "  binds: {}", found.binds);
            let more = 100.0 * (plan.best.rate / found.rate.max(1e-9) - 1.0);
            let _ = writeln!(
                text,
                "  {} requests/s; the best has {more:+.0}%",
                per_s(found.rate)
            );
            expected(&mut text, "  expected", seen);
        }
        _ => {
            let _ = writeln!(text, "that is the best colocated one, too");
        }
    }
    if let Some(cost) = plan.expected_cost_per_million_tokens {
        let most = plan.best.cost_per_million_tokens.unwrap_or(f64::NAN);
        let _ = writeln!(
            text,
            "a million output tokens cost {cost:.2} at the expected rate, {most:.2} at the highest"
        );
    }
    for loss in &plan.losses {
        lost(&mut text, loss, plan.best.rate);
    }
    for variation in &plan.variations {
        let same = if variation.changes {
            "then"
        } else {
            "the same:"
        };
        let gpus = variation.needs_gpus.map_or(String::new(), |gpus| {
            format!(" meet the objectives; all would with about {gpus} GPUs")
        });
        let _ = writeln!(
            text,
            "{}: {same} {}, {} requests/s{gpus}",
            variation.what,
            variation.best,
            per_s(variation.rate)
        );
    }
    let _ = writeln!(text, "start it: {}", plan.command);
    text + &ended(plan, took_s)
}

fn ended(plan: &Plan, took_s: f64) -> String {
    format!(
        "{} designs estimated, {} simulated, in {took_s:.1} s. {}.\n",
        plan.designs,
        plan.simulated.len(),
        plan.steps
    )
}

fn lost(text: &mut String, loss: &Loss, rate: f64) {
    let role = loss.role;
    let _ = match &loss.expected {
        None => writeln!(text, "without one {role} worker: nothing can be served"),
        Some(seen) => writeln!(
            text,
            "without one {role} worker: {} requests/s ({:+.0}%); at {} requests/s {:.0}% meet the \
             objectives",
            per_s(loss.rate),
            100.0 * (loss.rate / rate.max(1e-9) - 1.0),
            per_s(seen.rate),
            100.0 * seen.attainment,
        ),
    };
}

fn row(text: &mut String, found: &Found) {
    let at = &found.at;
    let pair = |low, high| format!("{} / {}", ms(low, 1), ms(high, 1));
    let _ = writeln!(
        text,
        "{:<38} {:>9} {:>9} {:>9} {:>18} {:>18} {:>5.0}%",
        found.name,
        found.design.steps(),
        per_s(found.estimated_rate),
        per_s(found.rate),
        pair(at.ttft_p50_ms, at.ttft_p95_ms),
        pair(at.tpot_p50_ms, at.tpot_p95_ms),
        100.0 * at.split,
    );
}

fn expected(text: &mut String, what: &str, seen: &Seeing) {
    let _ = writeln!(
        text,
        "{what} at {} requests/s: {:.0}% meet the objectives, goodput {}; TTFT p50 {}, p95 {} ms; \
         TPOT p50 {}, p95 {} ms",
        per_s(seen.rate),
        100.0 * seen.attainment,
        per_s(seen.goodput),
        ms(seen.ttft_p50_ms, 1),
        ms(seen.ttft_p95_ms, 1),
        ms(seen.tpot_p50_ms, 2),
        ms(seen.tpot_p95_ms, 2),
    );
}

/// Requests a second: two digits after the point, and three that count where there is less than one.
fn per_s(rate: f64) -> String {
    let digits = match rate > 0.0 && rate < 1.0 {
        true => (2.0 - rate.log10().floor()).min(9.0) as usize,
        false => 2,
    };
    format!("{rate:.digits$}")
}

/// Milliseconds, with so many digits after the point. Answers of one token have no TPOT.
fn ms(value: f64, digits: usize) -> String {
    match value.is_nan() {
        true => "-".to_owned(),
        false => format!("{value:.digits$}"),
    }
}
