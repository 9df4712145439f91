//! The result of `tasuki bench batch --steps`.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tasuki_sim::LinkSpec;
use tasuki_sim::steps::{BesideRow, DecodeRow, PrefillRow, StepTable, Work};

use crate::error::SimulateError;
use crate::hardware::PerStep;

/// From the end of a launch to that of the step before it. A worker keeps so much that one launch
/// in a hundred comes too late; 1.7 ms on the machine of an H100.
const SPARE_S: f64 = 1.7e-3;

/// What such a file says.
#[derive(Debug, Deserialize)]
pub struct StepsFile {
    pub label: String,
    /// As `tasuki bench batch --model` was told.
    #[serde(default)]
    pub model: String,
    engine: Engine,
    machine: Machine,
    prefill: Vec<PrefillRow>,
    /// Files of earlier versions, and of workers whose steps do not overlap, have none.
    #[serde(default)]
    back_to_back: Vec<PrefillRow>,
    decode: Vec<DecodeRow>,
    /// Files of earlier versions have none.
    #[serde(default)]
    beside: Vec<BesideRow>,
    /// Rows that a step which only decodes is padded to. Files of earlier versions, and of workers
    /// without CUDA graphs, have none.
    #[serde(default)]
    decode_rows: Vec<f64>,
    #[serde(default)]
    transfer: Vec<Transfer>,
    /// The host plans and launches a step, while the device computes the one before it. Files of
    /// earlier versions, and of workers whose steps do not overlap, have none.
    #[serde(default)]
    launch: Vec<ByBatch>,
    /// Files of earlier versions have none.
    #[serde(default)]
    between: Vec<ByBatch>,
    /// From a request's sender to a worker and back. Files of earlier versions have none.
    #[serde(default)]
    messages: Vec<ByBatch>,
    /// Files of earlier versions have none.
    #[serde(default)]
    lone: Vec<Lone>,
    /// How long before a step's end the next one is planned while requests come and end. Files of
    /// earlier versions, and of workers whose steps do not overlap, have none.
    #[serde(default)]
    planned_ahead: Vec<ByBatch>,
    /// By Ctrl-C. Files of earlier versions do not say.
    #[serde(default)]
    pub interrupted: bool,
    /// Why the measurement stopped early. Files of earlier versions do not say.
    #[serde(default)]
    pub failed: Option<String>,
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

/// What a step that decodes `batch` sequences takes besides.
#[derive(Debug, Deserialize)]
struct ByBatch {
    batch: f64,
    seconds: f64,
}

/// From a prompt's coming to a worker that decodes `batch` sequences of `context` tokens, at any part
/// of a step, until its only token.
#[derive(Debug, Deserialize)]
struct Lone {
    tokens: f64,
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
        let wanted = "it must be a result of `tasuki bench batch --steps`";
        Self::parse(&text).map_err(|reason| fail(format!("{reason}; {wanted}")))
    }

    fn parse(text: &str) -> Result<Self, String> {
        // Of a file of another kind any field may have another type.
        let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        match value.get("kind") {
            Some(Value::String(kind)) if kind == "steps" => {}
            Some(kind) => return Err(format!("its kind is {kind}")),
            None => return Err("it has no kind".to_owned()),
        }
        let file: Self = serde_json::from_value(value).map_err(|error| error.to_string())?;
        match file.fault() {
            None => Ok(file),
            Some(fault) => Err(fault),
        }
    }

    /// What no such result has.
    fn fault(&self) -> Option<String> {
        let Engine {
            block_size_tokens,
            block_bytes,
            num_blocks,
        } = self.engine;
        if block_size_tokens == 0 || num_blocks == 0 || block_bytes <= 0.0 {
            return Some("its engine has blocks of no size".to_owned());
        }
        let prompts = self.prefill.iter().chain(&self.back_to_back);
        let prefill = prompts.map(|row| (row.tokens, row.context));
        let decode = self.decode.iter().map(|row| (row.batch, row.context));
        let beside = self.beside.iter().map(|row| (row.tokens, 0.0));
        let mut sizes = prefill.chain(decode).chain(beside);
        let odd = sizes.find(|&(size, context)| size < 1.0 || context < 0.0)?;
        Some(format!(
            "it has a step of {} with {} before it",
            odd.0, odd.1
        ))
    }

    /// # Errors
    ///
    /// Too few points.
    pub fn table(&self, path: &Path) -> Result<StepTable, SimulateError> {
        let table = StepTable::new(
            &self.prefill,
            &self.back_to_back,
            &self.decode,
            &self.beside,
        );
        let table = table.map_err(|source| SimulateError::Table {
            path: path.to_owned(),
            source,
        })?;
        Ok(table.padded_to(self.decode_rows.clone()))
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

    /// What lies between two steps.
    pub fn between(&self) -> PerStep {
        line(&self.between)
    }

    /// How long before a step's end a prompt must come to be part of the next one; `None`: not
    /// measured, or steps do not overlap.
    pub fn lead(&self, table: &StepTable) -> Option<PerStep> {
        if self.launch.is_empty() {
            return None;
        }
        if !self.planned_ahead.is_empty() {
            return Some(line(&self.planned_ahead));
        }
        if self.lone.is_empty() {
            let launch = line(&self.launch);
            return Some(PerStep {
                step_s: SPARE_S + launch.step_s,
                ..launch
            });
        }
        let between = self.between();
        let lead = |row: &Lone| {
            let decodes = Work {
                sequences: row.batch,
                kv_tokens: row.batch * row.context,
                ..Work::default()
            };
            let with_prompt = Work {
                prompt_tokens: row.tokens,
                prompt_squares: row.tokens * row.tokens,
                ..decodes
            };
            let between_s = between.step_s + between.sequence_s * row.batch;
            let [decode_s, own_s] =
                [decodes, with_prompt].map(|work| table.step_s(&work) + between_s);
            // In the middle it comes half a step before the end of one, and waits for another one
            // if that is too late.
            ByBatch {
                batch: row.batch,
                seconds: (row.seconds - decode_s / 2.0 - own_s).max(0.0),
            }
        };
        Some(line(&self.lone.iter().map(lead).collect::<Vec<_>>()))
    }

    /// In one direction, beside as many sequences as was measured; `None`: not measured.
    pub fn message_s(&self) -> Option<f64> {
        let by_batch = |a: &&ByBatch, b: &&ByBatch| a.batch.total_cmp(&b.batch);
        let beside_most = self.messages.iter().max_by(by_batch)?;
        Some(beside_most.seconds.max(0.0) / 2.0)
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

/// The line through what was measured, by least squares; it falls nowhere.
fn line(rows: &[ByBatch]) -> PerStep {
    let count = rows.len() as f64;
    let mean = |of: fn(&ByBatch) -> f64| rows.iter().map(of).sum::<f64>() / count.max(1.0);
    let (batch, seconds) = (mean(|row| row.batch), mean(|row| row.seconds));
    let sum = |of: &dyn Fn(&ByBatch) -> f64| rows.iter().map(of).sum::<f64>();
    let spread = sum(&|row| (row.batch - batch).powi(2));
    let together = sum(&|row| (row.batch - batch) * (row.seconds - seconds));
    let slope = if spread > 0.0 { together / spread } else { 0.0 };
    let sequence_s = slope.clamp(0.0, (seconds / batch.max(1.0)).max(0.0));
    PerStep {
        step_s: (seconds - sequence_s * batch).max(0.0),
        sequence_s,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fitted(rows: &[(f64, f64)]) -> PerStep {
        let row = |&(batch, seconds): &_| ByBatch { batch, seconds };
        line(&rows.iter().map(row).collect::<Vec<_>>())
    }

    #[test]
    fn what_grows_with_the_batch_is_a_line_that_neither_falls_nor_begins_below_zero() {
        let of = |step_s, sequence_s| PerStep { step_s, sequence_s };
        assert_eq!(fitted(&[]), of(0.0, 0.0));
        assert_eq!(fitted(&[(4.0, 2.0)]), of(2.0, 0.0));
        assert_eq!(fitted(&[(1.0, 3.0), (5.0, 7.0)]), of(2.0, 1.0));
        assert_eq!(fitted(&[(1.0, 3.0), (5.0, 1.0)]), of(2.0, 0.0));
        assert_eq!(fitted(&[(1.0, 0.0), (3.0, 4.0)]), of(0.0, 1.0));
    }

    #[test]
    fn a_file_of_another_kind_is_told_by_its_kind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("steps.json");
        for (text, says) in [
            (
                r#"{"kind": "gpu_steps", "failed": {}}"#,
                r#"its kind is "gpu_steps"; it must"#,
            ),
            (r#"{"kind": 7}"#, "its kind is 7; it must"),
            ("[1, 2]", "it has no kind; it must"),
            ("{", "EOF"),
            (r#"{"kind": "steps"}"#, "missing field `label`"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = StepsFile::read(&path).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn how_early_a_prompt_must_come_is_what_a_lone_one_waits_beyond_half_a_step_and_its_own() {
        let file = |more: &str| -> StepsFile {
            let text = format!(
                r#"{{"kind": "steps", "label": "", "machine": {{}},
                "engine": {{"block_size_tokens": 16, "block_bytes": 1, "num_blocks": 9}},
                "prefill": [{{"tokens": 100, "context": 0, "seconds": 0.002}},
                            {{"tokens": 200, "context": 0, "seconds": 0.003}}],
                "decode": [{{"batch": 1, "context": 0, "seconds": 0.004}},
                           {{"batch": 11, "context": 0, "seconds": 0.006}}] {more}}}"#
            );
            serde_json::from_str(&text).unwrap()
        };
        let lead = |more: &str| {
            let file = file(more);
            file.lead(&file.table(Path::new("steps.json")).unwrap())
        };
        let launch = r#", "launch": [{"batch": 1, "seconds": 0.0003}]"#;
        // A step of one sequence takes 4 ms and 0.5 beside, with the prompt 1 ms more.
        let lone = r#", "lone": [{"tokens": 100, "batch": 1, "context": 30, "seconds": 0.01075}],
            "between": [{"batch": 1, "seconds": 0.0005}]"#;
        let near = |found: Option<PerStep>, ms: f64| {
            let PerStep { step_s, sequence_s } = found.unwrap();
            assert!(
                (step_s - 1e-3 * ms).abs() < 1e-9 && sequence_s == 0.0,
                "{found:?}"
            );
        };
        near(lead(launch), 2.0);
        near(lead(&format!("{launch}{lone}")), 3.0);
        let ahead = r#", "planned_ahead": [{"batch": 1, "seconds": 0.004}]"#;
        near(lead(&format!("{launch}{lone}{ahead}")), 4.0);
        assert_eq!(lead(lone), None, "steps do not overlap");
    }
}
