//! From a request's fields to the sampling parameters that workers get.

use tasuki_flow::SamplingParams;
use tasuki_text::GenerationDefaults;

use super::types::CommonFields;
use super::validate::{self, count, integer, number, token_id, token_ids};
use crate::error::ApiError;

/// What the model brings to the sampling of a request.
#[derive(Debug, Clone, Copy)]
pub struct ModelSampling<'a> {
    pub defaults: &'a GenerationDefaults,
    pub eos_token_ids: &'a [u32],
    pub vocab_size: u32,
}

/// Everything but `max_tokens`, which needs the prompt's length, and logprobs,
/// which each endpoint asks for in its own way. Without a seed, `draw_seed`
/// gives one.
pub fn sampling_params(
    fields: &CommonFields,
    model: ModelSampling<'_>,
    draw_seed: impl FnOnce() -> u64,
) -> Result<SamplingParams, ApiError> {
    let defaults = model.defaults;
    Ok(SamplingParams {
        // A negative seed is as good as any: its bits are taken.
        seed: fields.seed.map_or_else(draw_seed, i64::cast_unsigned),
        temperature: or_default(
            number("temperature", fields.temperature, &validate::TEMPERATURE)?,
            defaults.temperature,
            1.0,
        ),
        top_k: match fields.top_k {
            Some(-1) => 0,
            Some(given @ ..-1) => {
                return Err(ApiError::invalid(
                    "top_k",
                    format!("top_k is {given}; it must be at least -1."),
                ));
            }
            given => integer("top_k", given, 0..=i64::from(u32::MAX))?
                .or(defaults.top_k)
                .unwrap_or(0),
        },
        top_p: or_default(top_p(fields.top_p)?, defaults.top_p, 1.0),
        min_p: or_default(
            number("min_p", fields.min_p, &validate::UNIT)?,
            defaults.min_p,
            0.0,
        ),
        presence_penalty: penalty("presence_penalty", fields.presence_penalty)?,
        frequency_penalty: penalty("frequency_penalty", fields.frequency_penalty)?,
        repetition_penalty: or_default(
            number(
                "repetition_penalty",
                fields.repetition_penalty,
                &validate::REPETITION_PENALTY,
            )?,
            defaults.repetition_penalty,
            1.0,
        ),
        logit_bias: logit_bias(fields, model.vocab_size)?,
        stop_token_ids: stop_token_ids(fields, model)?,
        max_tokens: 0,
        min_tokens: integer("min_tokens", fields.min_tokens, 0..=i64::from(u32::MAX))?.unwrap_or(0),
        logprobs: None,
        prompt_logprobs: None,
        grammar: None,
    })
}

#[expect(clippy::cast_possible_truncation, reason = "the wire has 32 bits")]
fn or_default(given: Option<f64>, model: Option<f32>, otherwise: f32) -> f32 {
    given
        .map(|value| value as f32)
        .or(model)
        .unwrap_or(otherwise)
}

fn penalty(name: &str, given: Option<f64>) -> Result<f32, ApiError> {
    Ok(or_default(
        number(name, given, &validate::PENALTY)?,
        None,
        0.0,
    ))
}

fn top_p(given: Option<f64>) -> Result<Option<f64>, ApiError> {
    match number("top_p", given, &validate::UNIT)? {
        Some(0.0) => Err(ApiError::invalid(
            "top_p",
            "top_p is 0; it must be above 0 and at most 1.",
        )),
        // What 32 bits would round to 0 would mean "off" to a worker.
        checked => Ok(checked.map(|value| value.max(f64::from(f32::MIN_POSITIVE)))),
    }
}

fn logit_bias(
    fields: &CommonFields,
    vocab_size: u32,
) -> Result<std::collections::HashMap<u32, f32>, ApiError> {
    let Some(biases) = &fields.logit_bias else {
        return Ok(std::collections::HashMap::new());
    };
    count("logit_bias", biases.len(), validate::MAX_LOGIT_BIASES)?;
    let checked = biases
        .iter()
        .map(|(token, bias)| {
            let id: i64 = token.parse().map_err(|_| {
                ApiError::invalid(
                    "logit_bias",
                    format!("logit_bias has the key {token:?}; keys are token ids."),
                )
            })?;
            let id = token_id("logit_bias", id, vocab_size)?;
            let bias = number("logit_bias", Some(*bias), &validate::LOGIT_BIAS)?;
            Ok((id, or_default(bias, None, 0.0)))
        })
        .collect::<Result<std::collections::HashMap<_, _>, ApiError>>()?;
    if checked.len() < biases.len() {
        return Err(ApiError::invalid(
            "logit_bias",
            "logit_bias has a token twice, written in two ways.",
        ));
    }
    Ok(checked)
}

fn stop_token_ids(fields: &CommonFields, model: ModelSampling<'_>) -> Result<Vec<u32>, ApiError> {
    let asked = fields.stop_token_ids.as_deref().unwrap_or_default();
    count("stop_token_ids", asked.len(), validate::MAX_STOP_TOKEN_IDS)?;
    let mut ids = token_ids("stop_token_ids", asked, model.vocab_size)?;
    if fields.ignore_eos != Some(true) {
        ids.extend_from_slice(model.eos_token_ids);
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(json: &str) -> Result<SamplingParams, ApiError> {
        let fields: CommonFields = serde_json::from_str(json).unwrap();
        let defaults = GenerationDefaults {
            temperature: Some(0.25),
            top_k: Some(40),
            ..GenerationDefaults::default()
        };
        let model = ModelSampling {
            defaults: &defaults,
            eos_token_ids: &[7, 3],
            vocab_size: 10,
        };
        sampling_params(&fields, model, || 99)
    }

    #[test]
    fn the_least_top_p_is_not_off() {
        assert!(params(r#"{"top_p":1e-60}"#).unwrap().top_p > 0.0);
    }

    #[test]
    fn the_models_defaults_fill_what_is_absent() {
        let absent = params("{}").unwrap();
        assert_eq!((absent.temperature, absent.top_k), (0.25, 40));
        assert_eq!((absent.top_p, absent.repetition_penalty), (1.0, 1.0));
        assert_eq!(absent.seed, 99);
        let given = params(r#"{"temperature":0,"top_k":-1,"seed":-1}"#).unwrap();
        assert_eq!((given.temperature, given.top_k), (0.0, 0));
        assert_eq!(given.seed, u64::MAX);
    }

    #[test]
    fn eos_stops_unless_ignored() {
        let ids = |json| params(json).unwrap().stop_token_ids;
        assert_eq!(ids("{}"), [3, 7]);
        assert_eq!(ids(r#"{"stop_token_ids":[3,1]}"#), [1, 3, 7]);
        assert_eq!(ids(r#"{"stop_token_ids":[1],"ignore_eos":true}"#), [1]);
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        for (json, value) in [
            (r#"{"temperature":-0.1}"#, "-0.1"),
            (r#"{"temperature":2.1}"#, "2.1"),
            (r#"{"top_p":0}"#, "0"),
            (r#"{"top_p":1.01}"#, "1.01"),
            (r#"{"top_k":-2}"#, "-2; it must be at least -1"),
            (r#"{"min_p":1.5}"#, "1.5"),
            (r#"{"presence_penalty":3}"#, "3"),
            (r#"{"frequency_penalty":-3}"#, "-3"),
            (r#"{"repetition_penalty":0}"#, "0"),
            (r#"{"repetition_penalty":1e-38}"#, "0.01"),
            (r#"{"min_tokens":-1}"#, "-1"),
            (r#"{"stop_token_ids":[10]}"#, "10"),
            (r#"{"logit_bias":{"10":1}}"#, "10"),
            (r#"{"logit_bias":{"x":1}}"#, "x"),
            (r#"{"logit_bias":{"1":101}}"#, "101"),
            (r#"{"logit_bias":{"1":1,"01":2}}"#, "twice"),
        ] {
            let name = json.split('"').nth(1).unwrap();
            let error = params(json).unwrap_err();
            let text = error.to_string();
            assert!(text.starts_with(name) && text.contains(value), "{text}");
            assert_eq!(error.body().error.param.as_deref(), Some(name));
        }
    }
}
