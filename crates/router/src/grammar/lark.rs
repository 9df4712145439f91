//! Writes the parts of a grammar in llguidance's form of Lark.

use std::fmt::Write as _;

use serde_json::Value;

/// A terminal: any text.
pub const ANY: &str = "/(?s:.*)/";

/// White space where models put it or leave it out. It is bounded: some models never stop it.
pub const GAP_RULE: &str = "GAP: /[ \\t\\r\\n]{1,8}/\n";

/// A mark, as a model writes it: a token of its own, or characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    pub text: &'static str,
    pub token: Option<u32>,
}

impl Mark {
    /// A token is written by its id, since its name may be special in one tokenizer library and
    /// text in another.
    pub fn lark(&self) -> String {
        match self.token {
            Some(id) => format!("<[{id}]>"),
            None => literal(self.text),
        }
    }
}

/// A string.
pub fn literal(text: &str) -> String {
    // JSON's syntax, but no DEL.
    Value::from(text).to_string().replace('\x7f', "\\u007f")
}

/// A regular expression in Rust's syntax, as a terminal.
pub fn regex(pattern: &str) -> String {
    format!("/{}/", llguidance::regex_to_lark(pattern, ""))
}

/// A terminal: text that does not have `mark` in it.
pub fn without(mark: &str) -> String {
    format!("{ANY} & ~({ANY} {} {ANY})", literal(mark))
}

/// A JSON value of a schema.
pub fn json(schema: &Value) -> String {
    format!("%json {schema}")
}

/// Adds a rule.
pub fn rule(rules: &mut String, name: &str, body: &str) {
    let _ = writeln!(rules, "{name}: {body}");
}
