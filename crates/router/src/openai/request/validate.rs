//! The limits of what a request may ask, each defined once, and checks of single values. A refusal
//! names the value and the limit.

use std::fmt::Display;
use std::ops::RangeInclusive;

use super::types::CommonFields;
use crate::error::ApiError;

/// Choices per prompt.
pub const MAX_N: i64 = 128;
/// Prompts in one completions request.
pub const MAX_PROMPTS: usize = 1024;
/// Prompts times choices in one request.
pub const MAX_CHOICES: usize = 2048;
/// Alternatives per position.
pub const MAX_LOGPROBS: i64 = 20;
/// Stop strings, and the bytes of each.
pub const MAX_STOPS: usize = 16;
pub const MAX_STOP_BYTES: usize = 1024;
pub const MAX_STOP_TOKEN_IDS: usize = 128;
pub const MAX_LOGIT_BIASES: usize = 1024;
pub const LOGIT_BIAS: std::ops::RangeInclusive<f64> = -100.0..=100.0;
pub const TEMPERATURE: std::ops::RangeInclusive<f64> = 0.0..=2.0;
pub const PENALTY: std::ops::RangeInclusive<f64> = -2.0..=2.0;
pub const UNIT: std::ops::RangeInclusive<f64> = 0.0..=1.0;
/// Logits are divided by it: a smaller one could make them infinite.
pub const REPETITION_PENALTY: std::ops::RangeInclusive<f64> = 0.01..=10.0;
pub const MAX_CACHE_SALT_BYTES: usize = 256;
/// Of a tenant's name.
pub const MAX_TENANT_BYTES: usize = 256;
pub const PRIORITY: std::ops::RangeInclusive<i32> = -1000..=1000;
/// What `/v1/completions` generates when `max_tokens` is absent, as OpenAI.
pub const DEFAULT_COMPLETION_TOKENS: u32 = 16;
/// And `/generate`, as SGLang.
pub const DEFAULT_NEW_TOKENS: u32 = 128;

/// A number in a closed range.
pub fn number(
    name: &str,
    value: Option<f64>,
    range: &RangeInclusive<f64>,
) -> Result<Option<f64>, ApiError> {
    match value {
        Some(given) if !range.contains(&given) => {
            Err(outside(name, given, range.start(), range.end()))
        }
        other => Ok(other),
    }
}

/// An integer in a closed range of at most 32 bits.
pub fn integer(
    name: &str,
    value: Option<i64>,
    range: RangeInclusive<i64>,
) -> Result<Option<u32>, ApiError> {
    let Some(given) = value else {
        return Ok(None);
    };
    match u32::try_from(given) {
        Ok(checked) if range.contains(&given) => Ok(Some(checked)),
        _ if *range.end() >= i64::from(u32::MAX) && given < *range.start() => {
            Err(ApiError::invalid(
                name,
                format!("{name} is {given}; it must be at least {}.", range.start()),
            ))
        }
        _ => Err(outside(name, given, range.start(), range.end())),
    }
}

/// The most output tokens that a request asks for, at least `least`, and the field that has the
/// number: `max_completion_tokens` is the newer name and wins.
pub fn requested_tokens(
    fields: &CommonFields,
    least: i64,
) -> Result<(&'static str, Option<u32>), ApiError> {
    let any = least..=i64::from(u32::MAX);
    let [old, new] = ["max_tokens", "max_completion_tokens"];
    let by_old = integer(old, fields.max_tokens, any.clone())?;
    let by_new = integer(new, fields.max_completion_tokens, any)?;
    Ok(match by_new {
        Some(tokens) => (new, Some(tokens)),
        None => (old, by_old),
    })
}

/// A salt of the prefix cache, from the field of this name.
pub fn cache_salt(name: &str, given: Option<&str>) -> Result<String, ApiError> {
    let salt = given.unwrap_or_default();
    if salt.len() > MAX_CACHE_SALT_BYTES {
        let found = salt.len();
        return Err(ApiError::invalid(
            name,
            format!("{name} has {found} bytes; the limit is {MAX_CACHE_SALT_BYTES}."),
        ));
    }
    Ok(salt.to_owned())
}

fn outside(name: &str, given: impl Display, low: impl Display, high: impl Display) -> ApiError {
    ApiError::invalid(
        name,
        format!("{name} is {given}; it must be between {low} and {high}."),
    )
}

/// At most so many items.
pub fn count(name: &str, found: usize, limit: usize) -> Result<(), ApiError> {
    if found <= limit {
        return Ok(());
    }
    Err(ApiError::invalid(
        name,
        format!("{name} has {found} items; the limit is {limit}."),
    ))
}

/// Token ids of a vocabulary of `vocab_size`.
pub fn token_ids(name: &str, ids: &[i64], vocab_size: u32) -> Result<Vec<u32>, ApiError> {
    ids.iter()
        .map(|id| token_id(name, *id, vocab_size))
        .collect()
}

/// One token id.
pub fn token_id(name: &str, id: i64, vocab_size: u32) -> Result<u32, ApiError> {
    match u32::try_from(id) {
        Ok(checked) if checked < vocab_size => Ok(checked),
        _ => Err(ApiError::invalid(
            name,
            format!(
                "{name} has token id {id}; the vocabulary has {vocab_size} tokens, from 0 to {}.",
                vocab_size.saturating_sub(1)
            ),
        )),
    }
}

/// What a request has left for output, when `max_tokens` is absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DefaultOutput {
    /// All that fits the context: `common_len` tokens, which every worker takes,
    /// unless the prompt alone needs a larger worker.
    Fill { common_len: u32 },
    /// So many tokens, or what fits if that is less.
    AtMost(u32),
}

/// How many tokens may be generated after a prompt of `prompt_tokens`. `name`: the field of the
/// `requested` number.
///
/// # Errors
/// When prompt and output do not fit `max_model_len` together.
pub fn output_tokens(
    name: &str,
    prompt_tokens: usize,
    requested: Option<u32>,
    default: DefaultOutput,
    max_model_len: u32,
) -> Result<u32, ApiError> {
    let too_long = |asked: String| ApiError::Invalid {
        message: format!(
            "The prompt has {prompt_tokens} tokens and {asked}, but prompt and output together \
             may have {max_model_len} tokens."
        ),
        param: Some(name.to_owned()),
        code: Some("context_length_exceeded"),
    };
    let prompt_len = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
    let room = max_model_len.saturating_sub(prompt_len);
    match (requested, default) {
        (Some(asked), _) if asked <= room && room > 0 => Ok(asked),
        (Some(asked), _) => Err(too_long(format!("{name} is {asked}"))),
        (None, _) if room == 0 => Err(too_long(format!("{name} is not set (at least 1)"))),
        (None, DefaultOutput::Fill { common_len }) => match common_len.saturating_sub(prompt_len) {
            0 => Ok(room),
            common => Ok(common.min(room)),
        },
        (None, DefaultOutput::AtMost(most)) => Ok(room.min(most)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_outside_are_named_with_their_range() {
        assert_eq!(number("top_p", Some(0.5), &(0.0..=1.0)).unwrap(), Some(0.5));
        let error = number("temperature", Some(2.5), &(0.0..=2.0)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "temperature is 2.5; it must be between 0 and 2."
        );
    }

    #[test]
    fn integers_outside_are_named_with_their_limit() {
        assert_eq!(integer("n", Some(3), 1..=128).unwrap(), Some(3));
        assert_eq!(
            integer("n", Some(129), 1..=128).unwrap_err().to_string(),
            "n is 129; it must be between 1 and 128."
        );
        assert_eq!(
            integer("max_tokens", Some(-5), 1..=i64::from(u32::MAX))
                .unwrap_err()
                .to_string(),
            "max_tokens is -5; it must be at least 1."
        );
        assert_eq!(
            integer("max_tokens", Some(5_000_000_000), 1..=i64::from(u32::MAX))
                .unwrap_err()
                .to_string(),
            "max_tokens is 5000000000; it must be between 1 and 4294967295."
        );
    }

    #[test]
    fn token_ids_stay_in_the_vocabulary() {
        assert_eq!(token_ids("prompt", &[0, 9], 10).unwrap(), [0, 9]);
        for bad in [-1, 10, i64::MAX] {
            let text = token_id("prompt", bad, 10).unwrap_err().to_string();
            assert!(text.contains(&bad.to_string()) && text.contains("10 tokens, from 0 to 9"));
        }
    }

    #[test]
    fn output_fits_the_context() {
        use DefaultOutput::AtMost;
        let tokens = |prompt, asked, default, longest| {
            output_tokens("max_tokens", prompt, asked, default, longest)
        };
        let fill = |common_len| DefaultOutput::Fill { common_len };
        assert_eq!(tokens(10, None, fill(100), 100).unwrap(), 90);
        assert_eq!(tokens(10, None, fill(50), 100).unwrap(), 40);
        assert_eq!(tokens(60, None, fill(50), 100).unwrap(), 40);
        assert_eq!(tokens(10, None, AtMost(16), 100).unwrap(), 16);
        assert_eq!(tokens(95, None, AtMost(16), 100).unwrap(), 5);
        assert_eq!(tokens(10, Some(90), fill(100), 100).unwrap(), 90);
        let text = tokens(10, Some(91), fill(100), 100)
            .unwrap_err()
            .to_string();
        for part in ["10 tokens", "max_tokens is 91", "100 tokens"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(tokens(100, None, fill(100), 100).is_err());
        assert!(tokens(100, Some(0), fill(100), 100).is_err());
    }
}
