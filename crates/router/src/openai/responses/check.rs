//! Checks of the objects in `input` and `tools`.

use serde_json::{Map, Value};

use crate::app::MAX_QUOTED_CHARS;
use crate::error::ApiError;

/// An object of a request, and its place in it.
pub struct Place<'a> {
    pub name: String,
    pub object: &'a Map<String, Value>,
}

impl<'a> Place<'a> {
    /// # Errors
    /// `Invalid` for a value that is no object.
    pub fn of(name: String, value: &'a Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(object) => Ok(Self { name, object }),
            other => Err(ApiError::invalid(
                &name,
                format!("{name} is {}; it must be an object.", shown(other)),
            )),
        }
    }

    /// The text of a field; `None` where it is missing or null.
    ///
    /// # Errors
    /// `Invalid` for other values.
    pub fn text(&self, field: &str) -> Result<Option<&'a str>, ApiError> {
        match self.object.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => {
                Err(self.invalid(field, &format!("is {}; it must be a string", shown(other))))
            }
        }
    }

    /// The text of a field that must be there.
    ///
    /// # Errors
    /// `Invalid` where there is none, or an empty one.
    pub fn needed(&self, field: &str) -> Result<&'a str, ApiError> {
        match self.text(field)? {
            Some(text) if !text.is_empty() => Ok(text),
            Some(_) => Err(self.invalid(field, "is empty")),
            None => Err(self.invalid(field, "is missing")),
        }
    }

    /// Refuses fields other than these, unless they ask for nothing.
    ///
    /// # Errors
    /// `Invalid`, with the field and its value.
    pub fn only(&self, known: &[&str]) -> Result<(), ApiError> {
        let asks = |value: &Value| !matches!(value, Value::Null | Value::Bool(false));
        let other =
            |(name, value): &(&String, &Value)| !known.contains(&name.as_str()) && asks(value);
        match self.object.iter().find(other) {
            None => Ok(()),
            Some((name, value)) => {
                let name: String = name.chars().take(MAX_QUOTED_CHARS).collect();
                let name = format!("{}.{name}", self.name);
                let shown = shown(value);
                let message = format!("{name} is {shown}, which is not supported; leave it out.");
                Err(ApiError::unsupported(&name, message))
            }
        }
    }

    /// A 400 about a field.
    pub fn invalid(&self, field: &str, says: &str) -> ApiError {
        let name = format!("{}.{field}", self.name);
        ApiError::invalid(&name, format!("{name} {says}."))
    }
}

/// The beginning of a value's JSON.
pub fn shown(value: &Value) -> String {
    let json = value.to_string();
    json.chars().take(MAX_QUOTED_CHARS).collect()
}
