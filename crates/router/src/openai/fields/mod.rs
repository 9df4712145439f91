//! Which fields a request may have. A field that would be ignored is never taken: what it asks
//! for might be missing from the answer, and nobody would know.
//!
//! `docs/api.md` is made of [`table::FIELDS`], [`responses::RESPONSES_FIELDS`],
//! [`tokens::TOKEN_FIELDS`] and [`native::NATIVE_FIELDS`].

mod native;
mod responses;
mod table;
#[cfg(test)]
mod tests;
mod tokens;

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::Value;
use serde_json::value::RawValue;

use self::native::NATIVE_FIELDS;
use self::responses::RESPONSES_FIELDS;
use self::table::FIELDS;
use self::tokens::TOKEN_FIELDS;
use crate::app::MAX_QUOTED_CHARS;
use crate::error::ApiError;
use crate::openai::request::body;

/// Names that differ by more are not taken for a slip.
const SLIP: usize = 2;

/// Who has a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    Chat,
    Completions,
    /// Chats and completions.
    Both,
    /// OpenAI's `/v1/responses`.
    Responses,
    Tokenize,
    Detokenize,
    /// SGLang's `/generate`.
    Generate,
    /// The object of this name in the body of `/generate`.
    SamplingParams,
}

/// What becomes of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    Supported,
    /// Taken, without an effect that a client could miss in the answer.
    Harmless,
    /// 400, unless its value asks for nothing: null, or one of these (JSON).
    Refused {
        unless: &'static [&'static str],
    },
}

/// A field and what becomes of it.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    pub name: &'static str,
    pub endpoint: Endpoint,
    pub policy: Policy,
    /// What it does here; why it does nothing; why it is refused, and what to do instead.
    pub text: &'static str,
}

/// Refuses a body with a field that would be ignored.
///
/// # Errors
/// `Invalid`, with the field's name, and what is the matter with it.
pub fn check(endpoint: Endpoint, bytes: &[u8]) -> Result<(), ApiError> {
    let given: BTreeMap<Cow<'_, str>, &RawValue> = body::parse(bytes)?;
    for (name, value) in given {
        let known = of(endpoint).find(|field| field.name == name);
        match known.map(|field| (field.policy, field.text)) {
            Some((Policy::Supported | Policy::Harmless, _)) => {}
            Some((Policy::Refused { unless }, text)) => {
                if !asks_for_nothing(value.get(), unless) {
                    return Err(ApiError::unsupported(
                        &name,
                        unsupported(&name, value, unless, text),
                    ));
                }
            }
            None => return Err(unknown(endpoint, &name)),
        }
    }
    Ok(())
}

/// The value is named where others are taken.
fn unsupported(name: &str, value: &RawValue, unless: &[&str], text: &str) -> String {
    if unless.is_empty() {
        return format!("{name} is not supported: {text}.");
    }
    let shown: String = value.get().chars().take(MAX_QUOTED_CHARS).collect();
    format!("{name} is {shown}, which is not supported: {text}.")
}

fn of(endpoint: Endpoint) -> impl Iterator<Item = &'static Field> {
    let both = matches!(endpoint, Endpoint::Chat | Endpoint::Completions);
    all()
        .filter(move |field| field.endpoint == endpoint || both && field.endpoint == Endpoint::Both)
}

/// Those of all endpoints.
pub fn all() -> impl Iterator<Item = &'static Field> {
    let own = FIELDS.iter().chain(RESPONSES_FIELDS).chain(TOKEN_FIELDS);
    own.chain(NATIVE_FIELDS)
}

fn asks_for_nothing(json: &str, unless: &[&str]) -> bool {
    let Ok(value) = serde_json::from_str::<Value>(json) else {
        return false;
    };
    let same = |neutral: &&str| match serde_json::from_str::<Value>(neutral) {
        Ok(neutral) if neutral.is_number() => neutral.as_f64() == value.as_f64(),
        Ok(neutral) => neutral == value,
        Err(_) => false,
    };
    value.is_null() || unless.iter().any(same)
}

fn unknown(endpoint: Endpoint, name: &str) -> ApiError {
    let shown: String = name.chars().take(64).collect();
    let message = match (elsewhere(name), nearest(endpoint, name)) {
        (Some(place), _) => format!("{shown} is a field of {place}."),
        (None, Some(near)) => format!("{shown} is not a field; did you mean {near}?"),
        (None, None) => {
            format!("{shown} is not a field; docs/api.md lists those that there are.")
        }
    };
    ApiError::unsupported(&shown, message)
}

/// Where a field of this name belongs.
fn elsewhere(name: &str) -> Option<&'static str> {
    let place = match all().find(|field| field.name == name)?.endpoint {
        Endpoint::Chat => "/v1/chat/completions",
        Endpoint::Completions => "/v1/completions",
        Endpoint::Both => "/v1/chat/completions and /v1/completions",
        Endpoint::Responses => "/v1/responses",
        Endpoint::Tokenize => "/tokenize",
        Endpoint::Detokenize => "/detokenize",
        Endpoint::Generate => "/generate",
        Endpoint::SamplingParams => "sampling_params of /generate",
    };
    Some(place)
}

fn nearest(endpoint: Endpoint, name: &str) -> Option<&'static str> {
    // Names are no further apart than this; a name of megabytes is compared with none.
    let longer = |field: &&Field| field.name.len().abs_diff(name.len());
    let distance = |field: &&Field| strsim::osa_distance(field.name, name);
    let alike = of(endpoint).filter(|field| longer(field) <= SLIP);
    let near = alike.min_by_key(distance)?;
    (distance(&near) <= SLIP).then_some(near.name)
}
