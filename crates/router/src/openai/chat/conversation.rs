//! From a chat's messages to the prompt's tokens, by the model's template.

use chrono::Local;
use serde_json::Value;
use tasuki_text::{ChatInput, Extra, ModelText, TextError};

use super::tools::{ToolChoice, check_type};
use crate::app::App;
use crate::error::ApiError;
use crate::models::Model;
use crate::openai::request::types::TemplateFields;

/// In a template that joins a call's arguments to other text, as DeepSeek's do.
const JOINED_ARGUMENTS: &str = "['arguments'] +";

/// A conversation as the model gets it.
pub struct Conversation {
    pub text: String,
    pub tokens: Vec<u32>,
    /// Tools are offered to the model.
    pub has_tools: bool,
}

/// Renders and tokenizes a conversation. `max_model_len`: refuse early what
/// cannot fit so many tokens.
///
/// # Errors
/// `Invalid` for messages that are no conversation, for what is not
/// supported, and for what the template itself refuses.
pub fn render(
    app: &App,
    model: &Model,
    fields: TemplateFields,
    max_model_len: Option<u32>,
) -> Result<Conversation, ApiError> {
    let text = &model.text;
    let name = fields.names.messages;
    let add_special_tokens = fields.add_special_tokens.unwrap_or(false);
    let continue_final_message = fields.continue_final_message.unwrap_or(false);
    let add_generation_prompt = fields
        .add_generation_prompt
        .unwrap_or(!continue_final_message);
    if continue_final_message && add_generation_prompt {
        return Err(ApiError::invalid(
            "continue_final_message",
            "continue_final_message and add_generation_prompt cannot both be true.",
        ));
    }
    if fields.chat_template.is_some() && !app.settings.allow_chat_template {
        return Err(ApiError::unsupported(
            "chat_template",
            "chat_template is not accepted; the router was not started with \
             --allow-request-chat-template.",
        ));
    }
    let choice = ToolChoice::of(fields.tool_choice.as_ref())?;
    let tools = tools(fields.tools, &choice)?;
    let has_tools = tools.is_some();
    let mut messages = fields.messages.unwrap_or_default();
    check_messages(name, &messages)?;
    let joined = match &fields.chat_template {
        Some(template) => template.contains(JOINED_ARGUMENTS),
        None => text.template_contains(JOINED_ARGUMENTS),
    };
    for message in &mut messages {
        fit_tool_calls(message, joined);
    }
    let mut messages = Value::Array(messages);
    let mut template_kwargs = fields.chat_template_kwargs.unwrap_or_default();
    if let Some(effort) = fields.reasoning_effort {
        let effort = effort.into();
        template_kwargs.entry("reasoning_effort").or_insert(effort);
    }
    if fields.chat_template.is_none() {
        messages = text.fit_content(messages);
    }
    let input = ChatInput {
        messages,
        tools,
        documents: fields.documents,
        add_generation_prompt,
        continue_final_message,
        template_kwargs,
        chat_template_override: fields.chat_template.as_deref(),
        now: Local::now().naive_local(),
    };
    let extras = Extras::of(&input, &choice);
    let rendered = text
        .render_chat(input)
        .map_err(|error| chat_error(name, fields.chat_template.is_some(), &error))?;
    if let Some(max_model_len) = max_model_len {
        model.text_limit.check(name, &rendered, max_model_len)?;
    }
    if let Some(extras) = extras {
        extras.check(text, &rendered)?;
    }
    let tokens = text
        .encode(&rendered, add_special_tokens)
        .map_err(|error| text_error(name, &error))?;
    Ok(Conversation {
        text: rendered,
        tokens,
        has_tools,
    })
}

/// What a chat brings besides messages, which the model must see.
struct Extras<'a> {
    given: Vec<Extra>,
    input: ChatInput<'a>,
}

impl<'a> Extras<'a> {
    /// `None`: nothing. Calls that must be made are bound by a grammar, whatever the model sees.
    fn of(input: &ChatInput<'a>, choice: &ToolChoice) -> Option<Self> {
        let has = |list: &Option<Value>| {
            let list = list.as_ref().and_then(Value::as_array);
            list.is_some_and(|list| !list.is_empty())
        };
        let mut given = Vec::new();
        if has(&input.tools) && *choice == ToolChoice::Auto {
            given.push(Extra::Tools);
        }
        if has(&input.documents) {
            given.push(Extra::Documents);
        }
        (!given.is_empty()).then(|| Self {
            given,
            input: input.clone(),
        })
    }

    /// # Errors
    /// `Invalid` for what the template leaves out of the prompt.
    fn check(self, text: &ModelText, rendered: &str) -> Result<(), ApiError> {
        let unseen = |extra: &Extra| !text.shows(*extra, self.input.clone(), rendered);
        let Some(extra) = self.given.into_iter().find(unseen) else {
            return Ok(());
        };
        let (field, instead) = match extra {
            Extra::Tools => (
                "tools",
                "set tool_choice to \"none\", choose a model whose template shows tools, or, where the \
                 router has a --tool-parser for the model, ask for a call that must be made",
            ),
            Extra::Documents => ("documents", "put their text into a message"),
        };
        Err(ApiError::unsupported(
            field,
            format!(
                "{field} is not supported by this model: its chat template does not show {field} to \
                 it, so the prompt is the same without them; {instead}."
            ),
        ))
    }
}

/// The text layer's error about a chat as an answer. `name`: the field that has the messages;
/// `own_template`: the request brought the template.
fn chat_error(name: &str, own_template: bool, error: &TextError) -> ApiError {
    let at_fault = match (error.field(), error) {
        (Some("messages"), _) => name,
        (Some(field), _) => field,
        (None, TextError::BadTemplate { .. } | TextError::Render(_)) if own_template => {
            "chat_template"
        }
        (None, _) => name,
    };
    text_error(at_fault, error)
}

/// The text layer's error as an answer.
pub fn text_error(param: &str, error: &TextError) -> ApiError {
    if error.is_client_fault() {
        ApiError::invalid(param, error.to_string())
    } else {
        ApiError::Failed(error.to_string())
    }
}

/// The tools that the template is to show.
fn tools(tools: Option<Vec<Value>>, choice: &ToolChoice) -> Result<Option<Value>, ApiError> {
    for (index, tool) in tools.iter().flatten().enumerate() {
        check_type(index, tool)?;
    }
    let tools = tools.filter(|tools| !tools.is_empty()).map(Value::Array);
    Ok(match choice {
        ToolChoice::None => None,
        ToolChoice::Auto | ToolChoice::Required | ToolChoice::Named(_) => tools,
    })
}

/// `name`: the field that has the messages.
fn check_messages(name: &str, messages: &[Value]) -> Result<(), ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid(
            name,
            format!("{name} has 0 items; at least 1 is needed."),
        ));
    }
    for (index, message) in messages.iter().enumerate() {
        let place = format!("{name}[{index}]");
        let Value::Object(message) = message else {
            return Err(ApiError::invalid(
                &place,
                format!("{place} is {}; it must be an object.", kind(message)),
            ));
        };
        match message.get("role") {
            Some(Value::String(role)) if !role.is_empty() => {}
            other => {
                return Err(ApiError::invalid(
                    &format!("{place}.role"),
                    format!(
                        "{place}.role is {}; it must be a string such as \"user\".",
                        other.map_or("missing", kind)
                    ),
                ));
            }
        }
        let content = message.get("content").filter(|content| !content.is_null());
        // Only answers of the model may have calls or reasoning in its place.
        if content.is_none() && message.get("role").is_none_or(|role| role != "assistant") {
            let place = format!("{place}.content");
            let message =
                format!("{place} is missing; it must be a string or a list of text parts.");
            return Err(ApiError::invalid(&place, message));
        }
        check_content(&place, content)?;
    }
    Ok(())
}

fn check_content(place: &str, content: Option<&Value>) -> Result<(), ApiError> {
    let parts = match content {
        None | Some(Value::Null | Value::String(_)) => return Ok(()),
        Some(Value::Array(parts)) => parts,
        Some(other) => {
            return Err(ApiError::invalid(
                &format!("{place}.content"),
                format!(
                    "{place}.content is {}; it must be a string or a list of text parts.",
                    kind(other)
                ),
            ));
        }
    };
    for (index, part) in parts.iter().enumerate() {
        let place = format!("{place}.content[{index}]");
        let part_kind = part.get("type").and_then(Value::as_str);
        if part_kind != Some("text") {
            let found = part_kind.unwrap_or("missing");
            return Err(ApiError::invalid(
                &format!("{place}.type"),
                format!("{place}.type is {found}; only \"text\" is supported."),
            ));
        }
        if !part.get("text").is_some_and(Value::is_string) {
            return Err(ApiError::invalid(
                &format!("{place}.text"),
                format!("{place}.text must be a string."),
            ));
        }
    }
    Ok(())
}

/// Templates want the arguments of past tool calls as objects; OpenAI's
/// clients send them as JSON in a string. `joined`: the template wants that. Some
/// templates ask whether there is a list of calls, not what is in it.
fn fit_tool_calls(message: &mut Value, joined: bool) {
    if let Some(fields) = message.as_object_mut()
        && fields.get("tool_calls") == Some(&Value::Array(Vec::new()))
    {
        fields.remove("tool_calls");
    }
    let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) else {
        return;
    };
    for call in calls {
        let Some(arguments) = call.pointer_mut("/function/arguments") else {
            continue;
        };
        if arguments == "" {
            // Some servers stream a call without arguments so.
            *arguments = "{}".into();
        }
        if joined {
            continue;
        }
        let parsed = arguments.as_str().map(serde_json::from_str);
        if let Some(Ok(parsed @ Value::Object(_))) = parsed {
            *arguments = parsed;
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn refusal(messages: Value) -> String {
        let messages = messages.as_array().unwrap().clone();
        check_messages("messages", &messages)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn refusals_name_the_place_and_what_is_there() {
        for (messages, expected) in [
            (json!([]), "messages has 0 items"),
            (json!(["hi"]), "messages[0] is a string"),
            (json!([{"content": "x"}]), "messages[0].role is missing"),
            (json!([{"role": 3}]), "messages[0].role is a number"),
            (
                json!([{"role": "assistant", "content": null}, {"role": "user"}]),
                "messages[1].content is missing",
            ),
            (
                json!([{"role": "user", "content": 3}]),
                "messages[0].content is a number",
            ),
            (
                json!([{"role": "user", "content": [{"type": "image_url"}]}]),
                "messages[0].content[0].type is image_url",
            ),
        ] {
            let text = refusal(messages);
            assert!(text.starts_with(expected), "{text}");
        }
    }

    #[test]
    fn tool_choice_none_hides_the_tools() {
        let list = || Some(vec![json!({"type": "function"})]);
        let shown = |choice: &ToolChoice| tools(list(), choice).unwrap().is_some();
        assert!(shown(&ToolChoice::Auto));
        assert!(shown(&ToolChoice::Required));
        assert!(!shown(&ToolChoice::None));
    }

    #[test]
    fn arguments_of_tool_calls_become_objects() {
        let mut message = json!({"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "{\"a\": 1}"}},
            {"function": {"name": "g", "arguments": "not json"}},
            {"function": {"name": "h", "arguments": ""}},
        ]});
        fit_tool_calls(&mut message, false);
        let calls = &message["tool_calls"];
        assert_eq!(calls[0]["function"]["arguments"], json!({"a": 1}));
        assert_eq!(calls[1]["function"]["arguments"], "not json");
        assert_eq!(calls[2]["function"]["arguments"], json!({}));
    }

    #[test]
    fn an_empty_list_of_calls_is_none() {
        let mut message = json!({"role": "assistant", "content": "hi", "tool_calls": []});
        fit_tool_calls(&mut message, false);
        assert_eq!(message, json!({"role": "assistant", "content": "hi"}));
    }
}
