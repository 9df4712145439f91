//! Which clients may send requests: API keys, known by their SHA-256 alone, each with a limit
//! of its own. Requests of one key are those of one tenant.

mod file;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use axum::http::{HeaderMap, header};
use sha2::{Digest as _, Sha256};

pub use self::file::{KeysError, keep_reading};

use crate::error::ApiError;

/// SHA-256 of a key.
type Digest = [u8; 32];

/// The name of the key that the environment gives.
const ENVIRONMENT_NAME: &str = "environment";

/// The keys that are valid now.
#[derive(Debug)]
pub struct ApiKeys {
    valid: RwLock<HashMap<Digest, Arc<Key>>>,
    /// Of the environment; it stays valid whatever the file says.
    own: Option<(Digest, Arc<Key>)>,
}

#[derive(Debug)]
struct Key {
    name: Arc<str>,
    /// Requests at once; `None`: not limited by the key.
    max_requests: Option<u32>,
    /// Shared with the key of before, where the file gave it another limit.
    running: Arc<AtomicU32>,
}

/// Who sent a request.
#[derive(Debug, Clone)]
pub struct Caller(Arc<Key>);

/// One request of a key. Held as long as the request lives.
#[derive(Debug)]
pub struct CallerPermit(Arc<Key>);

impl ApiKeys {
    /// With the key that an environment variable has; a request without a key is refused.
    ///
    /// # Errors
    /// The variable is not set, or empty.
    pub fn new(variable: Option<&str>) -> Result<Self, KeysError> {
        let read = |variable: &str| match std::env::var(variable) {
            Ok(key) if !key.is_empty() => {
                let named = Key::new(ENVIRONMENT_NAME, None);
                Ok((digest(&key), Arc::new(named)))
            }
            _ => Err(KeysError::Variable {
                name: variable.to_owned(),
            }),
        };
        let own = variable.map(read).transpose()?;
        let valid = RwLock::new(own.iter().cloned().collect());
        Ok(Self { valid, own })
    }

    /// Who sent a request with these headers.
    ///
    /// # Errors
    /// `Unauthorized`: no key, or one that is not valid.
    pub fn caller(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        let given = headers.get(header::AUTHORIZATION);
        let Some(key) = given.and_then(|value| bearer(value.to_str().ok()?)) else {
            return Err(ApiError::Unauthorized {
                message: "An API key is required: Authorization: Bearer KEY.",
            });
        };
        let digest = digest(key);
        let valid = self.valid.read().unwrap_or_else(PoisonError::into_inner);
        let caller = valid.get(&digest).cloned().map(Caller);
        caller.ok_or(ApiError::Unauthorized {
            message: "The API key is not valid.",
        })
    }

    /// Replaces the keys. What runs under a key that stays is still counted, whatever its limit was.
    fn replace(&self, lines: Vec<file::Line>) {
        let mut valid = self.valid.write().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::take(&mut *valid);
        for line in lines {
            let mut key = Key::new(&line.name, line.max_requests);
            if let Some(known) = before.get(&line.digest) {
                key.running = Arc::clone(&known.running);
            }
            valid.insert(line.digest, Arc::new(key));
        }
        valid.extend(self.own.iter().cloned());
    }
}

impl Key {
    fn new(name: &str, max_requests: Option<u32>) -> Self {
        Self {
            name: name.into(),
            max_requests,
            running: Arc::default(),
        }
    }
}

impl Caller {
    /// The tenant whose requests its are.
    pub fn tenant(&self) -> Arc<str> {
        Arc::clone(&self.0.name)
    }

    /// Lets one more request of the key in.
    ///
    /// # Errors
    /// `KeyLimit`: as many run as it may have.
    pub fn enter(&self) -> Result<CallerPermit, ApiError> {
        let limit = self.0.max_requests.unwrap_or(u32::MAX);
        let more = |running| (running < limit).then_some(running + 1);
        let counted = &self.0.running;
        match counted.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            Ok(_) => Ok(CallerPermit(Arc::clone(&self.0))),
            Err(running) => Err(ApiError::KeyLimit { running, limit }),
        }
    }
}

impl Drop for CallerPermit {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The token of a header `Bearer TOKEN`; the word is not case-sensitive.
fn bearer(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

fn digest(key: &str) -> Digest {
    Sha256::digest(key.as_bytes()).into()
}
