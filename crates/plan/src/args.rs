//! The command line of `tasuki simulate`; what is sent and when is that of `tasuki bench serve`.

use std::path::PathBuf;

use clap::{Args, Parser, ValueEnum};
use tasuki_bench::args::{ArrivalArgs, WorkloadArgs};
use tasuki_bench::slo::Slo;
use tasuki_policy::{PolicyKind, Rule};

use crate::hardware::StepRates;

/// Runs a workload before a deployment in simulated time, with the router's own placement,
/// admission and retries, and reports what `tasuki bench serve` would report.
#[derive(Debug, Clone, Parser)]
#[command(name = "tasuki simulate", version)]
pub struct SimulateArgs {
    #[command(flatten)]
    pub replay: ReplayArgs,
    #[command(flatten)]
    pub topology: TopologyArgs,
    #[command(flatten)]
    pub hardware: HardwareArgs,
    #[command(flatten)]
    pub faults: FaultArgs,
    #[command(flatten)]
    pub router: RouterArgs,
    #[command(flatten)]
    pub workload: WorkloadArgs,
    #[command(flatten)]
    pub arrival: ArrivalArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// What is replayed.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Replay")]
pub struct ReplayArgs {
    /// Request log of a router (--request-log): its requests are sent in place of a workload, first
    /// to what really served them, then to what the options of topology, router and faults change.
    #[arg(value_name = "LOG")]
    pub log: Option<PathBuf>,

    /// Requests of LOG come so many times as fast, in the second run.
    #[arg(long, value_name = "FACTOR", requires = "log", value_parser = above_zero)]
    pub speed: Option<f64>,
}

/// How many workers there are.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Topology")]
pub struct TopologyArgs {
    /// Workers that prefill.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub prefill: u32,

    /// Workers that decode.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub decode: u32,

    /// Workers that do both [default: 1 if there are no others, else 0].
    #[arg(long, value_name = "N")]
    pub mixed: Option<u32>,

    /// A worker does nothing but what its role says.
    #[arg(long)]
    pub strict_roles: bool,

    /// Workers on one machine, between which KV moves over --link-gb-s.
    #[arg(long, value_name = "N", default_value_t = 8,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub workers_per_host: u32,
}

impl TopologyArgs {
    /// Workers that do both, as given or by default.
    pub fn mixed(&self) -> u32 {
        let alone = self.prefill == 0 && self.decode == 0;
        self.mixed.unwrap_or(u32::from(alone))
    }
}

/// How fast they are.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Workers")]
pub struct HardwareArgs {
    /// Step times measured by `tasuki bench batch --steps`.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["rates", "gpu"])]
    pub steps: Option<PathBuf>,

    /// Step times by coefficients, such as
    /// step-ms=5.5,sequence-us=20,kv-token-ns=45,prompt-step-ms=5.5,prompt-token-us=22,prompt-square-ns=0.3.
    #[arg(long, value_name = "LIST", conflicts_with = "gpu")]
    pub rates: Option<StepRates>,

    /// Step times from this GPU's data sheet: an estimate, for --model. A name such as h200, or as
    /// the driver has it.
    #[arg(long, value_name = "NAME")]
    pub gpu: Option<String>,

    /// With --gpu: the model, a folder, hub id or smollm2-135m; its config.json is read.
    #[arg(long, value_name = "MODEL", requires = "gpu")]
    pub model: Option<String>,

    /// The folder with the model's config.json, where --model is none.
    #[arg(long, value_name = "PATH", requires = "model", hide = true)]
    pub model_config: Option<PathBuf>,

    /// With --gpu: memory of one [default: the data sheet's].
    #[arg(long, value_name = "GB", value_parser = above_zero, requires = "gpu")]
    pub gpu_memory_gb: Option<f64>,

    /// With --gpu: GPUs of a worker; of a plan, more than 1 is the only number that it tries.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "gpu",
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub tensor_parallel: u32,

    /// Limits of a worker that the options below do not say [default: gpu; cpu for --steps that
    /// were measured on one].
    #[arg(long, value_enum)]
    pub device: Option<DeviceKind>,

    /// Tokens in a block of KV.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub block_size: Option<u32>,

    /// Blocks of a worker [default: as measured; with --gpu what the weights leave; else 12288].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub num_blocks: Option<u32>,

    /// Prompt plus output of one request [default: half of the blocks, at most 131072].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    pub max_model_len: Option<u32>,

    /// Tokens in one step; of a plan, the only size that it tries [default: a worker's; tasuki plan
    /// tries several].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_batched_tokens: Option<u32>,

    /// Requests that decode at once.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_running_requests: Option<u32>,

    /// How long a step that decodes may take with prompts in it; 0: bounded in tokens only [default:
    /// a worker's; tasuki plan: 0.8 of the TPOT objective].
    #[arg(long, value_name = "MS", value_parser = at_least_zero)]
    pub itl_target_ms: Option<f64>,

    /// Keep no prompts for requests that begin alike.
    #[arg(long)]
    pub no_prefix_caching: bool,

    /// Bytes of KV for a token [default: as measured; with --gpu the model's; else 131072].
    #[arg(long, value_name = "BYTES", value_parser = above_zero)]
    pub kv_bytes_per_token: Option<f64>,

    /// Between two workers of a machine [default: as measured; with --gpu the data sheet's; else
    /// 150].
    #[arg(long, value_name = "GB_PER_S", value_parser = above_zero)]
    pub link_gb_s: Option<f64>,

    /// Between workers of two machines.
    #[arg(long, value_name = "GB_PER_S", default_value_t = 40.0, value_parser = above_zero)]
    pub host_link_gb_s: f64,

    /// From the order of a transfer to its first byte [default: as measured; else 0.5].
    #[arg(long, value_name = "MS", value_parser = at_least_zero)]
    pub link_latency_ms: Option<f64>,

    /// From the last block there to the next token may be scheduled [default: as logged; else 1].
    #[arg(long, value_name = "MS", value_parser = at_least_zero)]
    pub handoff_ms: Option<f64>,

    /// Between client and worker, through the router, in one direction [default: as measured;
    /// else 0.5, on a processor 2].
    #[arg(long, value_name = "MS", value_parser = at_least_zero)]
    pub message_ms: Option<f64>,

    /// From a step's end to the next step, while a worker writes its messages [default: as measured;
    /// else 0].
    #[arg(long, value_name = "MS", value_parser = at_least_zero)]
    pub between_steps_ms: Option<f64>,
}

impl HardwareArgs {
    /// The limits of a worker that are given and that `tasuki serve` has by the same name, but for the
    /// size of a step, which is part of a design.
    pub fn given(&self) -> Vec<(&'static str, u32)> {
        let limits = [
            ("--block-size", self.block_size),
            ("--max-model-len", self.max_model_len),
            ("--max-running-requests", self.max_running_requests),
        ];
        let given = limits.into_iter();
        given
            .filter_map(|(name, value)| Some((name, value?)))
            .collect()
    }
}

/// What happens to workers and links.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Workers")]
pub struct FaultArgs {
    /// What happens, such as crash:0@30+20 (worker 0 ends after 30 s and is back 20 s later),
    /// slow:1@10=2.5 (steps take 2.5 times as long), links@60=0.1, drain:2@5, undrain:2@50; may
    /// be repeated.
    #[arg(long, value_name = "FAULT")]
    pub fault: Vec<String>,
}

/// Limits of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceKind {
    Gpu,
    Cpu,
}

/// How the router decides.
#[derive(Debug, Clone, PartialEq, Args)]
#[command(next_help_heading = "Router")]
pub struct RouterArgs {
    /// How workers are chosen.
    #[arg(long, value_enum, default_value_t = PolicyName::Cost)]
    pub policy: PolicyName,

    /// Whether workers' roles follow the load, as `tasuki router --roles` says.
    #[arg(long, value_enum, default_value_t = RolesName::Fixed)]
    pub roles: RolesName,

    /// What half of a request costs more on a worker of another role, as a share.
    #[arg(long, value_name = "SHARE", default_value_t = 0.05, value_parser = at_least_zero)]
    pub role_preference: f64,

    /// A request whose first token would come later is refused.
    #[arg(long, value_name = "MS", value_parser = above_zero)]
    pub ttft_target_ms: Option<f64>,

    /// A request that would make tokens come more slowly waits.
    #[arg(long, value_name = "MS", value_parser = above_zero)]
    pub tpot_target_ms: Option<f64>,

    /// Place requests at once, whatever the load.
    #[arg(long)]
    pub no_admission: bool,

    /// The router does not know which worker holds which prompt.
    #[arg(long)]
    pub no_prefix_index: bool,
}

/// The words for [`tasuki_sim::Roles`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RolesName {
    Fixed,
    Follow,
}

/// The words for [`PolicyKind`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PolicyName {
    Cost,
    RoundRobin,
    LeastLoaded,
    PowerOfTwo,
    ConsistentHash,
    PrefixHash,
}

impl std::fmt::Display for PolicyName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

impl From<PolicyName> for PolicyKind {
    fn from(name: PolicyName) -> Self {
        match name {
            PolicyName::Cost => Self::Cost,
            PolicyName::RoundRobin => Self::Simple(Rule::RoundRobin),
            PolicyName::LeastLoaded => Self::Simple(Rule::LeastLoaded),
            PolicyName::PowerOfTwo => Self::Simple(Rule::PowerOfTwo),
            PolicyName::ConsistentHash => Self::Simple(Rule::ConsistentHash),
            PolicyName::PrefixHash => Self::Simple(Rule::PrefixHash),
        }
    }
}

/// What is shown and written.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Objectives for goodput, such as ttft=2s,tpot=50ms.
    #[arg(long)]
    pub slo: Option<Slo>,

    /// Nothing new is sent after this time.
    #[arg(long, value_name = "SECONDS", value_parser = above_zero)]
    pub duration_s: Option<f64>,

    /// Leave out the run's first seconds.
    #[arg(long, value_name = "SECONDS", value_parser = at_least_zero)]
    pub settle_s: Option<f64>,

    /// The result file, as of `tasuki bench serve` [default: none].
    #[arg(long, short, value_name = "PATH")]
    pub output: Option<PathBuf>,

    /// Leave the time of every token out of the result file.
    #[arg(long)]
    pub no_chunks: bool,

    /// Names the run in plots.
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,

    /// Print the metrics as JSON in place of the table.
    #[arg(long)]
    pub json: bool,
}

/// A number above 0.
pub fn above_zero(given: &str) -> Result<f64, String> {
    number(given, "above 0", |number| number > 0.0)
}

/// A number that is not negative.
pub fn at_least_zero(given: &str) -> Result<f64, String> {
    number(given, "of 0 or more", |number| number >= 0.0)
}

/// A share of all, of which there must be some.
pub fn share(given: &str) -> Result<f64, String> {
    let fits = |number| number > 0.0 && number <= 1.0;
    number(given, "above 0 and at most 1, such as 0.9", fits)
}

fn number(given: &str, what: &str, fits: impl Fn(f64) -> bool) -> Result<f64, String> {
    match given.trim().parse::<f64>() {
        Ok(number) if number.is_finite() && fits(number) => Ok(number),
        _ => Err(format!("it must be a number {what}")),
    }
}
