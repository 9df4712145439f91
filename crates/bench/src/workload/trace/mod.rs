//! Replays a trace of a real service: when its requests came, how long they
//! and their answers were, and, where the trace tells, which blocks of their
//! prompts were the same. Their tokens are made up.

mod azure;
mod mooncake;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use serde::Serialize;

use super::Making;
use crate::args::MAX_TOKENS;
use crate::error::PlanError;
use crate::plan::{Planned, Workload};
use crate::seeds::{Purpose, stream};
use crate::tokens::Segment;

/// The latest time of a trace, in seconds since 1970: the end of the year 2286. Replays of such
/// traces have times that a [`Duration`] holds, at any speed.
const LATEST_S: f64 = 1e10;

/// How a trace is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TraceFormat {
    /// JSONL: timestamp (ms), input_length, output_length, hash_ids.
    Mooncake,
    /// CSV: TIMESTAMP, ContextTokens, GeneratedTokens.
    Azure,
}

/// Parameters of the workload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TraceSettings {
    pub file: PathBuf,
    pub format: TraceFormat,
    /// Tokens of the block that one hash id stands for.
    pub block_tokens: u32,
    /// The trace runs this many times faster.
    pub speed_up: f64,
    /// The window of the trace that is replayed, after its first request.
    pub from_s: f64,
    /// None: to its end.
    pub until_s: Option<f64>,
    /// Longer inputs are cut; their blocks stay the same.
    pub max_input_tokens: Option<u32>,
    /// Longer outputs are cut.
    pub max_output_tokens: Option<u32>,
}

/// One request of a trace.
#[derive(Debug, Clone, PartialEq)]
struct Record {
    /// In seconds, from any origin.
    at_s: f64,
    input_tokens: u32,
    output_tokens: u32,
    /// One per block of the input, the last block shorter than the others;
    /// none where the trace does not tell.
    hash_ids: Vec<u64>,
}

/// Whether a trace may have this time.
fn is_time(at_s: f64) -> bool {
    (0.0..=LATEST_S).contains(&at_s)
}

/// Refuses a length that no request has. `field`: its name in the file.
fn check_length(field: &str, tokens: u32) -> Result<(), String> {
    if i64::from(tokens) > MAX_TOKENS {
        return Err(format!(
            "{field} is {tokens}, but a request may have {MAX_TOKENS} tokens at most; correct \
             the line or remove it"
        ));
    }
    Ok(())
}

/// See the module.
#[derive(Debug)]
pub struct Trace {
    making: Making,
    block_tokens: u32,
    records: std::vec::IntoIter<Record>,
    next_index: usize,
    total: usize,
}

impl Trace {
    /// Reads the file; `requests` limits how many are replayed.
    ///
    /// # Errors
    /// [`PlanError::File`], [`PlanError::Line`], [`PlanError::Empty`].
    pub fn read(
        making: Making,
        settings: &TraceSettings,
        requests: Option<usize>,
    ) -> Result<Self, PlanError> {
        let mut records = match settings.format {
            TraceFormat::Mooncake => mooncake::read(&settings.file, settings.block_tokens)?,
            TraceFormat::Azure => azure::read(&settings.file)?,
        };
        if records.is_empty() {
            return Err(PlanError::Empty {
                path: settings.file.clone(),
                within: "at all".to_owned(),
                remedy: "give a trace with one request a line, or another --trace-format",
            });
        }
        records.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
        let origin_s = records.first().map_or(0.0, |first| first.at_s);
        let until_s = settings.until_s.unwrap_or(f64::INFINITY);
        records.retain_mut(|record| {
            let after_s = record.at_s - origin_s;
            record.at_s = (after_s - settings.from_s) / settings.speed_up;
            (settings.from_s..until_s).contains(&after_s)
        });
        records.truncate(requests.unwrap_or(usize::MAX));
        for record in &mut records {
            let most = settings.max_input_tokens.unwrap_or(u32::MAX);
            record.input_tokens = record.input_tokens.clamp(1, most);
            let most = settings.max_output_tokens.unwrap_or(u32::MAX);
            record.output_tokens = record.output_tokens.clamp(1, most);
        }
        if records.is_empty() {
            return Err(PlanError::Empty {
                path: settings.file.clone(),
                within: format!("from {} s until {until_s} s", settings.from_s),
                remedy: "widen --trace-from-s and --trace-until-s",
            });
        }
        Ok(Self {
            making,
            block_tokens: settings.block_tokens,
            total: records.len(),
            records: records.into_iter(),
            next_index: 0,
        })
    }

    fn segments(&self, index: usize, record: &Record) -> Vec<Segment> {
        if record.hash_ids.is_empty() {
            return vec![Segment {
                stream: stream(Purpose::OwnTokens, index as u64),
                tokens: record.input_tokens,
            }];
        }
        let mut left = record.input_tokens;
        let mut segments = Vec::with_capacity(record.hash_ids.len());
        for hash in &record.hash_ids {
            let tokens = left.min(self.block_tokens);
            left -= tokens;
            segments.push(Segment {
                stream: stream(Purpose::TraceTokens, *hash),
                tokens,
            });
        }
        segments
    }
}

impl Workload for Trace {
    fn next(&mut self) -> Option<Planned> {
        let record = self.records.next()?;
        let index = self.next_index;
        self.next_index += 1;
        let segments = self.segments(index, &record);
        let (prompt, input_tokens) = self.making.maker.prompt(&segments);
        Some(Planned {
            index,
            prompt,
            input_tokens,
            output_tokens: record.output_tokens,
            exact_output: self.making.exact_output,
            at: Some(Duration::from_secs_f64(record.at_s.max(0.0))),
        })
    }

    fn total(&self) -> Option<usize> {
        Some(self.total)
    }
}
