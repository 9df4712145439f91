//! Calls whose arguments are text between tags, as Qwen3-Coder and GLM-4.5 write them: what stands
//! between the marks around a call, and the JSON of it.

use serde_json::Value;
use serde_json::value::RawValue;

use super::format::Call;
use super::schemas::{Kinds, Schemas};

/// What stands before and after a piece of text.
type Around = (&'static str, &'static str);

/// How a family of models writes the inside of a call. Every tag begins with `<`.
#[derive(Debug)]
pub struct Tags {
    /// The function's name; without an end it goes up to the first key.
    pub name: Around,
    pub key: Around,
    pub value: Around,
    /// Behind the last value; empty: nothing is.
    pub end: &'static str,
    /// A line feed at either end of a value is not of it. Models leave out the closing mark at
    /// times: a line that begins with the next key, or the end of the call, then ends the value.
    pub line_feeds: bool,
}

/// Qwen3-Coder, Qwen3.5.
pub static QWEN: Tags = Tags {
    name: ("<function=", ">"),
    key: ("<parameter=", ">"),
    value: ("", "</parameter>"),
    end: "</function>",
    line_feeds: true,
};

/// GLM-4.5 and after.
pub static GLM: Tags = Tags {
    name: ("", ""),
    key: ("<arg_key>", "</arg_key>"),
    value: ("<arg_value>", "</arg_value>"),
    end: "",
    line_feeds: false,
};

impl Tags {
    /// Behind this mark a value begins, or its key: no mark before the value's end counts.
    pub fn value_mark(&self) -> &'static str {
        match self.value.0 {
            "" => self.key.0,
            mark => mark,
        }
    }

    /// The call of what stands between the marks around it; `None`: it is no call.
    pub fn call(&self, body: &str, schemas: &Schemas) -> Option<Call> {
        let rest = body.trim().strip_prefix(self.name.0)?;
        let (name, mut rest) = match self.name.1 {
            "" => rest.split_at(rest.find(self.key.0).unwrap_or(rest.len())),
            end => rest.split_once(end)?,
        };
        let name = word(name)?;
        let mut arguments = String::from("{");
        loop {
            rest = rest.trim_start();
            if rest == self.end {
                break;
            }
            let (key, value);
            (key, rest) = rest.strip_prefix(self.key.0)?.split_once(self.key.1)?;
            if !self.value.0.is_empty() {
                rest = rest.trim_start().strip_prefix(self.value.0)?;
            }
            (value, rest) = self.split_value(rest)?;
            let key = word(key)?;
            if arguments.len() > 1 {
                arguments.push_str(", ");
            }
            arguments.push_str(&Value::from(key).to_string());
            arguments.push_str(": ");
            arguments.push_str(&json(self.text(value), schemas.kinds(name, key)));
        }
        arguments.push('}');
        Some(Call {
            name: name.to_owned(),
            arguments,
        })
    }

    /// A value, and what follows its closing mark, or comes in its place.
    fn split_value<'a>(&self, text: &'a str) -> Option<(&'a str, &'a str)> {
        let closed = text.split_once(self.value.1);
        if !self.line_feeds {
            return closed;
        }
        let within = closed.map_or(text, |(value, _)| value);
        let keys = within.match_indices(self.key.0);
        let mut lines = keys.filter(|(at, _)| within[..*at].ends_with('\n'));
        if let Some((at, _)) = lines.next() {
            return Some(text.split_at(at));
        }
        closed.or_else(|| {
            let value = text.trim_end().strip_suffix(self.end)?;
            value.ends_with('\n').then_some((value, self.end))
        })
    }

    fn text<'a>(&self, value: &'a str) -> &'a str {
        if !self.line_feeds {
            return value;
        }
        let value = value.strip_prefix('\n').unwrap_or(value);
        value.strip_suffix('\n').unwrap_or(value)
    }
}

/// A name: one word, without a mark.
fn word(text: &str) -> Option<&str> {
    let text = text.trim();
    let is_name = |c: char| !c.is_whitespace() && c != '<';
    (!text.is_empty() && text.chars().all(is_name)).then_some(text)
}

/// The JSON of a value, which is JSON or text: of a kind that its schema has, where one fits.
fn json(text: &str, kinds: Kinds) -> String {
    // Templates print what is neither text nor a list or an object as Python does.
    let written = match text.trim() {
        "True" if kinds.has(Kinds::BOOLEAN) => "true",
        "False" if kinds.has(Kinds::BOOLEAN) => "false",
        "None" if kinds.has(Kinds::NULL) => "null",
        other => other,
    };
    let parsed = serde_json::from_str::<&RawValue>(written).ok();
    let parsed = parsed.map(|json| (json.get(), Kinds::of_json(json.get())));
    match parsed {
        Some((json, kind)) if kind != Kinds::STRING && kinds.has(kind) => json.to_owned(),
        Some((json, kind)) if kind != Kinds::STRING && !kinds.has(Kinds::STRING) => json.to_owned(),
        _ => Value::from(text).to_string(),
    }
}
