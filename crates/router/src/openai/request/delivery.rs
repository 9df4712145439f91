//! What is to be done with the generated tokens on their way to the client.

use std::sync::Arc;

use tasuki_text::StopStrings;

use super::types::{CommonFields, OneOrMany};
use super::validate::{self, count, integer};
use crate::error::ApiError;

/// How a request wants its answer.
#[derive(Debug, Clone)]
pub struct Delivery {
    pub n: u32,
    pub stream: bool,
    pub include_usage: bool,
    /// Not only at the end, but so far, with every chunk.
    pub continuous_usage: bool,
    pub return_token_ids: bool,
    /// Timings in the body of an answer that is not streamed.
    pub timings: bool,
    /// Shared by all choices.
    pub stops: Arc<StopStrings>,
    pub include_stop: bool,
    pub skip_special_tokens: bool,
    /// Special tokens that the text has nevertheless: marks of tool calls and reasoning.
    pub kept_special_tokens: Arc<[u32]>,
    /// An answer that stops without one of these has ended with its grammar.
    pub stop_token_ids: Arc<[u32]>,
    /// Stop strings in the text of the first tokens do not count.
    pub min_tokens: u32,
}

impl Delivery {
    /// # Errors
    /// `Invalid` for values out of range and for what is not supported.
    pub fn new(fields: &CommonFields, min_tokens: u32) -> Result<Self, ApiError> {
        let n = integer("n", fields.n, 1..=validate::MAX_N)?.unwrap_or(1);
        refuse_unsupported(fields, n)?;
        let stream = fields.stream.unwrap_or(false);
        let options = fields.stream_options.as_ref();
        if options.is_some() && !stream {
            return Err(ApiError::invalid(
                "stream_options",
                "stream_options is only allowed when stream is true.",
            ));
        }
        if options.and_then(|o| o.include_obfuscation) == Some(true) {
            return Err(ApiError::unsupported(
                "stream_options.include_obfuscation",
                "stream_options.include_obfuscation is true, which is not supported: chunks have no \
                 padding. Leave it out.",
            ));
        }
        let include_usage = options.and_then(|o| o.include_usage).unwrap_or(false);
        let continuous = options.and_then(|o| o.continuous_usage_stats);
        let continuous_usage = continuous.unwrap_or(false);
        if continuous_usage && !include_usage {
            return Err(ApiError::invalid(
                "stream_options.continuous_usage_stats",
                "stream_options.continuous_usage_stats needs stream_options.include_usage to be true.",
            ));
        }
        Ok(Self {
            n,
            stream,
            include_usage,
            continuous_usage,
            return_token_ids: fields.return_token_ids.unwrap_or(false),
            timings: fields.timings.unwrap_or(false),
            stops: Arc::new(stops(fields.stop.as_ref())?),
            include_stop: fields.include_stop_str_in_output.unwrap_or(false),
            skip_special_tokens: fields.skip_special_tokens.unwrap_or(true),
            kept_special_tokens: Arc::default(),
            stop_token_ids: Arc::default(),
            min_tokens,
        })
    }
}

#[cfg(test)]
impl Delivery {
    /// One choice, whole, nothing special.
    pub fn plain() -> Self {
        Self::new(&CommonFields::default(), 0).expect("the defaults are valid")
    }
}

fn refuse_unsupported(fields: &CommonFields, n: u32) -> Result<(), ApiError> {
    if let Some(best_of) = fields.best_of.filter(|best_of| *best_of != i64::from(n)) {
        return Err(ApiError::unsupported(
            "best_of",
            format!("best_of is {best_of} and n is {n}; best_of is not supported unless equal."),
        ));
    }
    Ok(())
}

fn stops(stop: Option<&OneOrMany>) -> Result<StopStrings, ApiError> {
    let stops = stop.map_or(&[][..], |stop| &stop.0);
    count("stop", stops.len(), validate::MAX_STOPS)?;
    for stop in stops {
        if stop.is_empty() || stop.len() > validate::MAX_STOP_BYTES {
            return Err(ApiError::invalid(
                "stop",
                format!(
                    "stop has a string of {} bytes; each must have 1 to {}.",
                    stop.len(),
                    validate::MAX_STOP_BYTES
                ),
            ));
        }
    }
    Ok(StopStrings::new(stops))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delivery(json: &str) -> Result<Delivery, ApiError> {
        Delivery::new(&serde_json::from_str(json).unwrap(), 0)
    }

    #[test]
    fn defaults_are_those_of_openai() {
        let plain = delivery("{}").unwrap();
        assert_eq!(
            (plain.n, plain.stream, plain.include_usage),
            (1, false, false)
        );
        assert!(plain.skip_special_tokens);
        let equal = delivery(r#"{"n":2,"best_of":2,"response_format":{"type":"text"}}"#);
        assert_eq!(equal.unwrap().n, 2);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (json, part) in [
            (r#"{"n":0}"#, "n is 0"),
            (r#"{"n":129}"#, "128"),
            (r#"{"best_of":3}"#, "best_of is 3"),
            (r#"{"stop":""}"#, "0 bytes"),
            (r#"{"stream_options":{}}"#, "stream is true"),
            (
                r#"{"stream":true,"stream_options":{"include_obfuscation":true}}"#,
                "chunks have no padding",
            ),
            (
                r#"{"stream":true,"stream_options":{"continuous_usage_stats":true}}"#,
                "needs stream_options.include_usage",
            ),
        ] {
            let text = delivery(json).unwrap_err().to_string();
            assert!(text.contains(part), "{text}");
        }
        let many = serde_json::json!({"stop": vec!["x"; 17]}).to_string();
        let text = delivery(&many).unwrap_err().to_string();
        assert_eq!(text, "stop has 17 items; the limit is 16.");
    }
}
