//! How long requests are in the mean.

use tasuki_bench::args::{WorkloadArgs, WorkloadKind};
use tasuki_reqlog::Record;

use crate::error::SimulateError;
use crate::replay::Logged;

/// Made-up requests whose lengths are looked at first.
const LOOKED_AT: usize = 1_000;

/// Of the requests, what estimates depend on.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Lengths {
    pub prompt: f64,
    /// Of the prompt, what a log says was cached.
    pub cached: f64,
    pub output: f64,
}

impl Lengths {
    /// Those of a log.
    pub fn logged(log: &Logged) -> Self {
        let count = log.requests.len() as f64;
        let sum = |of: fn(&Record) -> u32| -> f64 {
            log.requests.iter().map(|r| f64::from(of(&r.record))).sum()
        };
        Self {
            prompt: (sum(|r| r.prompt_tokens) / count).max(1.0),
            cached: sum(|r| r.cached_tokens.min(r.prompt_tokens)) / count,
            output: (sum(|r| r.output_tokens) / count).max(1.0),
        }
    }

    /// Those of a file's requests, or of the first that are made up, and the tokens of each.
    ///
    /// # Errors
    ///
    /// It cannot be read.
    pub fn planned(workload: &WorkloadArgs) -> Result<(Self, Vec<u32>), SimulateError> {
        let mut source = workload.plan_lengths()?.build()?;
        let (mut tokens, mut prompt, mut output) = (Vec::new(), 0.0, 0.0);
        let looked_at = match workload.workload {
            WorkloadKind::Trace => usize::MAX,
            _ => LOOKED_AT,
        };
        while tokens.len() < looked_at
            && let Some(first) = source.next()
        {
            // With the turns that follow it.
            let mut turn = Some(first);
            while let Some(planned) = turn {
                let input_tokens = planned.input_tokens.unwrap_or(1);
                tokens.push(input_tokens.saturating_add(planned.output_tokens));
                prompt += f64::from(input_tokens);
                output += f64::from(planned.output_tokens);
                let answer = " ".repeat(planned.output_tokens as usize);
                let next = source.answered(planned.index, &answer);
                turn = next.map(|(_, planned)| planned);
            }
        }
        let mean = |sum: f64| (sum / tokens.len().max(1) as f64).max(1.0);
        let lengths = Self {
            prompt: mean(prompt),
            cached: 0.0,
            output: mean(output),
        };
        Ok((lengths, tokens))
    }
}

/// Refuses a workload if more of its requests than may miss the objectives are longer than `limit`.
///
/// # Errors
///
/// [`SimulateError::TooLong`].
pub fn refuse_too_long(tokens: &[u32], limit: u32, attainment: f64) -> Result<(), SimulateError> {
    let too_long = tokens.iter().filter(|tokens| **tokens > limit).count();
    let share = too_long as f64 / tokens.len().max(1) as f64;
    // Shares such as 0.1 have no exact form.
    if 1.0 - share >= attainment - 1e-9 {
        return Ok(());
    }
    Err(SimulateError::TooLong {
        percent: 100.0 * share,
        longest: tokens.iter().copied().max().unwrap_or(0),
        limit,
    })
}

/// Conversations of a workload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Conversations {
    /// 1: there are none, every request is of its own.
    pub turns: f64,
    /// From an answer to the next turn, in the mean.
    pub think_time_s: f64,
}

impl Conversations {
    /// # Errors
    ///
    /// The workload cannot be read.
    pub fn of(workload: &WorkloadArgs) -> Result<Self, SimulateError> {
        let described = workload.plan_lengths()?.describe();
        let number = |name: &str, other| described[name].as_f64().unwrap_or(other);
        Ok(Self {
            turns: number("turns", 1.0),
            think_time_s: number("think_time_s", 0.0),
        })
    }
}

/// Requests that a workload has at most: those of its file. `None`: they are made up, so there is
/// no limit.
///
/// # Errors
///
/// The file cannot be read.
pub fn requests_of_file(workload: &WorkloadArgs) -> Result<Option<u32>, SimulateError> {
    if workload.workload != WorkloadKind::Trace {
        return Ok(None);
    }
    let whole = WorkloadArgs {
        num_requests: None,
        ..workload.clone()
    };
    let total = whole.plan_lengths()?.build()?.total();
    Ok(total.map(|total| u32::try_from(total).unwrap_or(u32::MAX)))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::plan::args::PlanArgs;

    #[test]
    fn all_requests_of_a_trace_count() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("trace.jsonl");
        let line = |input: u32| {
            format!("{{\"timestamp\":0,\"input_length\":{input},\"output_length\":10}}\n")
        };
        std::fs::write(&path, line(100).repeat(1_000) + &line(400).repeat(2_000)).expect("written");
        let file = path.to_str().expect("UTF-8");
        for (more, count, prompt) in [
            (&[][..], 3_000, 300.0),
            (&["--num-requests", "2000"], 2_000, 250.0),
        ] {
            let words = ["plan", "--gpus", "1", "--slo", "ttft=1s"];
            let words = [
                &words[..],
                &["--workload", "trace", "--trace-file", file],
                more,
            ]
            .concat();
            let args = PlanArgs::try_parse_from(words).expect("options");
            let (lengths, tokens) = Lengths::planned(&args.workload).expect("a trace");
            assert_eq!((tokens.len(), lengths.prompt), (count, prompt));
        }
    }
}
