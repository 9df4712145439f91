//! JSON to template values.

use minijinja::Value;
use serde_json::Value as Json;

/// The same data as the template sees it; the order of keys is kept.
pub(super) fn to_template(json: Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(value),
        Json::Number(number) => {
            if let Some(value) = number.as_i64() {
                Value::from(value)
            } else if let Some(value) = number.as_u64() {
                Value::from(value)
            } else {
                Value::from(number.as_f64().unwrap_or(f64::NAN))
            }
        }
        Json::String(text) => Value::from(text),
        Json::Array(list) => list.into_iter().map(to_template).collect(),
        Json::Object(object) => Value::from_pairs(
            object
                .into_iter()
                .map(|(key, value)| (key, to_template(value))),
        ),
    }
}

/// Whether the data nests at most `limit` deep.
pub(super) fn nests_at_most(json: &Json, limit: usize) -> bool {
    let Some(below) = limit.checked_sub(1) else {
        return false;
    };
    match json {
        Json::Array(list) => list.iter().all(|value| nests_at_most(value, below)),
        Json::Object(object) => object.values().all(|value| nests_at_most(value, below)),
        _ => true,
    }
}
