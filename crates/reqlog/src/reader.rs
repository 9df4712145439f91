//! Reads a log back: who began like whom becomes names of chunks again.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tasuki_core::mix;

use crate::format::{Fleet, Header, Line, Record, VERSION, Worker};
use crate::limits::{check_fleet, check_record};

/// Tokens of the chunks that [`Request::chunks`] names.
const CHUNK_TOKENS: u32 = 128;

const FLEET_REMEDY: &str = "correct the value or remove the line";
/// Later records count the lines between, so none may be removed.
const RECORD_REMEDY: &str = "correct the value, or replace the line by {} to skip the request";

/// Why a file is no log that can be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("cannot read {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error(
        "{path} is no request log: its first line is none of `tasuki router --request-log` (which \
         begins {{\"tasuki_request_log\":{VERSION},…)"
    )]
    NoLog { path: PathBuf },
    #[error(
        "{path} is a request log of version {found}; this program reads version {VERSION}: use the \
         tasuki that wrote it"
    )]
    Version { path: PathBuf, found: u64 },
    #[error(
        "{path} has no request: serve some with --request-log, or name an older file, such as {path}.1"
    )]
    Empty { path: PathBuf },
    /// `line` is 1-based.
    #[error("{path}, line {line}: {reason}; {remedy}")]
    Value {
        path: PathBuf,
        line: usize,
        reason: String,
        remedy: &'static str,
    },
}

/// A request of a log.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    pub record: Record,
    /// Names of the chunks of 128 tokens that its prompt begins with, as far as other prompts of the
    /// file share them.
    pub chunks: Arc<[u64]>,
}

/// One file of a log.
#[derive(Debug, Clone, PartialEq)]
pub struct Log {
    pub header: Header,
    /// In the order of their times.
    pub fleets: Vec<Fleet>,
    /// In the order of arrival.
    pub requests: Vec<Request>,
    /// Lines that are cut off or otherwise no records.
    pub skipped: usize,
}

/// Refuses what reading would wait for, or would not end: devices, and pipes but those that are open
/// already, such as `<(zcat LOG.gz)` in a shell.
fn check_kind(path: &Path) -> io::Result<()> {
    let kind = fs::metadata(path)?.file_type();
    let is_open = path.starts_with("/dev") || path.starts_with("/proc");
    if kind.is_file() || (kind.is_fifo() && is_open) {
        return Ok(());
    }
    let what = match kind {
        kind if kind.is_dir() => "a folder",
        kind if kind.is_fifo() => "a named pipe",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Err(io::Error::other(format!("it is {what}; give a file")))
}

impl Log {
    /// # Errors
    ///
    /// [`ReadError`].
    pub fn read(path: &Path) -> Result<Self, ReadError> {
        let fail = |source| ReadError::File {
            path: path.to_owned(),
            source,
        };
        check_kind(path).map_err(fail)?;
        let mut lines = BufReader::new(File::open(path).map_err(fail)?).split(b'\n');
        let first = lines.next().transpose().map_err(fail)?;
        let header = header(path, &first.unwrap_or_default())?;
        let (mut fleets, mut records, mut skipped) = (Vec::new(), Vec::new(), 0);
        for (number, line) in (2..).zip(lines) {
            let line = line.map_err(fail)?;
            let refuse = |remedy| {
                move |reason| ReadError::Value {
                    path: path.to_owned(),
                    line: number,
                    reason,
                    remedy,
                }
            };
            if line.is_empty() {
                continue;
            }
            match serde_json::from_slice(&line) {
                Ok(Line::Fleet { fleet }) => {
                    check_fleet(&fleet).map_err(refuse(FLEET_REMEDY))?;
                    fleets.push(fleet);
                }
                Ok(Line::Record(record)) => {
                    check_record(&record).map_err(refuse(RECORD_REMEDY))?;
                    records.push(Some(*record));
                }
                Err(_) => {
                    // Records after it count it, too.
                    records.push(None);
                    skipped += 1;
                }
            }
        }
        if skipped == records.len() {
            return Err(ReadError::Empty {
                path: path.to_owned(),
            });
        }
        let names = names(&records);
        let requests = records.into_iter().zip(names);
        let mut requests: Vec<Request> = requests
            .filter_map(|(record, chunks)| {
                record.map(|record| Request {
                    record,
                    chunks: chunks.into(),
                })
            })
            .collect();
        requests.sort_by(|a, b| a.record.arrived_s.total_cmp(&b.record.arrived_s));
        Ok(Self {
            header,
            fleets,
            requests,
            skipped,
        })
    }

    /// Every worker that was ever ready, as it was the last time, in the order of their ids, with
    /// the last rates of each class. In a rolling upgrade each worker is replaced by one of another
    /// id.
    pub fn fleet(&self) -> Option<Fleet> {
        let last = self.fleets.last()?;
        let known = self.fleets.iter().flat_map(|fleet| &fleet.workers);
        let ready = known.filter(|worker| worker.ready);
        let workers: BTreeMap<u32, &Worker> = ready.map(|worker| (worker.id, worker)).collect();
        Some(Fleet {
            t: last.t,
            workers: workers.into_values().cloned().collect(),
            // Classes are added and never removed.
            classes: last.classes.clone(),
        })
    }
}

fn header(path: &Path, line: &[u8]) -> Result<Header, ReadError> {
    let no_log = || ReadError::NoLog {
        path: path.to_owned(),
    };
    let value: serde_json::Value = serde_json::from_slice(line).map_err(|_| no_log())?;
    let found = value["tasuki_request_log"].as_u64().ok_or_else(no_log)?;
    if found != u64::from(VERSION) {
        return Err(ReadError::Version {
            path: path.to_owned(),
            found,
        });
    }
    serde_json::from_value(value).map_err(|_| no_log())
}

/// Of each record, the names of its chunks as far as any record shares them.
fn names(records: &[Option<Record>]) -> Vec<Vec<u64>> {
    let shared = |at: usize| {
        let record = records[at].as_ref()?;
        let (back, tokens) = record.shares?;
        let holder = at.checked_sub(back as usize)?;
        let tokens = tokens.min(record.prompt_tokens);
        Some((holder, (tokens / CHUNK_TOKENS) as usize))
    };
    let mut needed: Vec<usize> = vec![0; records.len()];
    for at in (0..records.len()).rev() {
        if let Some((holder, chunks)) = shared(at) {
            needed[at] = needed[at].max(chunks);
            needed[holder] = needed[holder].max(chunks);
        }
    }
    let mut names: Vec<Vec<u64>> = Vec::with_capacity(records.len());
    for (at, &needed) in needed.iter().enumerate() {
        let mut own = match shared(at) {
            Some((holder, chunks)) => names[holder][..chunks.min(names[holder].len())].to_vec(),
            None => Vec::new(),
        };
        let rest = own.len() as u64..needed as u64;
        own.extend(rest.map(|chunk| mix(mix(at as u64) ^ chunk)));
        names.push(own);
    }
    names
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use super::*;

    #[test]
    fn what_is_no_file_is_named_before_it_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let refused = |path: &Path, what: &str| {
            let said = Log::read(path).unwrap_err().to_string();
            let expected = format!("cannot read {}: it is {what}; give a file", path.display());
            assert_eq!(said, expected);
        };
        refused(folder.path(), "a folder");
        refused(Path::new("/dev/null"), "a device");
        let _listening = UnixListener::bind(at("socket")).unwrap();
        refused(&at("socket"), "a socket");
        let made = Command::new("mkfifo").arg(at("pipe")).status();
        assert!(made.unwrap().success());
        refused(&at("pipe"), "a named pipe");
    }
}
