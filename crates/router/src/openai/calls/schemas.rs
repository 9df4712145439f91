//! Which kinds of values the arguments of a request's tools may be, for models that write them as
//! text.

use std::sync::Arc;

use serde_json::Value;

/// Schemas of one argument that are looked at: a schema may refer to itself.
const MOST_SCHEMAS: usize = 64;

/// The tools of a request, as chats have them.
#[derive(Debug, Clone, Default)]
pub struct Schemas(Arc<[Value]>);

/// A set of kinds of JSON values; none: nothing is known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kinds(u8);

impl Schemas {
    pub fn new(tools: &[Value]) -> Self {
        Self(tools.into())
    }

    /// Those of an argument of a function.
    pub fn kinds(&self, function: &str, argument: &str) -> Kinds {
        let is_it = |tool: &&Value| tool["function"]["name"] == function;
        let Some(tool) = self.0.iter().find(is_it) else {
            return Kinds::default();
        };
        let root = &tool["function"]["parameters"];
        let mut kinds = Kinds::default();
        let mut left = MOST_SCHEMAS;
        kinds.add(&root["properties"][argument], root, &mut left);
        kinds
    }
}

impl Kinds {
    pub const NULL: Self = Self(1);
    pub const BOOLEAN: Self = Self(2);
    pub const INTEGER: Self = Self(4);
    pub const NUMBER: Self = Self(8);
    pub const STRING: Self = Self(16);
    pub const ARRAY: Self = Self(32);
    pub const OBJECT: Self = Self(64);

    pub fn has(self, kind: Self) -> bool {
        self.0 & kind.0 != 0 || (kind == Self::INTEGER && self.has(Self::NUMBER))
    }

    /// Of one value.
    pub fn of_json(json: &str) -> Self {
        match json.as_bytes() {
            [b'n', ..] => Self::NULL,
            [b't' | b'f', ..] => Self::BOOLEAN,
            [b'"', ..] => Self::STRING,
            [b'[', ..] => Self::ARRAY,
            [b'{', ..] => Self::OBJECT,
            number if number.iter().any(|byte| b".eE".contains(byte)) => Self::NUMBER,
            _ => Self::INTEGER,
        }
    }

    /// Adds what a schema allows. `root`: where references point to.
    fn add(&mut self, schema: &Value, root: &Value, left: &mut usize) {
        let Some(rest) = left.checked_sub(1) else {
            return;
        };
        *left = rest;
        let names = match &schema["type"] {
            Value::Array(names) => names.as_slice(),
            one => std::slice::from_ref(one),
        };
        for name in names.iter().filter_map(Value::as_str) {
            self.0 |= match name {
                "null" => Self::NULL.0,
                "boolean" => Self::BOOLEAN.0,
                "integer" => Self::INTEGER.0,
                "number" => Self::NUMBER.0,
                "string" => Self::STRING.0,
                "array" => Self::ARRAY.0,
                "object" => Self::OBJECT.0,
                _ => 0,
            };
        }
        let values = schema["enum"].as_array().into_iter().flatten();
        for value in values.chain(schema.get("const")).take(MOST_SCHEMAS) {
            self.0 |= Self::of_json(&value.to_string()).0;
        }
        for name in ["anyOf", "oneOf", "allOf"] {
            for schema in schema[name].as_array().into_iter().flatten() {
                self.add(schema, root, left);
            }
        }
        let place = schema["$ref"].as_str();
        let place = place.and_then(|place| place.strip_prefix('#'));
        if let Some(schema) = place.and_then(|place| root.pointer(place)) {
            self.add(schema, root, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn has(schema: &Value) -> String {
        let parameters = json!({"properties": {"x": schema},
            "$defs": {"again": {"anyOf": [{"$ref": "#/$defs/again"}, {"$ref": "#/$defs/again"}]},
                "number": {"type": "number"}}});
        let tool = json!({"function": {"name": "f", "parameters": parameters}});
        let kinds = Schemas::new(&[tool]).kinds("f", "x");
        let names = [
            (Kinds::NULL, "null"),
            (Kinds::BOOLEAN, "boolean"),
            (Kinds::INTEGER, "integer"),
            (Kinds::NUMBER, "number"),
            (Kinds::STRING, "string"),
            (Kinds::ARRAY, "array"),
            (Kinds::OBJECT, "object"),
        ];
        let names = names.iter().filter(|(kind, _)| kinds.has(*kind));
        names.map(|(_, name)| *name).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_schema_has_the_kinds_of_all_its_parts() {
        for (schema, kinds) in [
            (json!({"type": "string"}), "string"),
            (json!({"type": ["integer", "null"]}), "null integer"),
            (
                json!({"anyOf": [{"type": "array"}, {"type": "null"}]}),
                "null array",
            ),
            (json!({"$ref": "#/$defs/number"}), "integer number"),
            (json!({"enum": ["a", 1]}), "integer string"),
            (json!({"const": {"a": 1}}), "object"),
            (
                json!({"allOf": [{"oneOf": [{"type": "boolean"}]}]}),
                "boolean",
            ),
            (json!({"$ref": "#/$defs/again"}), ""),
            (json!({"$ref": "https://example.com"}), ""),
            (json!({"type": 7, "enum": 3, "anyOf": {}}), ""),
            (json!(true), ""),
        ] {
            assert_eq!(has(&schema), kinds, "{schema}");
        }
        assert_eq!(Schemas::default().kinds("f", "x"), Kinds::default());
    }
}
