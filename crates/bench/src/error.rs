//! What can be wrong with a workload or an arrival process.

use std::path::PathBuf;

use tasuki_text::TextError;

use crate::plan::PromptForm;

/// Every message names the value, the limit and what to do.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// An option without which the workload makes no sense.
    #[error("{needed_by} needs --{option}; give it, such as --{option} {example}")]
    Missing {
        option: &'static str,
        needed_by: String,
        example: &'static str,
    },
    /// An option that the chosen workload does not have.
    #[error(
        "--{option} means nothing for {chosen}; it belongs to {belongs_to}: drop it, or choose that"
    )]
    Foreign {
        option: &'static str,
        chosen: String,
        belongs_to: &'static str,
    },
    /// A value that does not go with the others.
    #[error("--{option} is {value}, but {limit}; {remedy}")]
    OutOfRange {
        option: &'static str,
        value: String,
        limit: String,
        remedy: String,
    },
    /// Fewer tokens than any prompt of this form has.
    #[error(
        "a prompt of {tokens} tokens is asked for, but as {form} it has at least {least} \
         (special tokens and chat template); ask for {least} or more, or for --prompt-as tokens"
    )]
    TooShort {
        tokens: u32,
        least: u32,
        form: PromptForm,
    },
    /// No text of a known number of tokens can be made.
    #[error(
        "with the tokenizer of {} no text of an exact number of tokens can be made: {reason}; \
         use --prompt-as tokens (with /v1/completions) or words", .path.display()
    )]
    NoExactText { path: PathBuf, reason: String },
    /// The tokenizer's folder cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] TextError),
    /// A file cannot be read.
    #[error("cannot read {}: {source}", .path.display())]
    File {
        path: PathBuf,
        source: std::io::Error,
    },
    /// A line of a file is not what it should be. `line` is 1-based.
    #[error("{}, line {line}: {reason}", .path.display())]
    Line {
        path: PathBuf,
        line: u64,
        reason: String,
    },
    /// Nothing to send.
    #[error("{} has no request {within}; {remedy}", .path.display())]
    Empty {
        path: PathBuf,
        within: String,
        remedy: &'static str,
    },
}
