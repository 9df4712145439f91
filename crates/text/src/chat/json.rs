//! The `tojson` filter: Python's `json.dumps` with transformers' defaults
//! (`ensure_ascii=False`, separators `", "` and `": "`, key order kept).

use std::borrow::Cow;
use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Error, ErrorKind, Value};

use super::python::{MAX_DEPTH, as_float, pairs, too_deep, write_float, write_number};

/// Spaces a level may be indented with; each item of the data pays them.
const MAX_INDENT: usize = 256;

/// `value|tojson(ensure_ascii, indent, separators, sort_keys)`.
pub(super) fn tojson(value: &Value, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let style = Style::from_args(&args.into_values())?;
    let mut out = String::new();
    style.write(&mut out, value, 0)?;
    Ok(out)
}

struct Style {
    ensure_ascii: bool,
    /// What one level is indented with; without it all is one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

impl Style {
    fn from_args(args: &[Value]) -> Result<Self, Error> {
        let (positional, kwargs): (&[Value], Kwargs) = from_args(args)?;
        if positional.len() > 4 {
            return Err(Error::from(ErrorKind::TooManyArguments));
        }
        let argument = |index: usize, name: &str| -> Result<Option<Value>, Error> {
            let value = match positional.get(index) {
                Some(value) => Some(value.clone()),
                None => kwargs.get::<Option<Value>>(name)?,
            };
            Ok(value.filter(|value| !value.is_none()))
        };
        let indent = argument(1, "indent")?
            .map(|value| indentation(&value))
            .transpose()?;
        let (item, key) = match argument(2, "separators")? {
            Some(pair) => separators(&pair)?,
            None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
            None => (", ".to_owned(), ": ".to_owned()),
        };
        let style = Self {
            ensure_ascii: argument(0, "ensure_ascii")?.is_some_and(|value| value.is_true()),
            indent,
            item_separator: item,
            key_separator: key,
            sort_keys: argument(3, "sort_keys")?.is_some_and(|value| value.is_true()),
        };
        kwargs.assert_all_used()?;
        Ok(style)
    }

    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(too_deep());
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => write_json_number(out, value),
            ValueKind::String => self.write_string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                out.push('[');
                let mut length = 0;
                for item in value.try_iter()?.checked() {
                    self.begin_item(out, length == 0, depth + 1);
                    self.write(out, &item?, depth + 1)?;
                    length += 1;
                }
                self.end(out, length == 0, depth);
                out.push(']');
            }
            ValueKind::Map => self.write_map(out, value, depth)?,
            kind => {
                let message = format!("Object of type {kind} is not JSON serializable");
                return Err(Error::new(ErrorKind::BadSerialization, message));
            }
        }
        Ok(())
    }

    fn write_map(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        let mut items = pairs(value)?;
        if self.sort_keys {
            items.sort_by(|a, b| a.0.cmp(&b.0));
        }
        out.push('{');
        for (index, (key, item)) in items.iter().enumerate() {
            self.begin_item(out, index == 0, depth + 1);
            self.write_string(out, &key_text(key)?);
            out.push_str(&self.key_separator);
            self.write(out, item, depth + 1)?;
        }
        self.end(out, items.is_empty(), depth);
        out.push('}');
        Ok(())
    }

    fn begin_item(&self, out: &mut String, first: bool, depth: usize) {
        if !first {
            out.push_str(&self.item_separator);
        }
        self.new_line(out, depth);
    }

    fn end(&self, out: &mut String, empty: bool, depth: usize) {
        if !empty {
            self.new_line(out, depth);
        }
    }

    fn new_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn write_string(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// `indent` may be a number of spaces or the text itself.
fn indentation(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    let spaces = match value.kind() {
        ValueKind::Bool => i64::from(value.is_true()),
        _ => i64::try_from(value.clone())?,
    };
    let spaces = usize::try_from(spaces).unwrap_or(0);
    if spaces > MAX_INDENT {
        let message = format!("indent={spaces}, at most {MAX_INDENT}");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    Ok(" ".repeat(spaces))
}

fn separators(pair: &Value) -> Result<(String, String), Error> {
    let items: Vec<Value> = pair.try_iter()?.collect();
    match items.as_slice() {
        [item, key] if item.as_str().is_some() && key.as_str().is_some() => {
            Ok((item.to_string(), key.to_string()))
        }
        _ => Err(Error::new(
            ErrorKind::InvalidOperation,
            "separators must be a pair of strings",
        )),
    }
}

fn write_json_number(out: &mut String, value: &Value) {
    match as_float(value) {
        Some(float) if float.is_nan() => out.push_str("NaN"),
        Some(float) if float.is_infinite() => {
            out.push_str(if float > 0.0 { "Infinity" } else { "-Infinity" });
        }
        Some(float) => write_float(out, float),
        None => write_number(out, value),
    }
}

fn key_text(key: &Value) -> Result<Cow<'_, str>, Error> {
    let mut text = String::new();
    match key.kind() {
        ValueKind::String => return Ok(Cow::Borrowed(key.as_str().unwrap_or_default())),
        ValueKind::None => text.push_str("null"),
        ValueKind::Bool => text.push_str(if key.is_true() { "true" } else { "false" }),
        ValueKind::Number => write_json_number(&mut text, key),
        kind => {
            let message = format!("keys must be strings or numbers, not {kind}");
            return Err(Error::new(ErrorKind::BadSerialization, message));
        }
    }
    Ok(Cow::Owned(text))
}
