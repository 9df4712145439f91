//! The result file of a run, schema `tasuki.bench/1`: everything needed to
//! plot a run, compare it and make it again. Unknown is null.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use crate::machine::Machine;
use crate::phases::{PHASES, Phases};
use crate::recorder::{Record, TokenCountSource};
use crate::slo::Slo;
use crate::summary::{FailureCount, Metrics, Summary, Window};

/// Of every result file of this version.
pub const SCHEMA: &str = "tasuki.bench/1";

/// Why there is no result file.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {path}: {source}; choose a path that can be written")]
pub struct WriteError {
    path: PathBuf,
    source: std::io::Error,
}

/// One run.
#[derive(Debug, Serialize)]
pub struct RunResult<'a> {
    pub schema: &'static str,
    pub kind: &'static str,
    /// UTC, RFC 3339.
    pub created: String,
    pub command: &'a [String],
    pub label: Option<&'a str>,
    pub topology: Option<&'a Value>,
    pub model: &'a str,
    pub base_url: &'a str,
    pub endpoint: &'static str,
    pub git_revision: Option<String>,
    pub version: &'static str,
    pub machine: Machine,
    pub workload: Value,
    pub arrival: Value,
    pub slo: Option<&'a Slo>,
    pub window: Window,
    pub token_count_source: TokenCountSource,
    /// Whether the run was stopped before its end.
    pub interrupted: bool,
    pub metrics: &'a Metrics,
    pub failures: &'a [FailureCount],
    pub client: ClientCost,
    /// Of a run in simulated time: what was simulated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub simulated: Option<Value>,
    pub requests: Requests,
}

/// What the client itself took.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ClientCost {
    /// Of the process, warm-up and preparation apart.
    pub cpu_s: f64,
    pub tokens_per_cpu_s: f64,
    pub threads: usize,
}

/// Every request, one array a property, in order of their index.
#[derive(Debug, Default, PartialEq, Serialize)]
pub struct Requests {
    pub index: Vec<usize>,
    pub due_s: Vec<f64>,
    pub sent_s: Vec<f64>,
    pub first_s: Vec<Option<f64>>,
    pub second_s: Vec<Option<f64>>,
    pub end_s: Vec<f64>,
    pub input_tokens: Vec<Option<u32>>,
    pub output_tokens: Vec<Option<u32>>,
    pub error: Vec<Option<String>>,
    pub in_window: Vec<bool>,
    /// Whether it met every objective; null without objectives.
    pub met: Vec<Option<bool>>,
    pub chunk_s: Vec<Vec<f64>>,
    pub chunk_tokens: Vec<Vec<u32>>,
    pub phases: Option<PhaseArrays>,
}

/// The phases of every request.
#[derive(Debug, PartialEq)]
pub struct PhaseArrays([(&'static str, Vec<Option<f64>>); PHASES]);

impl Serialize for PhaseArrays {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, times)| (name, times)))
    }
}

impl Requests {
    /// From the records and what the summary says of each; `chunks`: with the
    /// time of every chunk.
    pub fn new(records: &[Record], summary: &Summary, chunks: bool) -> Self {
        let mut order: Vec<usize> = (0..records.len()).collect();
        order.sort_by_key(|&place| records[place].index);
        let mut requests = Self::default();
        for place in &order {
            requests.add(&records[*place], chunks);
            requests.in_window.push(summary.in_window[*place]);
            requests.met.push(summary.met[*place]);
        }
        if records.iter().any(|record| record.phases.is_some()) {
            let phases = |place: &usize| records[*place].phases.unwrap_or_default().named();
            let mut arrays = Phases::default()
                .named()
                .map(|(name, ..)| (name, Vec::new()));
            for place in &order {
                for (array, phase) in std::iter::zip(&mut arrays, phases(place)) {
                    array.1.push(phase.2);
                }
            }
            requests.phases = Some(PhaseArrays(arrays));
        }
        requests
    }

    fn add(&mut self, record: &Record, chunks: bool) {
        self.index.push(record.index);
        self.due_s.push(micros(record.due_s));
        self.sent_s.push(micros(record.sent_s));
        self.first_s.push(record.first_s().map(micros));
        self.second_s.push(record.token_s(2).map(micros));
        self.end_s.push(micros(record.end_s));
        self.input_tokens.push(record.input_tokens);
        self.output_tokens.push(record.output_tokens);
        let failure = record.failure.as_ref();
        self.error
            .push(failure.map(|f| format!("{}: {f}", f.kind())));
        let arrived = if chunks { &record.arrived[..] } else { &[] };
        self.chunk_s
            .push(arrived.iter().map(|a| micros(a.at_s)).collect());
        self.chunk_tokens
            .push(arrived.iter().map(|a| a.tokens).collect());
    }
}

/// Rounded to microseconds: more would only lengthen the file.
fn micros(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}

/// Refuses a path before a run whose result could not be written there. Makes its folder.
///
/// # Errors
/// Where and why it cannot be written.
pub fn check_writable(path: &Path) -> Result<(), WriteError> {
    let check = || {
        if path.is_dir() {
            return Err(std::io::ErrorKind::IsADirectory.into());
        }
        if is_device(path) {
            return Ok(());
        }
        let (partial, _) = begin(&real(path))?;
        std::fs::remove_file(partial)
    };
    check().map_err(|source| WriteError {
        path: path.to_owned(),
        source,
    })
}

/// The file that gets the path's name when it is whole.
fn begin(path: &Path) -> std::io::Result<(PathBuf, File)> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let file = File::create(&partial)?;
    Ok((partial.into(), file))
}

impl RunResult<'_> {
    /// Writes the file, whole or not at all; makes its folder.
    ///
    /// # Errors
    /// Where and why it cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), WriteError> {
        let written = write_whole(path, |file| {
            serde_json::to_writer(&mut *file, self)?;
            file.write_all(b"\n")
        });
        written.map_err(|source| WriteError {
            path: path.to_owned(),
            source,
        })
    }
}

/// A device or a pipe, such as /dev/null, which no file may replace.
fn is_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| !found.is_file())
}

/// What a link is for.
fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Writes a file, or leaves what is there as it is; a link stays one.
///
/// # Errors
/// It cannot be written.
pub fn write_whole(
    path: &Path,
    fill: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
) -> std::io::Result<()> {
    if is_device(path) {
        let mut writer = BufWriter::new(File::options().write(true).open(path)?);
        return fill(&mut writer).and_then(|()| writer.flush());
    }
    let path = &real(path);
    let (partial, file) = begin(path)?;
    let mut writer = BufWriter::new(file);
    let written = fill(&mut writer).and_then(|()| writer.flush());
    let moved = written.and_then(|()| std::fs::rename(&partial, path));
    if moved.is_err() {
        let _ = std::fs::remove_file(&partial); // a full disk needs the room
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_written_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.json");
        std::fs::write(&path, "old").unwrap();
        let full = |_: &mut BufWriter<File>| Err(std::io::ErrorKind::StorageFull.into());
        assert!(write_whole(&path, full).is_err());
        let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
        assert_eq!(left.len(), 1);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old");
        write_whole(&path, |file| file.write_all(b"new")).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
    }

    #[test]
    fn no_file_replaces_a_device_or_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let [file, to_file, to_device] = ["a.json", "b", "c"].map(|name| folder.path().join(name));
        std::fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink("a.json", &to_file).unwrap();
        std::os::unix::fs::symlink("/dev/null", &to_device).unwrap();
        for link in [&to_file, &to_device] {
            check_writable(link).unwrap();
            write_whole(link, |file| file.write_all(b"new")).unwrap();
            assert!(link.is_symlink(), "{}", link.display());
        }
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "new");
        assert!(is_device(&to_device));
    }
}
