//! Why there is nothing to simulate.

use std::path::PathBuf;

use tasuki_bench::console::PrintError;
use tasuki_bench::error::PlanError;
use tasuki_bench::result::WriteError;
use tasuki_reqlog::ReadError;
use tasuki_sim::steps::TableError;

/// Each names the value, its limit and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    #[error(transparent)]
    Workload(#[from] PlanError),
    #[error(transparent)]
    Log(#[from] ReadError),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    Print(#[from] PrintError),
    #[error("cannot read {path}: {reason}")]
    File { path: PathBuf, reason: String },
    #[error("cannot write {path}: {reason}")]
    NotWritten { path: PathBuf, reason: String },
    #[error("{first} and {second} are both {path}: give each a path of its own")]
    OnePath {
        first: &'static str,
        second: &'static str,
        path: PathBuf,
    },
    #[error("{path}: {source}")]
    Table { path: PathBuf, source: TableError },
    #[error(
        "there is nothing that says how long steps take: give --steps FILE (from `tasuki bench \
         batch --steps`), --rates, or --gpu with --model"
    )]
    NoSteps,
    #[error(
        "the log does not say how long steps take, as its workers have not told (vLLM's and SGLang's \
         never do): give --steps FILE (from `tasuki bench batch --steps`), --rates, or --gpu with \
         --model"
    )]
    NoLoggedSteps,
    #[error("--gpu is {given}; known are {known}; others can be given with --rates")]
    UnknownGpu { given: String, known: String },
    #[error(
        "--gpu needs --model: a folder, hub id or smollm2-135m, whose config.json says what a step computes"
    )]
    NoModel,
    #[error(
        "the model's weights are {weights_gb:.0} GB, {gpus} x {gpu} leave no room for KV beside \
         them: raise --tensor-parallel"
    )]
    TooLarge {
        weights_gb: f64,
        gpu: String,
        gpus: u32,
    },
    #[error(
        "the model's weights are {weights_gb:.0} GB, {gpus} x {gpu} leave no room for KV beside \
         them, and a worker can have no more: raise --gpus and --gpus-per-host, or take GPUs with \
         more memory or a smaller model"
    )]
    TooLargeForAll {
        weights_gb: f64,
        gpu: String,
        gpus: u32,
    },
    #[error(
        "--workload {0} cannot be simulated, as it has content: use random, fixed, prefill-only, \
         shared-prefix, multi-turn or trace"
    )]
    Content(&'static str),
    #[error(
        "{workers} workers are not a deployment: give --mixed N, or both of --prefill N and \
         --decode N, up to 20000 together"
    )]
    Workers { workers: u32 },
    #[error(
        "--tensor-parallel is {given}: use at most --gpus ({gpus}) and --gpus-per-host \
         ({gpus_per_host})"
    )]
    Degree {
        given: u32,
        gpus: u32,
        gpus_per_host: u32,
    },
    #[error(
        "workers of {each} GPUs cannot use --gpus {gpus}, {gpus_per_host} a machine \
         (--gpus-per-host), without a rest: give a multiple of {each} for both, or with --gpu \
         another --tensor-parallel"
    )]
    Indivisible {
        each: u32,
        gpus: u32,
        gpus_per_host: u32,
    },
    #[error(
        "{percent:.1}% of the requests are longer than a worker takes: prompt and answer have up \
         to {longest} tokens together, --max-model-len is {limit}; raise it, with --num-blocks for \
         two such requests, or plan for shorter ones"
    )]
    TooLong {
        percent: f64,
        longest: u32,
        limit: u32,
    },
    #[error("--price is of {given}, but the GPUs are {known}: name these, or give a number alone")]
    Price { given: String, known: String },
    #[error("--slo must have both of ttft and tpot, such as ttft=1s,tpot=30ms")]
    Objectives,
    #[error(
        "{option} says what is sent, and so does the log: leave it out, or the log; --speed changes \
         how fast the log's requests come"
    )]
    TwoWorkloads { option: String },
    #[error(
        "{path} names no worker that took requests, so there is nothing to replay: take the \
         log of a router that served some"
    )]
    NoFleet { path: PathBuf },
    #[error("{path}: of {requests} requests none has output, so there is nothing to replay")]
    NoOutput { path: PathBuf, requests: usize },
    #[error(
        "--slo has itl, but {count} answers of {path} do not tell their longest gap between \
         tokens: leave out itl"
    )]
    NoGaps { path: PathBuf, count: usize },
    #[error(
        "{option} is {from_s}, but the last request comes after {last_s:.2} s: give less, or \
         send more requests (--num-requests)"
    )]
    Settle {
        option: &'static str,
        from_s: f64,
        last_s: f64,
    },
    #[error("--fault {given:?}: {reason}")]
    Fault { given: String, reason: String },
    #[error(
        "--num-blocks is {blocks}, but two requests of --max-model-len {tokens} tokens need \
         {needed}: raise the one or lower the other"
    )]
    Pool {
        blocks: u32,
        tokens: u32,
        needed: u32,
    },
}
