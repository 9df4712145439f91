//! Tools and the choice among them, as requests have them.

use serde_json::{Value, json};
use tasuki_flow::Grammar;

use crate::error::ApiError;
use crate::openai::request::types::TemplateFields;

/// Longer names begin no call, see `calls/block.rs`.
const MAX_NAME_BYTES: usize = 128;

/// What `tool_choice` asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model sees no tools.
    None,
    /// The model may call some.
    Auto,
    /// It must call at least one.
    Required,
    /// It must call this one.
    Named(String),
}

/// A tool that a call can be constrained to.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    pub name: String,
    /// The JSON schema of its arguments, which are an object.
    pub parameters: Value,
    /// The field that has the schema.
    pub field: String,
}

/// What an answer's calls must be like.
#[derive(Debug, Clone, PartialEq)]
pub struct BoundCalls {
    /// Those that may be called; never empty.
    pub tools: Vec<Tool>,
    /// The answer is calls and nothing else.
    pub must_call: bool,
    /// More than one call.
    pub parallel: bool,
    /// The field that asks for something of calls; `None`: only an answer without calls is bound.
    pub asked_by: Option<String>,
}

impl ToolChoice {
    /// # Errors
    /// `Invalid` for a value that is no choice.
    pub fn of(choice: Option<&Value>) -> Result<Self, ApiError> {
        let named = |choice: &Value| {
            let name = choice.pointer("/function/name")?.as_str()?;
            (choice.get("type")? == "function").then(|| Self::Named(name.to_owned()))
        };
        match choice {
            None | Some(Value::Null) => Ok(Self::Auto),
            Some(Value::String(choice)) if choice == "auto" => Ok(Self::Auto),
            Some(Value::String(choice)) if choice == "none" => Ok(Self::None),
            Some(Value::String(choice)) if choice == "required" => Ok(Self::Required),
            Some(other) => named(other).ok_or_else(|| {
                let shown: String = other.to_string().chars().take(100).collect();
                ApiError::invalid(
                    "tool_choice",
                    format!(
                        "tool_choice is {shown}; it must be \"none\", \"auto\", \"required\" or \
                         {{\"type\": \"function\", \"function\": {{\"name\": ...}}}}."
                    ),
                )
            }),
        }
    }
}

impl BoundCalls {
    /// `None`: the answer is free to be anything. `parallel`: `parallel_tool_calls`;
    /// `has_constraint`: an answer without calls is not free.
    ///
    /// # Errors
    /// `Invalid` for a choice among tools that are not there, and for tools without a name or with
    /// parameters that are no schema of an object.
    pub fn of(
        fields: &TemplateFields,
        parallel: Option<bool>,
        has_constraint: bool,
    ) -> Result<Option<Self>, ApiError> {
        let choice = ToolChoice::of(fields.tool_choice.as_ref())?;
        let given = fields.tools.as_deref().unwrap_or_default();
        let must_call = matches!(choice, ToolChoice::Required | ToolChoice::Named(_));
        if given.is_empty() || choice == ToolChoice::None {
            return match must_call {
                true => Err(ApiError::invalid(
                    "tool_choice",
                    "tool_choice asks for a call, and tools has 0 items.",
                )),
                false => Ok(None),
            };
        }
        let parallel = parallel.unwrap_or(true);
        let tools = given.iter().enumerate();
        let function = fields.names.function;
        let tools = tools.map(|(at, tool)| {
            check_type(at, tool)?;
            let place = format!("tools[{at}]{function}");
            Tool::of(&place, tool, must_call || is_strict(tool))
        });
        let mut tools = tools.collect::<Result<Vec<_>, _>>()?;
        let strict = given.iter().position(is_strict);
        let asked_by = match (must_call, parallel) {
            (true, _) => Some("tool_choice".to_owned()),
            (false, false) => Some("parallel_tool_calls".to_owned()),
            (false, true) => strict.map(|at| format!("tools[{at}]{function}.strict")),
        };
        if asked_by.is_none() && !has_constraint {
            return Ok(None);
        }
        if let ToolChoice::Named(name) = &choice {
            tools.retain(|tool| tool.name == *name);
            if tools.is_empty() {
                return Err(ApiError::invalid(
                    "tool_choice",
                    format!("tool_choice names {name:?}, which is not in tools."),
                ));
            }
            // As OpenAI's: a named function is called once.
            tools.truncate(1);
        }
        Ok(Some(Self {
            parallel: parallel && !matches!(choice, ToolChoice::Named(_)),
            tools,
            must_call,
            asked_by,
        }))
    }
}

/// # Errors
/// A tool that is no function.
pub fn check_type(at: usize, tool: &Value) -> Result<(), ApiError> {
    let Some(kind) = tool.get("type").filter(|kind| *kind != "function") else {
        return Ok(());
    };
    let place = format!("tools[{at}].type");
    let shown: String = kind.to_string().chars().take(100).collect();
    let message = format!("{place} is {shown}; only \"function\" is supported.");
    Err(ApiError::invalid(&place, message))
}

fn is_strict(tool: &Value) -> bool {
    tool.pointer("/function/strict") == Some(&Value::Bool(true))
}

impl Tool {
    pub fn schema(&self) -> Grammar {
        Grammar::JsonSchema(self.parameters.to_string())
    }

    /// `place`: of the function; `by_schema`: arguments must match the parameters' schema; else
    /// they may be any object.
    fn of(place: &str, tool: &Value, by_schema: bool) -> Result<Self, ApiError> {
        let name = tool.pointer("/function/name").and_then(Value::as_str);
        let name = name.unwrap_or_default();
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-.:/".contains(c);
        if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.chars().all(is_plain) {
            let field = format!("{place}.name");
            let shown: String = name.chars().take(64).collect();
            return Err(ApiError::invalid(
                &field,
                format!(
                    "{field} is {shown:?}; it must have 1 to {MAX_NAME_BYTES} characters of \
                     a-z, A-Z, 0-9 and _-.:/."
                ),
            ));
        }
        if let Some(strict) = tool.pointer("/function/strict")
            && !(strict.is_boolean() || strict.is_null())
        {
            let field = format!("{place}.strict");
            let shown: String = strict.to_string().chars().take(64).collect();
            let message = format!("{field} is {shown}; it must be true or false.");
            return Err(ApiError::invalid(&field, message));
        }
        let field = format!("{place}.parameters");
        let parameters = match tool.pointer("/function/parameters") {
            _ if !by_schema => json!({"type": "object"}),
            None | Some(Value::Null) => json!({"type": "object", "additionalProperties": false}),
            Some(Value::Object(given)) => {
                let mut schema = given.clone();
                let kind = schema.entry("type").or_insert_with(|| "object".into());
                if kind != "object" {
                    let message = format!("{field}.type is {kind}; it must be \"object\".");
                    return Err(ApiError::invalid(&field, message));
                }
                schema.into()
            }
            Some(_) => {
                let message = format!("{field} must be the JSON schema of an object.");
                return Err(ApiError::invalid(&field, message));
            }
        };
        Ok(Self {
            name: name.to_owned(),
            parameters,
            field,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(
        fields: Value,
        parallel: Option<bool>,
        has_constraint: bool,
    ) -> Result<Option<BoundCalls>, String> {
        let fields: TemplateFields = serde_json::from_value(fields).unwrap();
        BoundCalls::of(&fields, parallel, has_constraint).map_err(|error| error.to_string())
    }

    fn names(bound: &BoundCalls) -> Vec<&str> {
        bound.tools.iter().map(|tool| tool.name.as_str()).collect()
    }

    fn named(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name}})
    }

    #[test]
    fn calls_are_bound_where_something_asks_for_it() {
        let tools = || json!([named("f"), named("g")]);
        let free = |fields: Value| bound(fields, None, false).unwrap();
        assert_eq!(free(json!({"tools": tools()})), None);
        assert_eq!(free(json!({"tools": tools(), "tool_choice": "auto"})), None);
        assert_eq!(free(json!({"tools": tools(), "tool_choice": "none"})), None);
        assert_eq!(free(json!({"tools": [], "tool_choice": null})), None);
        let required = free(json!({"tools": tools(), "tool_choice": "required"})).unwrap();
        assert_eq!(names(&required), ["f", "g"]);
        assert!(required.must_call && required.parallel);
        let one = free(json!({"tools": tools(), "tool_choice": named("g")})).unwrap();
        assert_eq!(names(&one), ["g"]);
        assert!(one.must_call && !one.parallel);
        let single = bound(json!({"tools": tools()}), Some(false), false).unwrap();
        let single = single.unwrap();
        assert!(!single.must_call && !single.parallel);
        assert!(
            bound(json!({"tools": tools()}), None, true)
                .unwrap()
                .is_some()
        );
    }

    #[test]
    fn only_strict_tools_have_their_schema_where_calls_are_free() {
        let parameters = json!({"type": "object", "properties": {"a": {"type": "null"}}});
        let tool = |strict: bool| {
            json!({"type": "function", "function": {"name": "f", "parameters": parameters,
                "strict": strict}})
        };
        let fields = json!({"tools": [tool(true), tool(false)]});
        let bound = bound(fields, None, false).unwrap().unwrap();
        assert_eq!(bound.tools[0].parameters, parameters);
        assert_eq!(bound.tools[1].parameters, json!({"type": "object"}));
    }

    #[test]
    fn what_is_no_tool_is_named() {
        let tool = |function: Value| {
            json!({"tools": [{"type": "function", "function": function}],
            "tool_choice": "required"})
        };
        for (fields, says) in [
            (json!({"tool_choice": "required"}), "tools has 0 items"),
            (
                json!({"tool_choice": "any"}),
                "tool_choice is \"any\"; it must be",
            ),
            (json!({"tool_choice": {"type": "function"}}), "it must be"),
            (
                json!({"tools": [named("f")], "tool_choice": named("g")}),
                "names \"g\", which is not in tools",
            ),
            (tool(json!({})), "tools[0].function.name is \"\""),
            (
                tool(json!({"name": "a b"})),
                "tools[0].function.name is \"a b\"",
            ),
            (
                tool(json!({"name": "f", "parameters": {"type": "array"}})),
                "tools[0].function.parameters.type is \"array\"",
            ),
            // However free the answer is.
            (
                json!({"tools": [{"type": "function", "name": "f"}]}),
                "tools[0].function.name is \"\"",
            ),
            (
                json!({"tools": [named("f"), {"type": "function", "function": {"name": "g",
                    "strict": "true"}}]}),
                "tools[1].function.strict is \"true\"; it must be true or false",
            ),
            (
                tool(json!({"name": "f", "parameters": [1]})),
                "tools[0].function.parameters must be",
            ),
        ] {
            let said = bound(fields, None, false).unwrap_err();
            assert!(said.contains(says), "{says:?} is not in {said:?}");
        }
    }
}
