//! The options that say what is sent.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::values::{MAX_TOKENS, factor, lengths, ratio, seconds};
use crate::plan::PromptForm;
use crate::workload::lengths::RangeConvention;
use crate::workload::trace::TraceFormat;

/// The kinds of workloads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum WorkloadKind {
    /// Random prompts; lengths vary with --range-ratio.
    #[default]
    Random,
    /// Random prompts, all of the same lengths.
    Fixed,
    /// Random prompts with one output token each: prefill and nothing else.
    PrefillOnly,
    /// Decode at a real context length: every prompt is sent once, unmeasured, before the run, so
    /// that measured requests find it in the prefix cache. If TTFT is nevertheless that of
    /// prefill-only, the cache was too small: lower --distinct-prompts.
    DecodeOnly,
    /// Prompts that begin with one of --prefix-groups prefixes.
    SharedPrefix,
    /// Conversations that grow with the server's real answers.
    MultiTurn,
    /// A recorded trace: its times, lengths and shared blocks, with made-up tokens.
    Trace,
    /// Prompts of your own, from a file.
    Prompts,
}

/// When answers end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Answers {
    /// After all their output tokens (sends min_tokens and ignore_eos).
    Exact,
    /// When the model ends them, at the latest after their output tokens.
    Natural,
}

/// What is sent.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Workload")]
pub struct WorkloadArgs {
    /// What is sent.
    #[arg(long, value_enum, value_name = "KIND", default_value_t)]
    pub workload: WorkloadKind,

    /// Requests in all, every turn of a conversation counted [default: 100; trace and prompts:
    /// all of the file].
    #[arg(long, alias = "num-prompts", value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    pub num_requests: Option<u32>,

    /// Prompt tokens [default: 1024]. shared-prefix: those after the prefix; multi-turn: those
    /// of the first message.
    #[arg(long, alias = "random-input-len", value_name = "TOKENS",
          value_parser = clap::value_parser!(u32).range(1..=MAX_TOKENS))]
    pub input_tokens: Option<u32>,

    /// Output tokens [default: 128]. prompts: for lines that do not say.
    #[arg(long, alias = "random-output-len", value_name = "TOKENS",
          value_parser = clap::value_parser!(u32).range(1..=MAX_TOKENS))]
    pub output_tokens: Option<u32>,

    /// --input-tokens and --output-tokens in one, such as 5000:250.
    #[arg(long, value_name = "ISL:OSL", value_parser = lengths,
          conflicts_with_all = ["input_tokens", "output_tokens"])]
    pub lengths: Option<(u32, u32)>,

    /// How far lengths vary; see --range-convention. A length of 1 stays 1.
    #[arg(long, alias = "random-range-ratio", value_name = "R", value_parser = ratio)]
    pub range_ratio: Option<f64>,

    /// What the ratio means: projects disagree.
    #[arg(long, value_enum, default_value = "vllm", requires = "range_ratio")]
    pub range_convention: RangeConvention,

    /// decode-only: different prompts, used in turn [default: one per request]. At least as many
    /// as run at once, at most as many as the server's KV cache holds.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub distinct_prompts: Option<u32>,

    /// shared-prefix: tokens that the prompts of a group share [default: 1024].
    #[arg(long, value_name = "TOKENS",
          value_parser = clap::value_parser!(u32).range(1..=MAX_TOKENS))]
    pub prefix_tokens: Option<u32>,

    /// shared-prefix: different prefixes [default: 8].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub prefix_groups: Option<u32>,

    /// multi-turn: turns of a conversation [default: 4].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub turns: Option<u32>,

    /// multi-turn: new tokens of the user in every turn after the first [default: 64].
    #[arg(long, value_name = "TOKENS",
          value_parser = clap::value_parser!(u32).range(1..=MAX_TOKENS))]
    pub turn_input_tokens: Option<u32>,

    /// multi-turn: mean time between an answer and the next turn, exponential [default: 0].
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub think_time_s: Option<f64>,

    /// trace: the file.
    #[arg(long, value_name = "PATH")]
    pub trace_file: Option<PathBuf>,

    /// trace: how it is written [default: azure for .csv, else mooncake].
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub trace_format: Option<TraceFormat>,

    /// trace: tokens of the block that a hash id stands for [default: 512].
    #[arg(long, value_name = "TOKENS",
          value_parser = clap::value_parser!(u32).range(1..=MAX_TOKENS))]
    pub trace_block_tokens: Option<u32>,

    /// trace: replay so many times faster [default: 1].
    #[arg(long, value_name = "FACTOR", value_parser = factor)]
    pub trace_speed_up: Option<f64>,

    /// trace: begin so long after its first request, in the trace's own time [default: 0].
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub trace_from_s: Option<f64>,

    /// trace: end so long after its first request, in the trace's own time [default: its end].
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub trace_until_s: Option<f64>,

    /// trace: cut longer inputs; what is left shares the same blocks.
    #[arg(long, value_name = "TOKENS",
          value_parser = clap::value_parser!(u32).range(1..=MAX_TOKENS))]
    pub trace_max_input_tokens: Option<u32>,

    /// trace: cut longer outputs.
    #[arg(long, value_name = "TOKENS",
          value_parser = clap::value_parser!(u32).range(1..=MAX_TOKENS))]
    pub trace_max_output_tokens: Option<u32>,

    /// prompts: JSONL of {"prompt": text}, {"prompt_token_ids": [...]} or {"messages": [...]},
    /// each with "output_tokens" if it shall differ from --output-tokens.
    #[arg(long, value_name = "PATH")]
    pub prompts_file: Option<PathBuf>,

    /// When answers end [default: exact; prompts: natural].
    #[arg(long, value_enum)]
    pub answers: Option<Answers>,

    /// Folder, hub id or name of the model whose tokenizer this is. Without it, prompts are
    /// --prompt-as words.
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<PathBuf>,

    /// What prompts are made of [default with --tokenizer: tokens for completions, text for
    /// chats; else words].
    #[arg(long, value_enum, value_name = "FORM")]
    pub prompt_as: Option<PromptForm>,

    /// Draws the workload and the arrivals, each its own way: the same seed sends the same
    /// requests at any rate.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}
