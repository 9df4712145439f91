//! `POST /generate`, SGLang's own path, for models of our workers.

mod wording;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde::Deserialize;
use serde_json::value::RawValue;

use self::wording::{AskedLogprobs, GenerateWording};
use crate::app::App;
use crate::error::ApiError;
use crate::openai::answer::outputs::Job;
use crate::openai::fields::{self, Endpoint};
use crate::openai::request::body;
use crate::openai::request::intake::{self, Common, Prepared};
use crate::openai::request::prompt::{Prompt, prompts, refuse_too_many};
use crate::openai::request::types::{CommonFields, OneOrMany, PromptField};
use crate::openai::request::validate::{self, DefaultOutput, integer, output_tokens};

/// SGLang's name of `max_tokens`.
const MAX_TOKENS: &str = "max_new_tokens";

/// The fields of the body.
#[derive(Debug, Default, Deserialize)]
pub struct GenerateFields {
    model: Option<String>,
    text: Option<PromptField>,
    input_ids: Option<PromptField>,
    sampling_params: Option<Box<RawValue>>,
    stream: Option<bool>,
    return_logprob: Option<bool>,
    top_logprobs_num: Option<i64>,
    return_text_in_logprobs: Option<bool>,
    priority: Option<i64>,
    extra_key: Option<String>,
}

/// Those of `sampling_params`.
#[derive(Debug, Default, Deserialize)]
pub struct SamplingFields {
    max_new_tokens: Option<i64>,
    min_new_tokens: Option<i64>,
    n: Option<i64>,
    stop: Option<OneOrMany>,
    stop_token_ids: Option<Vec<i64>>,
    ignore_eos: Option<bool>,
    no_stop_trim: Option<bool>,
    skip_special_tokens: Option<bool>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    min_p: Option<f64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
    logit_bias: Option<std::collections::HashMap<String, f64>>,
    sampling_seed: Option<i64>,
    json_schema: Option<Box<RawValue>>,
    regex: Option<String>,
}

/// The handler.
pub async fn generate(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let endpoint = intake::Endpoint {
        path: "/generate",
        find_foreign: intake::find_sglang,
        prepare,
    };
    intake::serve(app, request, endpoint).await
}

fn prepare(app: &App, bytes: &[u8]) -> Result<Prepared<GenerateWording>, ApiError> {
    fields::check(Endpoint::Generate, bytes)?;
    let fields: GenerateFields = body::parse(bytes)?;
    let sampling = match &fields.sampling_params {
        None => SamplingFields::default(),
        Some(given) if given.get().starts_with('[') => {
            return Err(ApiError::invalid(
                "sampling_params",
                "sampling_params is a list; one object for all prompts is taken.",
            ));
        }
        Some(given) => {
            let bytes = given.get().as_bytes();
            fields::check(Endpoint::SamplingParams, bytes)?;
            body::parse(bytes)?
        }
    };
    let requested = new_tokens(&sampling)?;
    let logprobs = logprobs(&fields)?;
    validate::cache_salt("extra_key", fields.extra_key.as_deref())?;
    let mut common = Common::new::<GenerateWording>(app, &openai_fields(&fields, sampling))?;
    common.bind()?;
    common.sampling.logprobs = logprobs;
    let (name, prompt) = prompt_field(fields.text, fields.input_ids)?;
    let listed = matches!(prompt, PromptField::Texts(_) | PromptField::TokenLists(_));
    let prompts = prompts(&common.model, name, Some(prompt), true, &common.limits)?;
    refuse_too_many(prompts.len(), common.delivery.n)?;
    let jobs = prompts.into_iter().enumerate().map(|(index, prompt)| {
        let index = listed.then_some(index);
        job(&common, index, name, prompt, requested)
    });
    let jobs = jobs.collect::<Result<Vec<_>, _>>()?;
    let wording = GenerateWording::new(
        Arc::clone(&common.model.text),
        jobs.len() * common.delivery.n as usize,
        listed || common.delivery.n > 1,
        logprobs.map(|top| AskedLogprobs {
            top,
            text: fields.return_text_in_logprobs.unwrap_or(false),
        }),
    );
    Ok(Prepared {
        wording,
        info: common.info,
        delivery: common.delivery,
        jobs,
        max_tokens_field: MAX_TOKENS,
        model: common.model,
    })
}

fn job(
    common: &Common,
    index: Option<usize>,
    name: &str,
    prompt: Prompt,
    requested: Option<u32>,
) -> Result<Job, ApiError> {
    let max_tokens = output_tokens(
        MAX_TOKENS,
        prompt.tokens.len(),
        requested,
        DefaultOutput::AtMost(validate::DEFAULT_NEW_TOKENS),
        common.limits.max_model_len,
    )?;
    Ok(Job {
        generation: common.generation(index, name, prompt.tokens, max_tokens)?,
        echo: None,
        muted: false,
        continues_prompt: true,
    })
}

/// The fields under OpenAI's names.
fn openai_fields(fields: &GenerateFields, sampling: SamplingFields) -> CommonFields {
    CommonFields {
        model: fields.model.clone(),
        stream: fields.stream,
        priority: fields.priority,
        cache_salt: fields.extra_key.clone(),
        n: sampling.n,
        min_tokens: sampling.min_new_tokens,
        ignore_eos: sampling.ignore_eos,
        stop: sampling.stop,
        stop_token_ids: sampling.stop_token_ids,
        include_stop_str_in_output: sampling.no_stop_trim,
        skip_special_tokens: sampling.skip_special_tokens,
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        top_k: sampling.top_k,
        min_p: sampling.min_p,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        repetition_penalty: sampling.repetition_penalty,
        logit_bias: sampling.logit_bias,
        seed: sampling.sampling_seed,
        json_schema: sampling.json_schema,
        regex: sampling.regex,
        ..CommonFields::default()
    }
}

/// `max_new_tokens`. That and the least number are checked here, under SGLang's names.
fn new_tokens(sampling: &SamplingFields) -> Result<Option<u32>, ApiError> {
    let most = i64::from(u32::MAX);
    let asked = integer(MAX_TOKENS, sampling.max_new_tokens, 1..=most)?;
    let least = integer("min_new_tokens", sampling.min_new_tokens, 0..=most)?.unwrap_or(0);
    let max = asked.unwrap_or(validate::DEFAULT_NEW_TOKENS);
    if least > max {
        return Err(ApiError::invalid(
            "min_new_tokens",
            format!("min_new_tokens is {least}; max_new_tokens is {max}."),
        ));
    }
    Ok(asked)
}

fn logprobs(fields: &GenerateFields) -> Result<Option<u32>, ApiError> {
    let alternatives = 0..=validate::MAX_LOGPROBS;
    let top = integer("top_logprobs_num", fields.top_logprobs_num, alternatives)?.unwrap_or(0);
    if fields.return_logprob.unwrap_or(false) {
        return Ok(Some(top));
    }
    let needs = |name: &str, value: String| {
        let message = format!("{name} is {value}, which needs return_logprob to be true.");
        Err(ApiError::invalid(name, message))
    };
    if top > 0 {
        return needs("top_logprobs_num", top.to_string());
    }
    if fields.return_text_in_logprobs.unwrap_or(false) {
        return needs("return_text_in_logprobs", "true".to_owned());
    }
    Ok(None)
}

/// The prompts, and the field that has them.
fn prompt_field(
    text: Option<PromptField>,
    input_ids: Option<PromptField>,
) -> Result<(&'static str, PromptField), ApiError> {
    use PromptField::{Text, Texts, TokenLists, Tokens};
    match (text, input_ids) {
        (Some(_), Some(_)) => Err(ApiError::invalid(
            "input_ids",
            "text and input_ids are both given; one of them has the prompt.",
        )),
        (Some(given @ (Text(_) | Texts(_))), None) => Ok(("text", given)),
        (None, Some(given @ (Tokens(_) | TokenLists(_)))) => Ok(("input_ids", given)),
        // An empty list is one of texts.
        (None, Some(Texts(none))) if none.is_empty() => Ok(("input_ids", Tokens(Vec::new()))),
        (Some(_), None) => Err(ApiError::invalid(
            "text",
            "text has token ids; it is a string or a list of strings.",
        )),
        (None, Some(_)) => Err(ApiError::invalid(
            "input_ids",
            "input_ids has text; it is a list of token ids or a list of such lists.",
        )),
        (None, None) => Err(ApiError::invalid("text", "text and input_ids are missing.")),
    }
}
