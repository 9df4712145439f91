//! The chat templates of one model, compiled once, and those that clients send.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use chrono::{DateTime, NaiveDateTime};
use minijinja::Value;
use serde_json::{Map, Value as Json, json};

use super::ChatInput;
use super::continuation::Continuation;
use super::convert::{nests_at_most, to_template};
use super::engine::{Author, Template};
use super::input::Extra;
use super::python::MAX_DEPTH;
use super::strftime::strftime;
use crate::TextError;

/// Variables that a request sets by other means than `template_kwargs`.
const RESERVED: [&str; 4] = [MESSAGES, "tools", "documents", "add_generation_prompt"];

const MESSAGES: &str = "messages";

/// The field of a request that has `template_kwargs`.
const ARGUMENTS: &str = "chat_template_kwargs";

/// Compiled templates of clients that are kept.
const MAX_OVERRIDES: usize = 16;

/// Names under which a message may carry its reasoning; the first is standard.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// OpenAI's newer name for who writes the system message.
const DEVELOPER: &str = "developer";

/// A template, or why it cannot be used.
type Compiled = Result<Arc<Template>, (usize, String)>;

/// See the module.
#[derive(Debug)]
pub(crate) struct Templates {
    path: PathBuf,
    named: BTreeMap<String, Compiled>,
    /// Special tokens by name.
    variables: Map<String, Json>,
    /// Whether the default template reads lists of content parts.
    reads_parts: bool,
    /// Least recently used first.
    overrides: Mutex<Vec<Arc<Template>>>,
}

impl Templates {
    pub fn new(
        path: &Path,
        sources: BTreeMap<String, String>,
        variables: Map<String, Json>,
    ) -> Self {
        let named = sources
            .into_iter()
            .map(|(name, source)| (name, compile(&source)))
            .collect();
        let mut templates = Self {
            path: path.to_owned(),
            named,
            variables,
            reads_parts: false,
            overrides: Mutex::new(Vec::new()),
        };
        templates.reads_parts = templates.probe_parts();
        templates
    }

    pub fn is_empty(&self) -> bool {
        self.named.is_empty()
    }

    /// Whether a text is in the source of any template that compiles.
    pub fn contain(&self, text: &str) -> bool {
        let mut compiled = self.named.values().flatten();
        compiled.any(|template| template.source.contains(text))
    }

    pub fn render(&self, input: ChatInput<'_>) -> Result<String, TextError> {
        if input.continue_final_message && input.add_generation_prompt {
            return Err(TextError::bad_chat(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other",
            ));
        }
        let template = self.choose(input.chat_template_override, input.tools.is_some())?;
        self.render_by(&template, input)
    }

    /// Whether `rendered`, the prompt of this chat, would be another one without `extra`. A
    /// template that has no place for it leaves it out without a word.
    pub fn shows(&self, extra: Extra, mut input: ChatInput<'_>, rendered: &str) -> bool {
        let template = self.choose(input.chat_template_override, input.tools.is_some());
        match extra {
            Extra::Tools => input.tools = None,
            Extra::Documents => input.documents = None,
        }
        let without = template.and_then(|template| self.render_by(&template, input));
        // A template that fails without it reads it.
        without.map_or(true, |without| without != rendered)
    }

    /// A template that fails on a message without content, as it joins all to text, gets an empty
    /// text in its place, as vLLM gives it to every template.
    fn render_by(&self, template: &Template, input: ChatInput<'_>) -> Result<String, TextError> {
        let again = filled(&input);
        match (self.render_as_given(template, input), again) {
            (Err(error @ TextError::Render(_)), Some(again)) => {
                self.render_as_given(template, again).map_err(|_| error)
            }
            (rendered, _) => rendered,
        }
    }

    fn render_as_given(
        &self,
        template: &Template,
        input: ChatInput<'_>,
    ) -> Result<String, TextError> {
        let mut messages = normalize(input.messages, asks_for_no_content(&template.source))?;
        if !template.source.contains(DEVELOPER) {
            messages.iter_mut().for_each(call_developer_system);
        }
        let continuation = if input.continue_final_message {
            Some(Continuation::mark(&mut messages, &template.source)?)
        } else {
            None
        };
        let tools = objects("tools", input.tools)?;
        let documents = objects("documents", input.documents)?;
        let mut variables: Vec<(String, Value)> = Vec::new();
        for (name, value) in &self.variables {
            variables.push((name.clone(), to_template(value.clone())));
        }
        variables.push(("strftime_now".to_owned(), strftime_now(input.now)));
        for (name, value) in input.template_kwargs {
            if RESERVED.contains(&name.as_str()) {
                let message = format!("\"{name}\" cannot be set through template arguments");
                return Err(TextError::bad_chat(ARGUMENTS, message));
            }
            variables.push((name, to_shallow(ARGUMENTS, value)?));
        }
        for (name, value) in [
            (MESSAGES, Json::Array(messages)),
            ("tools", tools),
            ("documents", documents),
        ] {
            variables.push((name.to_owned(), to_shallow(name, value)?));
        }
        variables.push((
            "add_generation_prompt".to_owned(),
            input.add_generation_prompt.into(),
        ));
        let rendered = template.render(Value::from_pairs(variables))?;
        match continuation {
            Some(continuation) => continuation.cut(rendered),
            None => Ok(rendered),
        }
    }

    /// Joins text parts unless the default template reads them itself.
    pub fn fit_content(&self, mut messages: Json) -> Json {
        if self.reads_parts {
            return messages;
        }
        for message in messages.as_array_mut().into_iter().flatten() {
            if let Some(content) = message.get_mut("content")
                && let Some(text) = joined_text(content)
            {
                *content = Json::String(text);
            }
        }
        messages
    }

    /// As transformers chooses: by name or text, else "tool_use" when there
    /// are tools, else "default".
    fn choose(&self, asked: Option<&str>, tools: bool) -> Result<Arc<Template>, TextError> {
        let name = match asked {
            Some(text) => match self.named.get(text) {
                Some(_) if self.named.len() > 1 => text,
                _ => return self.compile_override(text),
            },
            None if tools && self.named.contains_key("tool_use") => "tool_use",
            None => "default",
        };
        match self.named.get(name) {
            Some(Ok(template)) => Ok(Arc::clone(template)),
            Some(Err((line, reason))) => Err(TextError::BadTemplate {
                line: *line,
                reason: reason.clone(),
            }),
            None if self.named.is_empty() => Err(TextError::NoTemplate(format!(
                "the model {} has no chat template; use completions, or start with a folder \
                 that has chat_template.jinja",
                self.path.file_name().unwrap_or_default().to_string_lossy()
            ))),
            None => {
                let names: Vec<&str> = self.named.keys().map(String::as_str).collect();
                Err(TextError::NoTemplate(format!(
                    "the model has no default chat template, only: {}",
                    names.join(", ")
                )))
            }
        }
    }

    fn compile_override(&self, text: &str) -> Result<Arc<Template>, TextError> {
        let lock = || {
            self.overrides
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        let mut kept = lock();
        if let Some(at) = kept.iter().position(|template| template.source == text) {
            let template = kept.remove(at);
            kept.push(Arc::clone(&template));
            return Ok(template);
        }
        drop(kept);
        let template = Arc::new(Template::compile(text, Author::Client)?);
        let mut kept = lock();
        if kept.len() >= MAX_OVERRIDES {
            kept.remove(0);
        }
        kept.push(Arc::clone(&template));
        Ok(template)
    }

    /// Renders one message given as parts and looks at what comes out.
    fn probe_parts(&self) -> bool {
        const PROBE: &str = "content-part-probe";
        let content = json!([{"type": "text", "text": PROBE}]);
        let messages = json!([{"role": "user", "content": content}]);
        let input = ChatInput::new(messages, DateTime::UNIX_EPOCH.naive_utc());
        let quoted = [format!("'{PROBE}'"), format!("\"{PROBE}\"")];
        self.render(input).is_ok_and(|text| {
            text.contains(PROBE) && !quoted.iter().any(|quoted| text.contains(quoted))
        })
    }
}

fn compile(source: &str) -> Compiled {
    match Template::compile(source, Author::Model) {
        Ok(template) => Ok(Arc::new(template)),
        Err(TextError::BadTemplate { line, reason }) => Err((line, reason)),
        Err(error) => Err((1, error.to_string())),
    }
}

fn to_shallow(field: &'static str, json: Json) -> Result<Value, TextError> {
    if nests_at_most(&json, MAX_DEPTH / 2) {
        Ok(to_template(json))
    } else {
        let message = format!("{field} nests deeper than {}", MAX_DEPTH / 2);
        Err(TextError::bad_chat(field, message))
    }
}

fn strftime_now(now: NaiveDateTime) -> Value {
    Value::from_function(move |format: &str| strftime(now, format))
}

fn call_developer_system(message: &mut Json) {
    if message.get("role").is_some_and(|role| role == DEVELOPER) {
        message["role"] = json!("system");
    }
}

/// Whether a template asks if a message's content is none. Others would write it out.
fn asks_for_no_content(source: &str) -> bool {
    ["content is ", "content'] is ", "content\"] is "]
        .iter()
        .flat_map(|asks| source.split(asks).skip(1))
        .any(|rest| rest.trim_start_matches("not ").starts_with("none"))
}

/// The same with empty text in messages that have no content; `None`: all have some.
fn filled<'a>(input: &ChatInput<'a>) -> Option<ChatInput<'a>> {
    let lacks = |message: &Json| message.get("content").is_none_or(Json::is_null);
    if !input.messages.as_array()?.iter().any(lacks) {
        return None;
    }
    let mut filled = input.clone();
    for message in filled.messages.as_array_mut()?.iter_mut() {
        if lacks(message) {
            message
                .as_object_mut()?
                .insert("content".to_owned(), json!(""));
        }
    }
    Some(filled)
}

/// Messages as the template gets them: no keys without a value, but for content if
/// `content_is_none`, and reasoning under each of its names.
fn normalize(messages: Json, content_is_none: bool) -> Result<Vec<Json>, TextError> {
    let Json::Array(mut messages) = messages else {
        return Err(TextError::bad_chat(MESSAGES, "messages must be a list"));
    };
    if messages.is_empty() {
        let message = "messages is empty; at least one message is needed";
        return Err(TextError::bad_chat(MESSAGES, message));
    }
    for (index, message) in messages.iter_mut().enumerate() {
        let Json::Object(fields) = message else {
            let message = format!("messages[{index}] must be an object");
            return Err(TextError::bad_chat(MESSAGES, message));
        };
        fields.retain(|_, value| !value.is_null());
        if content_is_none {
            fields.entry("content").or_insert(Json::Null);
        }
        let reasoning = REASONING.iter().find_map(|name| fields.get(*name)).cloned();
        if let Some(reasoning) = reasoning {
            let mut aliased = Map::new();
            aliased.insert("thinking".to_owned(), reasoning.clone());
            aliased.extend(std::mem::take(fields));
            aliased.insert("reasoning_content".to_owned(), reasoning);
            *fields = aliased;
        }
    }
    Ok(messages)
}

/// A list of objects, or null.
fn objects(name: &'static str, value: Option<Json>) -> Result<Json, TextError> {
    match value {
        None | Some(Json::Null) => Ok(Json::Null),
        Some(Json::Array(list)) if list.iter().all(Json::is_object) => Ok(Json::Array(list)),
        Some(_) => Err(TextError::bad_chat(
            name,
            format!("{name} must be a list of objects"),
        )),
    }
}

/// The text of a list that has text parts only.
fn joined_text(content: &Json) -> Option<String> {
    let parts = content.as_array()?;
    let texts: Option<Vec<&str>> = parts
        .iter()
        .map(|part| match part {
            Json::String(text) => Some(text.as_str()),
            Json::Object(part) if part.get("type").is_none_or(|kind| kind == "text") => {
                part.get("text")?.as_str()
            }
            _ => None,
        })
        .collect();
    texts.map(|texts| texts.join("\n"))
}
