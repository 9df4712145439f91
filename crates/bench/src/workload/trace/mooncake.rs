//! Mooncake's JSONL: `{"timestamp": 0, "input_length": 6758,
//! "output_length": 500, "hash_ids": [0, 1, …]}` a line, times in ms.

use std::path::Path;

use serde::Deserialize;

use super::{LATEST_S, Record, check_length, is_time};
use crate::error::PlanError;
use crate::workload::lines::read_lines;

#[derive(Debug, Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

/// The records of a file, in its order.
pub(super) fn read(path: &Path, block_tokens: u32) -> Result<Vec<Record>, PlanError> {
    let wanted = "a line is a JSON object with timestamp, input_length, output_length and hash_ids, \
                  or else give another --trace-format";
    read_lines(path, wanted, |line: Line| {
        let at_s = line.timestamp / 1e3;
        if !is_time(at_s) {
            return Err(format!(
                "timestamp is {:?}, but it must be from 0 to {:e} ms; give the times in \
                 milliseconds",
                line.timestamp,
                1e3 * LATEST_S
            ));
        }
        check_length("input_length", line.input_length)?;
        check_length("output_length", line.output_length)?;
        let blocks = line.input_length.div_ceil(block_tokens) as usize;
        let hashes = line.hash_ids.len();
        if hashes != 0 && hashes != blocks {
            return Err(format!(
                "{hashes} hash_ids for an input_length of {}, but blocks of {block_tokens} tokens \
                 make {blocks}; --trace-block-tokens must be what the trace was made with",
                line.input_length
            ));
        }
        Ok(Record {
            at_s,
            input_tokens: line.input_length,
            output_tokens: line.output_length,
            hash_ids: line.hash_ids,
        })
    })
}
