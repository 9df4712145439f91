//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use super::calls::{Asked, Parsers};
use super::chat_shape::ChatShape;
use super::fields::{self, Endpoint};
use super::intake::{self, Common, Prepared};
use super::outputs::Job;
use super::tools::BoundCalls;
use super::types::{ChatFields, CommonFields, TemplateFields};
use super::validate::{DefaultOutput, integer, output_tokens};
use super::{answer_size, body, conversation, limits};
use crate::app::App;
use crate::error::ApiError;
use crate::grammar::{GrammarError, size};

/// The handler.
pub async fn chat_completions(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let endpoint = intake::Endpoint {
        path: "/v1/chat/completions",
        find_foreign: intake::find_foreign,
        prepare,
    };
    intake::serve(app, request, endpoint).await
}

fn prepare(app: &App, bytes: &[u8]) -> Result<Prepared<ChatShape>, ApiError> {
    fields::check(Endpoint::Chat, bytes)?;
    let fields: CommonFields = body::parse(bytes)?;
    let chat: ChatFields = body::parse(bytes)?;
    let template: TemplateFields = body::parse(bytes)?;
    let mut common = Common::new::<ChatShape>(app, &fields)?;
    common.sampling.logprobs = logprobs(&chat)?;
    let requested = requested_tokens(&fields)?;
    common.bind()?;
    let has_constraint = common.constraint.is_some();
    let calls = BoundCalls::of(&template, chat.parallel_tool_calls, has_constraint)?;
    let continues_prompt = template.continue_final_message.unwrap_or(false);

    let conversation = conversation::render(
        app,
        &common.model,
        template,
        Some(common.limits.max_model_len),
    )?;
    let parsers = Parsers::choose(&app.settings, &common.model.text, &conversation);
    if let Some(calls) = &calls {
        check_calls(&common, &parsers, calls)?;
    }
    bind(&mut common, &parsers, calls.as_ref())?;
    common.delivery.kept_special_tokens = parsers.special_tokens(&common.model.text);
    let mut max_tokens = output_tokens(
        conversation.tokens.len(),
        requested,
        DefaultOutput::Fill {
            common_len: common.limits.common_len,
        },
        common.limits.max_model_len,
    )?;
    if requested.is_none() {
        max_tokens = max_tokens.min(answer_size::tokens_that_fit::<ChatShape>(
            &common.delivery,
            common.sampling.logprobs,
            app.settings.max_answer_bytes,
        ));
    }
    let generation = common.generation(None, "messages", conversation.tokens, max_tokens)?;
    Ok(Prepared {
        wording: ChatShape::new(
            Arc::clone(&common.model.text),
            &common.delivery,
            common.sampling.logprobs.is_some(),
            parsers,
        ),
        identity: common.identity,
        delivery: common.delivery,
        jobs: vec![Job {
            generation,
            echo: None,
            muted: false,
            continues_prompt,
        }],
        model: common.model,
    })
}

/// Refuses calls that no grammar can make.
fn check_calls(common: &Common, parsers: &Parsers, calls: &BoundCalls) -> Result<(), ApiError> {
    if calls.must_call && !parsers.knows_calls() {
        return Err(ApiError::invalid(
            "tool_choice",
            "tool_choice asks for a call, but how the model writes calls is not known: its chat \
             template shows none of the forms that --tool-parser has. Use \"auto\" or \"none\".",
        ));
    }
    if let (true, Some(constraint)) = (calls.must_call, &common.constraint) {
        let field = &constraint.field;
        return Err(ApiError::invalid(
            field,
            format!("{field} and tool_choice are both given; an answer can follow only one."),
        ));
    }
    if let (true, Some(constraint)) = (parsers.calls_look_like_json(), &common.constraint) {
        let field = &constraint.field;
        return Err(ApiError::invalid(
            field,
            format!(
                "{field} and tools are both given, but the model writes calls as plain JSON, which \
                 cannot be told from such an answer. Set tool_choice to \"none\" or leave out {field}."
            ),
        ));
    }
    for tool in &calls.tools {
        let checked = size::check(&tool.schema());
        checked.map_err(|error| GrammarError::from(error).answer(&tool.field))?;
    }
    Ok(())
}

/// Sets the grammar of an answer that has reasoning or calls around what is constrained.
fn bind(
    common: &mut Common,
    parsers: &Parsers,
    calls: Option<&BoundCalls>,
) -> Result<(), ApiError> {
    let asked = Asked {
        constraint: common.constraint.as_ref(),
        calls,
    };
    let Some(grammar) = parsers.grammar(&common.model.text, asked) else {
        return Ok(());
    };
    let grammars = &common.model.grammars;
    if let Err(error) = grammars.check(&grammar) {
        // Mostly it is one tool's schema.
        for tool in calls.map_or(&[][..], |calls| &calls.tools) {
            let checked = grammars.check(&tool.schema());
            checked.map_err(|error| error.answer(&tool.field))?;
        }
        let field = common.constraint.as_ref().map_or("tools", |c| &c.field);
        return Err(error.answer(field));
    }
    common.sampling.grammar = Some(grammar);
    Ok(())
}

/// `max_completion_tokens` is the newer name and wins.
fn requested_tokens(fields: &CommonFields) -> Result<Option<u32>, ApiError> {
    let any = 1..=i64::from(u32::MAX);
    let old = integer("max_tokens", fields.max_tokens, any.clone())?;
    let new = integer("max_completion_tokens", fields.max_completion_tokens, any)?;
    Ok(new.or(old))
}

fn logprobs(chat: &ChatFields) -> Result<Option<u32>, ApiError> {
    let top = integer("top_logprobs", chat.top_logprobs, 0..=limits::MAX_LOGPROBS)?;
    match (chat.logprobs.unwrap_or(false), top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(top)) => Err(ApiError::invalid(
            "top_logprobs",
            format!("top_logprobs is {top}, which needs logprobs to be true."),
        )),
    }
}
