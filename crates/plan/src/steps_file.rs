//! The result of `tasuki bench batch --steps`.

use std::path::Path;

use serde::Deserialize;
use tasuki_sim::LinkSpec;
use tasuki_sim::steps::{DecodeRow, PrefillRow, StepTable};

use crate::error::SimulateError;

/// What such a file says.
#[derive(Debug, Deserialize)]
pub struct StepsFile {
    pub label: String,
    engine: Engine,
    machine: Machine,
    prefill: Vec<Prefill>,
    decode: Vec<Decode>,
    #[serde(default)]
    transfer: Vec<Transfer>,
}

#[derive(Debug, Deserialize)]
struct Engine {
    block_size_tokens: u32,
    block_bytes: f64,
    num_blocks: u32,
}

#[derive(Debug, Deserialize)]
struct Machine {
    #[serde(default)]
    gpus: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Prefill {
    tokens: f64,
    context: f64,
    seconds: f64,
}

#[derive(Debug, Deserialize)]
struct Decode {
    batch: f64,
    context: f64,
    seconds: f64,
}

#[derive(Debug, Deserialize)]
struct Transfer {
    bytes: f64,
    seconds: f64,
}

impl StepsFile {
    /// # Errors
    ///
    /// The file cannot be read, or is none of `bench batch --steps`.
    pub fn read(path: &Path) -> Result<Self, SimulateError> {
        let fail = |reason: String| SimulateError::File {
            path: path.to_owned(),
            reason,
        };
        let text = std::fs::read_to_string(path).map_err(|error| fail(error.to_string()))?;
        serde_json::from_str(&text).map_err(|error| {
            fail(format!(
                "{error}; it must be a result of `tasuki bench batch --steps`"
            ))
        })
    }

    /// # Errors
    ///
    /// Too few points.
    pub fn table(&self, path: &Path) -> Result<StepTable, SimulateError> {
        let prefill: Vec<_> = self
            .prefill
            .iter()
            .map(|row| PrefillRow {
                tokens: row.tokens,
                context: row.context,
                seconds: row.seconds,
            })
            .collect();
        let decode: Vec<_> = self
            .decode
            .iter()
            .map(|row| DecodeRow {
                batch: row.batch,
                context: row.context,
                seconds: row.seconds,
            })
            .collect();
        StepTable::new(&prefill, &decode).map_err(|source| SimulateError::Table {
            path: path.to_owned(),
            source,
        })
    }

    pub fn block_size(&self) -> u32 {
        self.engine.block_size_tokens
    }

    pub fn num_blocks(&self) -> u32 {
        self.engine.num_blocks
    }

    pub fn kv_bytes_per_token(&self) -> f64 {
        self.engine.block_bytes / f64::from(self.engine.block_size_tokens.max(1))
    }

    pub fn is_cpu(&self) -> bool {
        self.machine.gpus.is_empty()
    }

    /// By the smallest and the largest handoff that were measured.
    pub fn link(&self) -> Option<LinkSpec> {
        let by_bytes = |a: &&Transfer, b: &&Transfer| a.bytes.total_cmp(&b.bytes);
        let small = self.transfer.iter().min_by(by_bytes)?;
        let large = self.transfer.iter().max_by(by_bytes)?;
        let (bytes, seconds) = (large.bytes - small.bytes, large.seconds - small.seconds);
        if bytes <= 0.0 || seconds <= 0.0 {
            return None;
        }
        let bytes_per_s = bytes / seconds;
        let latency_s = (small.seconds - small.bytes / bytes_per_s).max(0.0);
        Some(LinkSpec {
            bytes_per_s,
            latency_s,
        })
    }
}
