//! The file of API keys: a name, a digest and perhaps a limit a line, read again when it changes.

use std::collections::HashSet;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use super::{ApiKeys, Digest};

const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Some 100,000 keys.
const MAX_BYTES: u64 = 10 << 20;
const MAX_NAME_BYTES: usize = 64;

/// Why keys are not taken.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error("--api-key-env {name}: the variable is not set; give it an API key")]
    Variable { name: String },
    #[error("--api-keys-file {path} cannot be read: {source}")]
    Read {
        path: String,
        source: std::io::Error,
    },
    #[error("--api-keys-file {path} has {bytes} bytes; the limit is {MAX_BYTES}")]
    TooLarge { path: String, bytes: u64 },
    #[error(
        "--api-keys-file {path}, line {line}: {wrong}; a line is NAME SHA256 [max-requests=N], as \
         `tasuki api-key NAME` prints it"
    )]
    Line {
        path: String,
        line: usize,
        wrong: &'static str,
    },
}

/// One key of the file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub name: String,
    pub digest: Digest,
    pub max_requests: Option<u32>,
}

impl ApiKeys {
    /// Takes the keys of a file, and gives back its text, which may change later: see
    /// [`keep_reading`].
    ///
    /// # Errors
    /// [`KeysError`]; the keys stay as they were.
    pub fn read(&self, path: &Path) -> Result<String, KeysError> {
        let text = text_of(path)?;
        self.replace(parse(path, &text)?);
        Ok(text)
    }
}

/// Reads the file again when its text is not the one that was `taken`. While it has an error, the
/// keys that were valid before stay so, and also until it was read twice with the same text: one
/// that is being written lacks keys.
pub async fn keep_reading(keys: Arc<ApiKeys>, path: PathBuf, mut taken: String) -> Infallible {
    let mut ticks = interval(POLL_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut before = None;
    let mut logged = String::new();
    loop {
        ticks.tick().await;
        let text = match text_of(&path) {
            Ok(text) if taken == text => {
                logged.clear();
                before = None;
                continue;
            }
            Ok(text) if before.as_ref() != Some(&text) => {
                before = Some(text);
                continue;
            }
            Ok(text) => parse(&path, &text).map(|lines| (text, lines)),
            Err(error) => Err(error),
        };
        match text {
            Ok((text, lines)) => {
                tracing::info!(keys = lines.len(), "API keys read again");
                keys.replace(lines);
                taken = text;
                logged.clear();
            }
            Err(error) if logged == error.to_string() => {}
            Err(error) => {
                tracing::warn!(%error, "the API keys stay as they were");
                logged = error.to_string();
            }
        }
    }
}

fn text_of(path: &Path) -> Result<String, KeysError> {
    let shown = || path.display().to_string();
    let read = |source| KeysError::Read {
        path: shown(),
        source,
    };
    let bytes = std::fs::metadata(path).map_err(read)?.len();
    if bytes > MAX_BYTES {
        return Err(KeysError::TooLarge {
            path: shown(),
            bytes,
        });
    }
    std::fs::read_to_string(path).map_err(read)
}

/// The keys of a file's text. Errors quote nothing of a line: a key may stand in the place
/// of its digest.
fn parse(path: &Path, text: &str) -> Result<Vec<Line>, KeysError> {
    let mut lines: Vec<Line> = Vec::new();
    let mut digests = HashSet::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let parsed = parse_line(line).and_then(|parsed| {
            let is_new = digests.insert(parsed.digest);
            is_new
                .then_some(parsed)
                .ok_or("the key is in the file twice")
        });
        lines.push(parsed.map_err(|wrong| KeysError::Line {
            path: path.display().to_string(),
            line: number,
            wrong,
        })?);
    }
    Ok(lines)
}

fn parse_line(line: &str) -> Result<Line, &'static str> {
    let mut words = line.split_whitespace();
    let name = words.next().unwrap_or_default();
    if name.len() > MAX_NAME_BYTES {
        return Err("the name has more than 64 bytes");
    }
    let digest = words.next().and_then(digest_of_hex);
    let digest = digest.ok_or("the second word is not a SHA-256 of 64 hexadecimal digits")?;
    let max_requests = match words.next().map(|word| word.split_once('=')) {
        None => None,
        Some(Some(("max-requests", number))) => {
            let number = number.parse().ok().filter(|number| *number > 0);
            Some(number.ok_or("max-requests is not a number from 1 to 4294967295")?)
        }
        Some(_) => return Err("the third word is not max-requests=N"),
    };
    if words.next().is_some() {
        return Err("it has more than three words");
    }
    Ok(Line {
        name: name.to_owned(),
        digest,
        max_requests,
    })
}

fn digest_of_hex(word: &str) -> Option<Digest> {
    let is_hex = word.len() == 64 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    let mut digest = [0; 32];
    for (at, byte) in digest.iter_mut().enumerate().filter(|_| is_hex) {
        *byte = u8::from_str_radix(&word[2 * at..2 * at + 2], 16).ok()?;
    }
    is_hex.then_some(digest)
}
