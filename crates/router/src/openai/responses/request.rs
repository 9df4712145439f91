//! From the fields of a response to those of a chat.

use serde_json::json;

use super::check::shown;
use super::object::{Echoed, EchoedReasoning, EchoedText};
use super::types::{FormatField, ReasoningField, ResponseFields, TextField};
use super::{input, tools};
use crate::error::ApiError;
use crate::openai::chat::request::{ChatRequest, RESPONSES};
use crate::openai::request::body;
use crate::openai::request::types::{CommonFields, NamedSchema, ResponseFormat, TemplateFields};
use crate::openai::request::validate::integer;

/// The only `text.verbosity`.
const VERBOSITY: &str = "medium";

/// A chat, and what its answer repeats of the request.
///
/// # Errors
/// `Invalid`, with the field and its value.
pub fn read(bytes: &[u8]) -> Result<(ChatRequest, Echoed), ApiError> {
    let mut common: CommonFields = body::parse(bytes)?;
    let fields: ResponseFields = body::parse(bytes)?;
    let any = 1..=i64::from(u32::MAX);
    let max_tokens = integer(RESPONSES.max_tokens, fields.max_output_tokens, any)?;
    let text = fields.text.unwrap_or_default();
    common.response_format = text.format.as_ref().map(response_format);
    let reasoning = fields.reasoning.unwrap_or_default();
    check_reasoning(&reasoning)?;
    check_verbosity(&text)?;
    let given_tools = fields.tools.unwrap_or_default();
    let messages = input::messages(fields.instructions.as_deref(), fields.input.as_ref())?;
    let template = TemplateFields {
        messages: Some(messages),
        tools: Some(tools::tools(&given_tools)?),
        tool_choice: tools::choice(fields.tool_choice.as_ref())?,
        chat_template_kwargs: fields.chat_template_kwargs,
        reasoning_effort: reasoning.effort.clone(),
        names: RESPONSES,
        ..TemplateFields::default()
    };
    let echoed = Echoed {
        instructions: fields.instructions,
        max_output_tokens: max_tokens,
        metadata: fields.metadata.unwrap_or_default(),
        parallel_tool_calls: fields.parallel_tool_calls.unwrap_or(true),
        reasoning: EchoedReasoning {
            effort: reasoning.effort,
            summary: None,
        },
        text: EchoedText {
            format: text.format.unwrap_or_default(),
            verbosity: VERBOSITY,
        },
        tool_choice: fields.tool_choice.unwrap_or_else(|| json!("auto")),
        tools: tools::echoed(given_tools),
        user: common.user.clone(),
        safety_identifier: fields.safety_identifier,
        prompt_cache_key: fields.prompt_cache_key,
        ..Echoed::default()
    };
    let chat = ChatRequest {
        fields: common,
        template,
        logprobs: None,
        max_tokens,
        parallel_tool_calls: fields.parallel_tool_calls,
    };
    Ok((chat, echoed))
}

fn response_format(format: &FormatField) -> ResponseFormat {
    ResponseFormat {
        kind: format.kind.clone(),
        json_schema: Some(NamedSchema {
            schema: format.schema.clone(),
            ..NamedSchema::default()
        }),
        names: RESPONSES,
    }
}

fn check_verbosity(text: &TextField) -> Result<(), ApiError> {
    match text.verbosity.as_deref() {
        None | Some(VERBOSITY) => Ok(()),
        Some(other) => Err(unsupported(
            "text.verbosity",
            other,
            "say it in instructions, or by chat_template_kwargs",
        )),
    }
}

fn check_reasoning(reasoning: &ReasoningField) -> Result<(), ApiError> {
    let summaries = [
        ("reasoning.summary", &reasoning.summary),
        ("reasoning.generate_summary", &reasoning.generate_summary),
    ];
    for (field, given) in summaries {
        if let Some(given) = given {
            let instead = "Tasuki does not summarize reasoning; leave the field out. Reasoning items \
                           contain the model's own reasoning text";
            return Err(unsupported(field, given, instead));
        }
    }
    Ok(())
}

fn unsupported(field: &str, value: &str, instead: &str) -> ApiError {
    let value = shown(&value.into());
    let message = format!("{field} is {value}, which is not supported: {instead}.");
    ApiError::unsupported(field, message)
}
