//! The fields that say what an answer must look like: a JSON schema, a regular expression, one of
//! some strings, a grammar.

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use tasuki_flow::Grammar;

use super::types::{CommonFields, NamedSchema, ResponseFormat, StructuredOutputs};
use super::validate::count;
use crate::error::ApiError;
use crate::grammar::{GrammarError, Grammars, lark, size};

/// White space between the parts of a JSON answer. The bound is ours: some models never stop it.
const WHITESPACE: &str = "[ \\t\\n\\r]{1,32}";
/// The options of a schema that llguidance reads.
const OPTIONS: &str = "x-guidance";
/// One of them.
const WHITESPACE_PATTERN: &str = "whitespace_pattern";

/// What an answer must look like.
#[derive(Debug, Clone, PartialEq)]
pub struct Constraint {
    /// The field that says so.
    pub field: String,
    pub form: Form,
    /// The field that has the white space of its JSON, if another one does.
    pub whitespace: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Form {
    /// JSON of a schema.
    Json(Value),
    /// A match of a regular expression in Rust's syntax.
    Regex(String),
    /// One of these.
    Choice(Vec<String>),
    /// A sentence of a grammar in Lark.
    Lark(String),
}

impl Constraint {
    /// What the fields ask for; `None`: any text.
    ///
    /// # Errors
    /// `Invalid` for two constraints at once, and for values that are none.
    pub fn of(fields: &CommonFields) -> Result<Option<Self>, ApiError> {
        let mut found = Found::default();
        if let Some(format) = &fields.response_format {
            found.take(format.names.format, response_format(format)?);
        }
        found.json("guided_json", fields.guided_json.as_deref())?;
        found.text("guided_regex", fields.guided_regex.as_ref(), Form::Regex)?;
        found.choice("guided_choice", fields.guided_choice.as_ref())?;
        found.text("guided_grammar", fields.guided_grammar.as_ref(), Form::Lark)?;
        found.object("guided_json_object", fields.guided_json_object);
        if let Some(given) = &fields.structured_outputs {
            found.structured(given)?;
        }
        found.json("json_schema", fields.json_schema.as_deref())?;
        found.text("regex", fields.regex.as_ref(), Form::Regex)?;
        let pattern = fields.guided_whitespace_pattern.as_deref();
        let whitespace = Whitespace::new("guided_whitespace_pattern", pattern, false)?;
        found.only(whitespace)
    }

    /// Whether workers can follow it.
    ///
    /// # Errors
    /// `Invalid` with the field and the reason.
    pub fn check(&self, grammars: &Grammars) -> Result<Grammar, ApiError> {
        if let Form::Lark(text) = &self.form {
            let checked = size::check_rules(text);
            checked.map_err(|error| GrammarError::from(error).answer(&self.field))?;
        }
        let grammar = self.form.grammar();
        let checked = grammars.check(&grammar);
        checked.map_err(|error| {
            let of_whitespace = self.whitespace_error(grammars);
            of_whitespace.unwrap_or_else(|| error.answer(&self.field))
        })?;
        Ok(grammar)
    }

    /// Why the white space alone cannot be followed.
    fn whitespace_error(&self, grammars: &Grammars) -> Option<ApiError> {
        let (field, Form::Json(schema)) = (self.whitespace.as_ref()?, &self.form) else {
            return None;
        };
        let pattern = schema.get(OPTIONS)?.get(WHITESPACE_PATTERN)?.as_str()?;
        let checked = grammars.check(&Grammar::Regex(pattern.to_owned()));
        Some(checked.err()?.answer(field))
    }
}

impl Form {
    /// The grammar of an answer that is nothing else.
    fn grammar(&self) -> Grammar {
        match self {
            Self::Json(schema) => Grammar::JsonSchema(schema.to_string()),
            Self::Regex(pattern) => Grammar::Regex(pattern.clone()),
            Self::Lark(text) => Grammar::Lark(text.clone()),
            Self::Choice(_) => {
                let mut rules = String::new();
                self.rule(&mut rules, "start");
                Grammar::Lark(rules)
            }
        }
    }

    /// Adds a rule of this name for it to a grammar in Lark.
    pub fn rule(&self, rules: &mut String, name: &str) {
        let body = match self {
            Self::Json(schema) => lark::json(schema),
            Self::Regex(pattern) => lark::regex(pattern),
            Self::Lark(text) => format!("%lark {{\n{text}\n}}"),
            Self::Choice(choices) => {
                // One terminal: where one choice begins with another, both stay possible.
                let all: Vec<String> = choices.iter().map(|text| lark::literal(text)).collect();
                lark::rule(rules, "CHOICE", &all.join(" | "));
                "CHOICE".to_owned()
            }
        };
        lark::rule(rules, name, &body);
    }
}

/// The JSON of a schema, with the white space that answers may have.
pub fn json_form(mut schema: Value, whitespace: &Value) -> Form {
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    if let Value::Object(members) = &mut schema
        && !members.contains_key(OPTIONS)
    {
        members.insert(OPTIONS.to_owned(), whitespace.clone());
    }
    Form::Json(schema)
}

/// Whether it is a schema with options of its own.
fn has_options(form: &Form) -> bool {
    matches!(form, Form::Json(schema) if schema.get(OPTIONS).is_some())
}

/// The white space of answers that ask for none of their own.
pub fn usual_whitespace() -> Value {
    json!({ WHITESPACE_PATTERN: WHITESPACE })
}

fn response_format(format: &ResponseFormat) -> Result<Option<Form>, ApiError> {
    let field = format.names.format;
    let schema_of = |named: &NamedSchema| named.schema.is_some();
    if format.kind != "json_schema" && format.json_schema.as_ref().is_some_and(schema_of) {
        let place = format.names.schema;
        return Err(ApiError::invalid(
            place,
            format!("{place} is given, which needs {field}.type to be \"json_schema\"."),
        ));
    }
    match format.kind.as_str() {
        "text" => Ok(None),
        "json_object" => Ok(Some(any_object())),
        "json_schema" => {
            let place = format.names.schema;
            let named = format.json_schema.as_ref();
            let Some(given) = named.and_then(|named| named.schema.as_deref()) else {
                return Err(ApiError::invalid(field, format!("{place} is missing.")));
            };
            Ok(Some(Form::Json(schema(field, given)?)))
        }
        other => Err(ApiError::invalid(
            field,
            format!(
                "{field}.type is {:?}; it must be \"text\", \"json_object\" or \
                 \"json_schema\".",
                other.chars().take(64).collect::<String>()
            ),
        )),
    }
}

fn any_object() -> Form {
    Form::Json(json!({"type": "object"}))
}

/// A schema, as JSON or as a string of JSON.
fn schema(field: &str, given: &RawValue) -> Result<Value, ApiError> {
    let invalid = |message: String| ApiError::invalid(field, message);
    let text: String = match serde_json::from_str(given.get()) {
        Ok(Value::String(text)) => text,
        _ => given.get().to_owned(),
    };
    let checked = size::check(&Grammar::JsonSchema(text.clone()));
    checked.map_err(|error| invalid(format!("{field} {error}.")))?;
    let parsed: Value = serde_json::from_str(&text)
        .map_err(|error| invalid(format!("{field} is a string that is no JSON: {error}.")))?;
    match parsed {
        Value::Object(_) | Value::Bool(_) => Ok(parsed),
        _ => Err(invalid(format!(
            "{field} is no JSON schema; a schema is an object or a boolean."
        ))),
    }
}

/// The constraints of a request so far.
#[derive(Default)]
struct Found {
    constraints: Vec<Constraint>,
    whitespace: Option<Whitespace>,
}

impl Found {
    fn take(&mut self, field: &str, form: Option<Form>) {
        self.constraints.extend(form.map(|form| Constraint {
            field: field.to_owned(),
            form,
            whitespace: None,
        }));
    }

    fn json(&mut self, field: &str, given: Option<&RawValue>) -> Result<(), ApiError> {
        let schema = given.map(|given| schema(field, given)).transpose()?;
        self.take(field, schema.map(Form::Json));
        Ok(())
    }

    fn object(&mut self, field: &str, given: Option<bool>) {
        self.take(field, given.unwrap_or(false).then(any_object));
    }

    fn text(
        &mut self,
        field: &str,
        given: Option<&String>,
        form: fn(String) -> Form,
    ) -> Result<(), ApiError> {
        if given.is_some_and(String::is_empty) {
            return Err(ApiError::invalid(field, format!("{field} has 0 bytes.")));
        }
        self.take(field, given.cloned().map(form));
        Ok(())
    }

    fn choice(&mut self, field: &str, given: Option<&Vec<String>>) -> Result<(), ApiError> {
        let Some(choices) = given else {
            return Ok(());
        };
        count(field, choices.len(), size::MAX_CHOICES)?;
        if choices.is_empty() || choices.iter().any(String::is_empty) {
            return Err(ApiError::invalid(
                field,
                format!("{field} must have at least 1 item, and none may be empty."),
            ));
        }
        self.take(field, Some(Form::Choice(choices.clone())));
        Ok(())
    }

    fn structured(&mut self, given: &StructuredOutputs) -> Result<(), ApiError> {
        let before = self.constraints.len();
        let name = |field: &str| format!("structured_outputs.{field}");
        self.json(&name("json"), given.json.as_deref())?;
        self.text(&name("regex"), given.regex.as_ref(), Form::Regex)?;
        self.choice(&name("choice"), given.choice.as_ref())?;
        self.text(&name("grammar"), given.grammar.as_ref(), Form::Lark)?;
        self.object(&name("json_object"), given.json_object);
        for (field, is_given) in [
            ("structural_tag", given.structural_tag.is_some()),
            (
                "disable_additional_properties",
                given.disable_additional_properties == Some(true),
            ),
        ] {
            if is_given {
                let message = "is not supported; write it as a schema or a grammar";
                let field = name(field);
                return Err(ApiError::unsupported(&field, format!("{field} {message}.")));
            }
        }
        if self.constraints.len() == before {
            return Err(ApiError::invalid(
                "structured_outputs",
                "structured_outputs has none of json, regex, choice, grammar and json_object.",
            ));
        }
        self.whitespace = Whitespace::new(
            &name("whitespace_pattern"),
            given.whitespace_pattern.as_deref(),
            given.disable_any_whitespace.unwrap_or(false),
        )?;
        Ok(())
    }

    fn only(mut self, whitespace: Option<Whitespace>) -> Result<Option<Constraint>, ApiError> {
        if let [first, second, ..] = &self.constraints[..] {
            let (first, second) = (&first.field, &second.field);
            return Err(ApiError::invalid(
                second,
                format!("{first} and {second} are both given; an answer can follow only one."),
            ));
        }
        let whitespace = match (whitespace, self.whitespace) {
            (Some(given), Some(_)) => {
                let field = given.field;
                let message =
                    format!("{field} is given, and structured_outputs has white space of its own.");
                return Err(ApiError::invalid(&field, message));
            }
            (given, other) => given.or(other),
        };
        let mut only = self.constraints.pop();
        match (&mut only, whitespace) {
            (Some(only), Some(whitespace)) if has_options(&only.form) => {
                let (field, schema) = (whitespace.field, &only.field);
                let message = format!(
                    "{field} is given, but the schema of {schema} has {OPTIONS}: put it there."
                );
                return Err(ApiError::invalid(&field, message));
            }
            (Some(only), whitespace) if matches!(only.form, Form::Json(_)) => {
                let (field, options) = match whitespace {
                    Some(given) => (Some(given.field), given.options),
                    None => (None, usual_whitespace()),
                };
                only.whitespace = field;
                if let Form::Json(schema) = &mut only.form {
                    only.form = json_form(schema.take(), &options);
                }
            }
            (_, Some(whitespace)) => {
                let field = whitespace.field;
                return Err(ApiError::invalid(
                    &field,
                    format!("{field} is given, but no field asks for JSON."),
                ));
            }
            (_, None) => {}
        }
        Ok(only)
    }
}

/// White space that a request asks for.
struct Whitespace {
    field: String,
    options: Value,
}

impl Whitespace {
    fn new(field: &str, pattern: Option<&str>, none: bool) -> Result<Option<Self>, ApiError> {
        let mut options = Map::new();
        match (pattern, none) {
            (None, false) => return Ok(None),
            (Some(pattern), false) if pattern.len() <= size::MAX_REGEX_BYTES => {
                options.insert(WHITESPACE_PATTERN.to_owned(), pattern.into());
            }
            (None, true) => {
                options.insert("whitespace_flexible".to_owned(), false.into());
            }
            (Some(_), true) => {
                let message = "cannot be given with disable_any_whitespace";
                return Err(ApiError::invalid(field, format!("{field} {message}.")));
            }
            (Some(pattern), false) => {
                let (found, limit) = (pattern.len(), size::MAX_REGEX_BYTES);
                return Err(ApiError::invalid(
                    field,
                    format!("{field} has {found} bytes; the limit is {limit}."),
                ));
            }
        }
        Ok(Some(Self {
            field: field.to_owned(),
            options: options.into(),
        }))
    }
}
