//! `POST /v1/completions`.

pub mod echo;
mod shape;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use self::echo::Echo;
use self::shape::CompletionShape;
use crate::app::App;
use crate::error::ApiError;
use crate::openai::answer::outputs::Job;
use crate::openai::fields::{self, Endpoint};
use crate::openai::request::body;
use crate::openai::request::intake::{self, Common, Prepared};
use crate::openai::request::prompt::{Prompt, prompts, refuse_too_many};
use crate::openai::request::types::{CommonFields, CompletionFields};
use crate::openai::request::validate::{self, DefaultOutput, integer, output_tokens};

/// The handler.
pub async fn completions(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let endpoint = intake::Endpoint {
        path: "/v1/completions",
        find_foreign: intake::find_foreign,
        prepare,
    };
    intake::serve(app, request, endpoint).await
}

fn prepare(app: &App, bytes: &[u8]) -> Result<Prepared<CompletionShape>, ApiError> {
    fields::check(Endpoint::Completions, bytes)?;
    let fields: CommonFields = body::parse(bytes)?;
    let completion: CompletionFields = body::parse(bytes)?;
    let mut common = Common::new::<CompletionShape>(app, &fields)?;
    let echo = completion.echo.unwrap_or(false);
    let logprobs = integer("logprobs", completion.logprobs, 0..=validate::MAX_LOGPROBS)?;
    common.bind()?;
    common.sampling.logprobs = logprobs;
    common.sampling.prompt_logprobs = logprobs.filter(|_| echo);
    // None at all only makes sense when the prompt comes back.
    let least = if echo { 0 } else { 1 };
    let requested = validate::requested_tokens(&fields, least)?;
    refuse_suffix(completion.suffix.as_deref())?;

    let prompts = prompts(
        &common.model,
        "prompt",
        completion.prompt,
        completion.add_special_tokens.unwrap_or(true),
        &common.limits,
    )?;
    refuse_too_many(prompts.len(), common.delivery.n)?;
    let several = prompts.len() > 1;
    let jobs = prompts.into_iter().enumerate().map(|(index, prompt)| {
        let index = several.then_some(index);
        job(&common, index, prompt, requested, echo)
    });
    let jobs = jobs.collect::<Result<Vec<_>, _>>()?;
    Ok(Prepared {
        wording: CompletionShape::new(
            Arc::clone(&common.model.text),
            &common.delivery,
            logprobs.is_some(),
        ),
        info: common.info,
        delivery: common.delivery,
        jobs,
        max_tokens_field: requested.0,
        model: common.model,
    })
}

fn job(
    common: &Common,
    index: Option<usize>,
    prompt: Prompt,
    (name, requested): (&'static str, Option<u32>),
    echo: bool,
) -> Result<Job, ApiError> {
    let muted = requested == Some(0);
    let max_tokens = output_tokens(
        name,
        prompt.tokens.len(),
        // Workers generate at least one token; it is kept from the client.
        requested.map(|tokens| tokens.max(1)),
        DefaultOutput::AtMost(validate::DEFAULT_COMPLETION_TOKENS),
        common.limits.max_model_len,
    )?;
    let generation = common.generation(index, "prompt", prompt.tokens, max_tokens)?;
    let echo = echo.then(|| {
        Echo::new(
            &common.model.text,
            Arc::clone(&generation.prompt),
            prompt.given,
            common.sampling.prompt_logprobs.is_some(),
            common.delivery.skip_special_tokens,
        )
    });
    Ok(Job {
        generation,
        echo,
        muted,
        continues_prompt: true,
    })
}

fn refuse_suffix(suffix: Option<&str>) -> Result<(), ApiError> {
    match suffix {
        Some(suffix) if !suffix.is_empty() => Err(ApiError::unsupported(
            "suffix",
            format!("suffix has {} bytes; it is not supported.", suffix.len()),
        )),
        _ => Ok(()),
    }
}
