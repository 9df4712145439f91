//! How the values of options are read.

use std::path::PathBuf;

use tasuki_core::options::within;
use tracing::level_filters::LevelFilter;

/// The default of --log.
pub const LOG: &str = "info";
const LEVELS: &str = "off, error, warn, info, debug or trace";

/// More than a day is no deadline.
const MAX_SECONDS: f64 = 86_400.0;

/// Roles outweigh every cost long before.
const MAX_SHARE: f64 = 1e6;

pub fn share(given: &str) -> Result<f64, String> {
    within(given, 0.0, MAX_SHARE)
}

pub fn seconds(given: &str) -> Result<f64, String> {
    within(given, 0.0, MAX_SECONDS)
}

pub fn milliseconds(given: &str) -> Result<f64, String> {
    match given.parse::<f64>() {
        Ok(ms) if ms > 0.0 && ms <= 1e3 * MAX_SECONDS => Ok(ms),
        _ => Err(format!(
            "it must be more than 0 and at most {}",
            1e3 * MAX_SECONDS
        )),
    }
}

/// A limit that nothing could keep to is a mistake.
pub fn positive_seconds(given: &str) -> Result<f64, String> {
    match seconds(given)? {
        0.0 => Err("it must be more than 0".to_owned()),
        seconds => Ok(seconds),
    }
}

/// Of `tracing`'s filters those without a word alone that is no level: it would be the name of a
/// target, and everything else would be off. Empty is the default.
pub fn log(given: &str) -> Result<String, String> {
    if given.is_empty() {
        return Ok(LOG.to_owned());
    }
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    let is_name = |word: &&str| !word.contains(['=', '[', ']', '{', '}']) && !is_level(word);
    match given.split(',').map(str::trim).find(is_name) {
        Some(word) => Err(format!(
            "{word:?} is no level: use {LEVELS}, or TARGET=LEVEL"
        )),
        None => Ok(given.to_owned()),
    }
}

/// A model's folder, and its name if it is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedFolder(pub Option<String>, pub PathBuf);

/// A path with an equals sign begins with / or a dot.
pub fn model(given: &str) -> Result<NamedFolder, String> {
    let is_path = given.starts_with(['/', '.']);
    match given.split_once('=').filter(|_| !is_path) {
        None if given.is_empty() => Err("it must be a folder".to_owned()),
        None => Ok(NamedFolder(None, given.into())),
        Some((name, path)) if !name.is_empty() && !path.is_empty() => {
            Ok(NamedFolder(Some(name.to_owned()), path.into()))
        }
        Some(_) => Err("it must be PATH or NAME=PATH".to_owned()),
    }
}

pub fn alias(given: &str) -> Result<(String, String), String> {
    match given.split_once('=') {
        Some((alias, name)) if !alias.is_empty() && !name.is_empty() => {
            Ok((alias.to_owned(), name.to_owned()))
        }
        _ => Err("it must be ALIAS=NAME".to_owned()),
    }
}

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listen {
    pub host: String,
    pub port: u16,
}

pub fn listen(given: &str) -> Result<Listen, String> {
    let (host, port) = given.rsplit_once(':').ok_or("it must be HOST:PORT")?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let port = port.parse();
    match port {
        Ok(port) if !host.is_empty() => Ok(Listen {
            host: host.to_owned(),
            port,
        }),
        _ => Err("it must be HOST:PORT, with a port from 0 to 65535".to_owned()),
    }
}
