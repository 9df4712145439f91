//! From the tools of a response, which are flat, to those of a chat, which have a `function`.

use serde_json::{Map, Value, json};

use super::check::{Place, shown};
use crate::error::ApiError;

/// Tools as chats have them.
///
/// # Errors
/// `Invalid`, with the tool, for what is no function.
pub fn tools(given: &[Value]) -> Result<Vec<Value>, ApiError> {
    let tools = given.iter().enumerate();
    tools.map(|(at, tool)| chat_tool(at, tool)).collect()
}

fn chat_tool(at: usize, tool: &Value) -> Result<Value, ApiError> {
    let place = Place::of(format!("tools[{at}]"), tool)?;
    let kind = place.needed("type")?;
    if kind != "function" {
        let says = format!(
            "is {}; only \"function\" is supported: there are no built-in tools",
            shown(&kind.into())
        );
        return Err(place.invalid("type", &says));
    }
    let fields = ["name", "description", "parameters", "strict"];
    place.only(&[&["type"], &fields[..]].concat())?;
    place.needed("name")?;
    let given = |name: &str| {
        let value = place.object.get(name).filter(|value| !value.is_null())?;
        Some((name.to_owned(), value.clone()))
    };
    let function: Map<String, Value> = fields.into_iter().filter_map(given).collect();
    Ok(json!({"type": "function", "function": function}))
}

/// `tool_choice` as chats have it.
///
/// # Errors
/// `Invalid` for a value that is no choice.
pub fn choice(given: Option<&Value>) -> Result<Option<Value>, ApiError> {
    let Some(given) = given.filter(|given| !given.is_null()) else {
        return Ok(None);
    };
    let named = || {
        let name = given.get("name")?.as_str()?;
        (given.get("type")? == "function" && given.as_object()?.len() == 2).then_some(name)
    };
    match given.as_str() {
        Some("auto" | "none" | "required") => Ok(Some(given.clone())),
        None if named().is_some() => Ok(Some(
            json!({"type": "function", "function": {"name": named()}}),
        )),
        _ => Err(ApiError::invalid(
            "tool_choice",
            format!(
                "tool_choice is {}; it must be \"none\", \"auto\", \"required\" or {{\"type\": \
                 \"function\", \"name\": ...}}.",
                shown(given)
            ),
        )),
    }
}

/// The tools as the answer gives them back: with what was left out.
pub fn echoed(given: Vec<Value>) -> Vec<Value> {
    let whole = |mut tool: Value| {
        if let Value::Object(tool) = &mut tool {
            tool.entry("parameters").or_insert(Value::Null);
            let strict = tool.entry("strict").or_insert(Value::Null);
            if strict.is_null() {
                *strict = false.into();
            }
        }
        tool
    };
    given.into_iter().map(whole).collect()
}
