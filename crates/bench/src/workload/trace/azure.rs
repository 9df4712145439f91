//! Azure's CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`, the time as
//! `2023-11-16 18:17:03.9799600`, with or without an offset from UTC.

use std::path::Path;

use chrono::{DateTime, NaiveDateTime};
use serde::Deserialize;

use super::{Record, check_length, is_time};
use crate::error::PlanError;

#[derive(Debug, Deserialize)]
struct Row {
    #[serde(rename = "TIMESTAMP")]
    timestamp: String,
    #[serde(rename = "ContextTokens")]
    context_tokens: u32,
    #[serde(rename = "GeneratedTokens")]
    generated_tokens: u32,
}

/// The records of a file, in its order.
pub(super) fn read(path: &Path) -> Result<Vec<Record>, PlanError> {
    let unreadable = |source| PlanError::File {
        path: path.to_owned(),
        source,
    };
    let file = std::fs::File::open(path).map_err(unreadable)?;
    let mut reader = csv::ReaderBuilder::new()
        .trim(csv::Trim::All)
        .from_reader(file);
    // Reading rows would pass over an error in the head, as if there were none.
    reader.headers().map_err(|error| unreadable(error.into()))?;
    let mut records = Vec::new();
    for (line, row) in (2..).zip(reader.deserialize()) {
        let refuse = |line, reason| PlanError::Line {
            path: path.to_owned(),
            line,
            reason,
        };
        let row: Row = row.map_err(|error: csv::Error| {
            let line = error.position().map_or(line, csv::Position::line);
            refuse(line, error.to_string())
        })?;
        let given = &row.timestamp;
        let at_s = seconds(given).ok_or_else(|| {
            refuse(
                line,
                format!("TIMESTAMP {given:?} is not like 2023-11-16 18:17:03.9799600"),
            )
        })?;
        if !is_time(at_s) {
            let reason = format!(
                "TIMESTAMP is {given:?}, but it must be from 1970 to 2286; correct the line or \
                 remove it"
            );
            return Err(refuse(line, reason));
        }
        check_length("ContextTokens", row.context_tokens)
            .and_then(|()| check_length("GeneratedTokens", row.generated_tokens))
            .map_err(|reason| refuse(line, reason))?;
        records.push(Record {
            at_s,
            input_tokens: row.context_tokens,
            output_tokens: row.generated_tokens,
            hash_ids: Vec::new(),
        });
    }
    Ok(records)
}

/// Seconds since 1970, to the microsecond, which is what a float keeps.
fn seconds(timestamp: &str) -> Option<f64> {
    let utc = DateTime::parse_from_str(timestamp, "%Y-%m-%d %H:%M:%S%.f%:z")
        .map(|time| time.to_utc())
        .or_else(|_| {
            NaiveDateTime::parse_from_str(timestamp, "%Y-%m-%d %H:%M:%S%.f")
                .map(|time| time.and_utc())
        })
        .ok()?;
    #[allow(clippy::cast_precision_loss)]
    Some(utc.timestamp_micros() as f64 / 1e6)
}
