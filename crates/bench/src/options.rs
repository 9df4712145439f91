//! The command line of `tasuki bench serve`; every setting is defined once,
//! here or in [`crate::args`].

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand};
use hyper::header::{HeaderName, HeaderValue};
use serde_json::{Map, Value};

use crate::args::{ArrivalArgs, WorkloadArgs};
use crate::client::UsageStats;
use crate::fake::FakeServerArgs;
use crate::plan::Api;
use crate::slo::Slo;

/// Measure a deployment.
#[derive(Debug, Parser)]
#[command(name = "tasuki bench", version, disable_help_subcommand = true)]
pub struct BenchCli {
    #[command(subcommand)]
    pub command: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    Serve(Box<ServeArgs>),
    FakeServer(FakeServerArgs),
}

/// Sends load to an OpenAI-compatible server and reports what its users would
/// have seen: throughput, latencies, goodput, failures, and where the server's
/// time went if it tells.
///
/// Ctrl-C stops the run; what was measured is still printed and written.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub workload: WorkloadArgs,
    #[command(flatten)]
    pub arrival: ArrivalArgs,
    #[command(flatten)]
    pub measuring: MeasuringArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Who is asked, and how.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
pub struct ServerArgs {
    /// Where the server is.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub base_url: String,

    /// What is called: completions (/v1/completions) or chat (/v1/chat/completions).
    #[arg(long, value_name = "API", default_value = "completions", value_parser = api)]
    pub endpoint: Api,

    /// The model to ask for [default: the first that the server lists].
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,

    /// For the server's Authorization header.
    #[arg(
        long,
        value_name = "KEY",
        env = "OPENAI_API_KEY",
        hide_env_values = true
    )]
    pub api_key: Option<String>,

    /// A further header of every request; may be repeated. In the variable they are lines.
    #[arg(
        long,
        value_name = "NAME:VALUE",
        value_parser = header,
        env = "TASUKI_BENCH_HEADERS",
        hide_env_values = true,
        value_delimiter = '\n'
    )]
    pub header: Vec<(HeaderName, HeaderValue)>,

    /// Further fields of every request, as a JSON object; they win over ours.
    #[arg(long, value_name = "JSON", value_parser = extra_body)]
    pub extra_body: Option<Fields>,

    /// Sampling temperature; "server" leaves it to the server.
    #[arg(long, default_value = "0", value_parser = temperature)]
    pub temperature: Temperature,

    /// How often the server is asked to count tokens: with every chunk and at the end, at the
    /// end, or not at all (for servers that refuse stream_options).
    #[arg(long, value_enum, default_value_t = UsageStats::Chunks)]
    pub usage_stats: UsageStats,

    /// The longest that one answer may take; beyond, the request has failed.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600.0, value_parser = positive)]
    pub timeout_s: f64,

    /// How long to wait until the server is ready.
    #[arg(long, alias = "ready-timeout", value_name = "SECONDS", default_value_t = 60.0,
          value_parser = positive)]
    pub ready_timeout_s: f64,

    /// What the report calls the server.
    #[arg(long, value_name = "NAME", default_value = "openai")]
    pub backend: String,
}

/// What is measured.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Measuring")]
pub struct MeasuringArgs {
    /// Objectives for goodput, such as ttft=2s,tpot=50ms; also ttst, itl (the longest gap), e2e.
    #[arg(long)]
    pub slo: Option<Slo>,

    /// Requests like those of the run, sent and answered before it, unmeasured.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub warmup: u32,

    /// Send nothing new after this time; what is in flight is waited for. Without
    /// --num-requests, requests are made as long as there is time.
    #[arg(long, value_name = "SECONDS", value_parser = positive)]
    pub duration_s: Option<f64>,

    /// Measure the steady state only: from the end of --ramp-s or --settle-s until the last
    /// request is due. Either of those turns it on.
    #[arg(long)]
    pub steady: bool,

    /// Leave out the run's first seconds.
    #[arg(long, value_name = "SECONDS", value_parser = positive)]
    pub settle_s: Option<f64>,

    /// Threads of the client. One is enough for some 100,000 tokens a second.
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: u16,
}

/// What is shown and written.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// The result file [default: bench-<time>.json in this folder].
    #[arg(long, short, value_name = "PATH")]
    pub output: Option<PathBuf>,

    /// Write no result file.
    #[arg(long, conflicts_with = "output")]
    pub no_output: bool,

    /// Leave the time of every chunk out of the result file.
    #[arg(long)]
    pub no_chunks: bool,

    /// Check the options and make the requests, but send nothing.
    #[arg(long)]
    pub dry_run: bool,

    /// Show no progress.
    #[arg(long, short)]
    pub quiet: bool,

    /// Names the run in plots.
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,

    /// The deployment's shape, a JSON object that goes into the result file.
    #[arg(long, value_name = "JSON", value_parser = fields)]
    pub topology: Option<Fields>,
}

/// A JSON object.
#[derive(Debug, Clone, PartialEq)]
pub struct Fields(pub Map<String, Value>);

/// None: the server's own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Temperature(pub Option<f64>);

fn api(given: &str) -> Result<Api, String> {
    match given.trim_start_matches("/v1").trim_start_matches('/') {
        "completions" => Ok(Api::Completions),
        "chat" | "chat/completions" => Ok(Api::Chat),
        _ => Err("it must be completions or chat".to_owned()),
    }
}

fn header(given: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = given
        .split_once(':')
        .ok_or("it must be NAME:VALUE, such as x-tenant:a")?;
    let name = HeaderName::from_str(name.trim()).map_err(|error| error.to_string())?;
    let value = HeaderValue::from_str(value.trim()).map_err(|error| error.to_string())?;
    Ok((name, value))
}

fn fields(given: &str) -> Result<Fields, String> {
    serde_json::from_str(given).map(Fields).map_err(|error| {
        format!("it must be a JSON object, such as '{{\"top_p\": 0.9}}' ({error})")
    })
}

/// Fields of every request. The client measures one answer per request: tokens of several choices
/// come in one stream, and would count as those of a single, faster answer.
fn extra_body(given: &str) -> Result<Fields, String> {
    let fields = fields(given)?;
    for name in ["n", "best_of"] {
        // null is the server's default, which is 1.
        let value = fields.0.get(name).filter(|value| !value.is_null());
        if let Some(value) = value.filter(|value| value.as_f64() != Some(1.0)) {
            return Err(format!(
                "{name} is {value}, but only 1 can be measured: the tokens of several choices \
                 would count as those of one answer, so TPOT and ITL would be too low; leave \
                 {name} out, and raise --num-requests for more load"
            ));
        }
    }
    Ok(fields)
}

fn temperature(given: &str) -> Result<Temperature, String> {
    match given {
        "server" => Ok(Temperature(None)),
        _ => match given.parse() {
            Ok(value) if (0.0..=2.0).contains(&value) => Ok(Temperature(Some(value))),
            _ => Err("it must be between 0 and 2, or server".to_owned()),
        },
    }
}

fn positive(given: &str) -> Result<f64, String> {
    match given.parse() {
        Ok(seconds) if seconds > 0.0 && seconds <= 604_800.0 => Ok(seconds),
        _ => Err("it must be above 0 and at most 604800 s (a week)".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::extra_body;

    #[test]
    fn fields_that_ask_for_several_choices_are_refused() {
        for (given, said) in [
            (r#"{"n": 2}"#, "n is 2"),
            (r#"{"n": 0}"#, "n is 0"),
            (r#"{"n": "2"}"#, "n is \"2\""),
            (r#"{"top_p": 0.9, "best_of": 3}"#, "best_of is 3"),
        ] {
            let error = extra_body(given).unwrap_err();
            assert!(
                error.contains(said) && error.contains("only 1") && error.contains("TPOT"),
                "{error}"
            );
        }
        for given in [
            r#"{"n": 1, "best_of": 1}"#,
            r#"{"n": null}"#,
            r#"{"top_p": 0.9}"#,
        ] {
            assert!(extra_body(given).is_ok(), "{given}");
        }
        assert!(extra_body("[]").is_err());
    }
}
