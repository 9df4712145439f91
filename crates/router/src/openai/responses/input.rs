//! From `instructions` and `input` to the messages of a chat.

use serde_json::{Map, Value, json};

use super::check::{Place, shown};
use crate::error::ApiError;

const ROLES: [&str; 4] = ["user", "assistant", "system", "developer"];
/// Parts of text, by who said it.
const TEXT_PARTS: [&str; 3] = ["input_text", "output_text", "text"];

/// The messages. What the assistant said between two other messages (reasoning, text, calls) is
/// one message.
///
/// # Errors
/// `Invalid`, with the item, for what is no conversation and for what is not supported.
pub fn messages(instructions: Option<&str>, input: Option<&Value>) -> Result<Vec<Value>, ApiError> {
    let mut messages = Messages::default();
    if let Some(instructions) = instructions {
        messages.push(json!({"role": "system", "content": instructions}));
    }
    match input {
        None | Some(Value::Null) => Err(ApiError::invalid("input", "input is missing.")),
        Some(Value::String(text)) => {
            messages.push(json!({"role": "user", "content": text}));
            Ok(())
        }
        Some(Value::Array(items)) if items.is_empty() => Err(ApiError::invalid(
            "input",
            "input has 0 items; at least 1 is needed.",
        )),
        Some(Value::Array(items)) => {
            let mut items = items.iter().enumerate();
            items.try_for_each(|(at, item)| messages.item(format!("input[{at}]"), item))
        }
        Some(other) => Err(ApiError::invalid(
            "input",
            format!(
                "input is {}; it must be a string or a list of items.",
                shown(other)
            ),
        )),
    }?;
    messages.end_turn();
    Ok(messages.all)
}

/// The messages so far.
#[derive(Default)]
struct Messages {
    all: Vec<Value>,
    /// What the assistant says, until somebody else does.
    turn: Option<Turn>,
}

#[derive(Default)]
struct Turn {
    reasoning: String,
    content: Option<Value>,
    calls: Vec<Value>,
}

impl Messages {
    fn item(&mut self, name: String, item: &Value) -> Result<(), ApiError> {
        let place = Place::of(name, item)?;
        match place.text("type")?.unwrap_or("message") {
            "message" => self.message(&place),
            "reasoning" => self.reasoning(&place),
            "function_call" => self.call(&place),
            "function_call_output" => self.call_output(&place),
            "item_reference" => Err(place.invalid(
                "type",
                "is \"item_reference\", but no items are stored here; send the item itself",
            )),
            other => Err(place.invalid(
                "type",
                &format!(
                    "is {}; it must be \"message\", \"reasoning\", \"function_call\" or \
                     \"function_call_output\"",
                    shown(&other.into())
                ),
            )),
        }
    }

    fn message(&mut self, place: &Place<'_>) -> Result<(), ApiError> {
        place.only(&["type", "id", "role", "content", "status", "phase"])?;
        let role = place.needed("role")?;
        if !ROLES.contains(&role) {
            let says = format!(
                "is {}; it must be \"user\", \"assistant\", \"system\" or \"developer\"",
                shown(&role.into())
            );
            return Err(place.invalid("role", &says));
        }
        let content = content(place, "content")?;
        if role != "assistant" {
            self.push(json!({"role": role, "content": content}));
            return Ok(());
        }
        if self.turn.as_ref().is_some_and(Turn::has_spoken) {
            self.end_turn();
        }
        self.turn.get_or_insert_default().content = Some(content);
        Ok(())
    }

    fn reasoning(&mut self, place: &Place<'_>) -> Result<(), ApiError> {
        // Summaries are of what `content` has in full.
        place.only(&["type", "id", "content", "summary", "status"])?;
        if self.turn.as_ref().is_some_and(Turn::has_spoken) {
            self.end_turn();
        }
        let parts = match place.object.get("content") {
            None | Some(Value::Null) => &[][..],
            Some(Value::Array(parts)) => parts,
            Some(other) => {
                let says = format!("is {}; it must be a list", shown(other));
                return Err(place.invalid("content", &says));
            }
        };
        let turn = self.turn.get_or_insert_default();
        for (at, part) in parts.iter().enumerate() {
            let part = Place::of(format!("{}.content[{at}]", place.name), part)?;
            turn.reasoning
                .push_str(part_text(&part, &["reasoning_text"])?);
        }
        Ok(())
    }

    fn call(&mut self, place: &Place<'_>) -> Result<(), ApiError> {
        place.only(&["type", "id", "call_id", "name", "arguments", "status"])?;
        // Of a call without arguments some servers send an empty text.
        let arguments = place.text("arguments")?;
        let arguments = arguments.ok_or_else(|| place.invalid("arguments", "is missing"))?;
        let call = json!({"id": place.needed("call_id")?, "type": "function", "function": {
            "name": place.needed("name")?, "arguments": arguments}});
        self.turn.get_or_insert_default().calls.push(call);
        Ok(())
    }

    fn call_output(&mut self, place: &Place<'_>) -> Result<(), ApiError> {
        place.only(&["type", "id", "call_id", "output", "status"])?;
        let call_id = place.needed("call_id")?;
        let output = content(place, "output")?;
        self.push(json!({"role": "tool", "tool_call_id": call_id, "content": output}));
        Ok(())
    }

    /// Adds what somebody other than the assistant says.
    fn push(&mut self, message: Value) {
        self.end_turn();
        self.all.push(message);
    }

    fn end_turn(&mut self) {
        self.all.extend(self.turn.take().map(Turn::message));
    }
}

impl Turn {
    /// No reasoning or text of the same message can follow.
    fn has_spoken(&self) -> bool {
        self.content.is_some() || !self.calls.is_empty()
    }

    fn message(self) -> Value {
        let mut message = Map::new();
        message.insert("role".to_owned(), "assistant".into());
        // As in the chats' own answers: null beside calls only.
        let content = match self.content {
            None if self.calls.is_empty() => "".into(),
            content => content.into(),
        };
        message.insert("content".to_owned(), content);
        if !self.reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), self.reasoning.into());
        }
        if !self.calls.is_empty() {
            message.insert("tool_calls".to_owned(), self.calls.into());
        }
        message.into()
    }
}

/// A text, or parts of text, as chats have them.
fn content(place: &Place<'_>, field: &str) -> Result<Value, ApiError> {
    let parts = match place.object.get(field) {
        Some(Value::String(text)) => return Ok(text.as_str().into()),
        Some(Value::Array(parts)) => parts,
        None => return Err(place.invalid(field, "is missing")),
        Some(other) => {
            let says = format!(
                "is {}; it must be a string or a list of parts",
                shown(other)
            );
            return Err(place.invalid(field, &says));
        }
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (at, part) in parts.iter().enumerate() {
        let part = Place::of(format!("{}.{field}[{at}]", place.name), part)?;
        texts.push(part_text(&part, &TEXT_PARTS)?);
    }
    Ok(match &texts[..] {
        [] => "".into(),
        [text] => (*text).into(),
        texts => {
            let parts = texts.iter();
            parts
                .map(|text| json!({"type": "text", "text": text}))
                .collect()
        }
    })
}

/// The text of a part, which is of one of these types.
fn part_text<'a>(part: &Place<'a>, types: &[&str]) -> Result<&'a str, ApiError> {
    let kind = part.needed("type")?;
    if !types.contains(&kind) {
        let says = format!(
            "is {}; only text is supported, as \"{}\"",
            shown(&kind.into()),
            types[0]
        );
        return Err(part.invalid("type", &says));
    }
    part.only(&["type", "text", "annotations", "logprobs"])?;
    let text = part.text("text")?;
    text.ok_or_else(|| part.invalid("text", "is missing"))
}
