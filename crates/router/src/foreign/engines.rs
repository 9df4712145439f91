//! Which engine's workers a request is for, by what only one engine reads: the others ignore fields
//! that they do not know, and would answer without the constraint, or by the base.

use tasuki_core::Identity;

use super::object::Object;
use crate::app::ForeignModel;
use crate::discovery::Engine;
use crate::error::ApiError;
use crate::workers::Catalog;

const GRAMMARS: &str = "use response_format, which both engines read";

/// A field that one engine alone reads, and what to use in its place.
struct Field {
    name: &'static str,
    engine: Engine,
    remedy: &'static str,
}

const fn field(name: &'static str, engine: Engine, remedy: &'static str) -> Field {
    Field {
        name,
        engine,
        remedy,
    }
}

const FIELDS: [Field; 10] = [
    field(
        "lora_path",
        Engine::Sglang,
        "leave it out, and give the adapter's name as the model",
    ),
    field("regex", Engine::Sglang, GRAMMARS),
    field("ebnf", Engine::Sglang, GRAMMARS),
    field("json_schema", Engine::Sglang, GRAMMARS),
    field("structured_outputs", Engine::Vllm, GRAMMARS),
    field("guided_json", Engine::Vllm, GRAMMARS),
    field("guided_regex", Engine::Vllm, GRAMMARS),
    field("guided_choice", Engine::Vllm, GRAMMARS),
    field("guided_grammar", Engine::Vllm, GRAMMARS),
    field("guided_json_object", Engine::Vllm, GRAMMARS),
];

/// The identity of the workers of the one engine that reads all fields of a request; `None`: any
/// engine does.
///
/// # Errors
/// `Invalid`: no worker of this engine serves the model, or no engine reads all fields.
pub fn bound_to(
    body: &Object,
    catalog: &Catalog,
    model: &ForeignModel,
) -> Result<Option<Identity>, ApiError> {
    let mut given = FIELDS.iter().filter(|field| is_given(body, field.name));
    let Some(first) = given.next() else {
        return Ok(None);
    };
    let engine = first.engine;
    if let Some(other) = given.find(|field| field.engine != first.engine) {
        let message = format!(
            "{} is {engine}'s, and {} is {}'s: no engine reads both; leave one out.",
            first.name, other.name, other.engine,
        );
        return Err(ApiError::invalid(other.name, message));
    }
    let identity = catalog.identity(model.id, first.engine).ok_or_else(|| {
        let message = format!(
            "{} is {engine}'s, and no {engine} worker serves {}: {}.",
            first.name,
            model.names.first().map_or("the model", String::as_str),
            first.remedy,
        );
        ApiError::invalid(first.name, message)
    })?;
    Ok(Some(identity))
}

/// Whether a field says something: null, false, and the empty string and list say nothing.
fn is_given(body: &Object, name: &str) -> bool {
    let given = body.get(name).map(|value| value.get().trim());
    given.is_some_and(|text| !matches!(text, "null" | "false" | "\"\"" | "[]"))
}
