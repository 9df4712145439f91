//! How Python writes values: `str`, `repr`, and what counts as whitespace.

use std::borrow::Cow;
use std::fmt::Write;

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Deeper data is refused; Python's own limit is about a thousand.
pub(super) const MAX_DEPTH: usize = 256;

/// `str(value)`; an undefined value has no text.
pub(super) fn to_str(value: &Value) -> Result<Cow<'_, str>, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(Cow::Borrowed("")),
        ValueKind::String => Ok(Cow::Borrowed(value.as_str().unwrap_or_default())),
        _ => {
            let mut out = String::new();
            write_repr(&mut out, value, 0)?;
            Ok(Cow::Owned(out))
        }
    }
}

/// Appends `repr(value)`.
fn write_repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => write_number(out, value),
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default()),
        ValueKind::Map => {
            out.push('{');
            for (index, (key, item)) in pairs(value)?.into_iter().enumerate() {
                out.push_str(if index == 0 { "" } else { ", " });
                write_repr(out, &key, depth + 1)?;
                out.push_str(": ");
                write_repr(out, &item, depth + 1)?;
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let is_tuple = value.downcast_object_ref::<Tuple>().is_some();
            out.push(if is_tuple { '(' } else { '[' });
            let mut length = 0;
            for item in value.try_iter()?.checked() {
                out.push_str(if length == 0 { "" } else { ", " });
                write_repr(out, &item?, depth + 1)?;
                length += 1;
            }
            out.push_str(match (is_tuple, length) {
                (true, 1) => ",)",
                (true, _) => ")",
                (false, _) => "]",
            });
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

/// A mapping's items in order.
pub(super) fn pairs(value: &Value) -> Result<Vec<(Value, Value)>, Error> {
    let Some(object) = value.as_object() else {
        return Ok(Vec::new());
    };
    Ok(object.try_iter_pairs().into_iter().flatten().collect())
}

pub(super) fn too_deep() -> Error {
    let message = format!("data nests deeper than {MAX_DEPTH}");
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Whether the value is a float; Python tells `1` from `1.0`.
pub(super) fn as_float(value: &Value) -> Option<f64> {
    if value.is_number() && !value.is_integer() {
        f64::try_from(value.clone()).ok()
    } else {
        None
    }
}

pub(super) fn write_number(out: &mut String, value: &Value) {
    match as_float(value) {
        Some(float) => write_float(out, float),
        None => {
            let _ = write!(out, "{value}");
        }
    }
}

/// `repr` of a float: the shortest digits that read back the same, with an
/// exponent below 1e-4 and from 1e16 on.
pub(super) fn write_float(out: &mut String, value: f64) {
    if value.is_nan() {
        return out.push_str("nan");
    }
    if value.is_infinite() {
        return out.push_str(if value > 0.0 { "inf" } else { "-inf" });
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let start = out.len();
        let _ = write!(out, "{value}");
        if !out[start..].contains('.') {
            out.push_str(".0");
        }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        let _ = write!(out, "{mantissa}e{sign}{:02}", exponent.abs());
    }
}

/// `repr` of a string: single quotes unless only double quotes avoid escapes.
fn write_string(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for c in text.chars() {
        let code = u32::from(c);
        let _ = match c {
            '\\' => write!(out, "\\\\"),
            '\n' => write!(out, "\\n"),
            '\r' => write!(out, "\\r"),
            '\t' => write!(out, "\\t"),
            c if c == quote => write!(out, "\\{c}"),
            c if is_printable(c) => write!(out, "{c}"),
            _ if code <= 0xFF => write!(out, "\\x{code:02x}"),
            _ if code <= 0xFFFF => write!(out, "\\u{code:04x}"),
            _ => write!(out, "\\U{code:08x}"),
        };
    }
    out.push(quote);
}

/// Python's `str.isprintable` for one character: no control, format, unassigned
/// or separator character but the space.
///
/// Rust's `escape_debug` escapes by the same categories, once the character is
/// not the first (where it escapes combining marks too).
fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    let mut buffer = [b' '; 5];
    let length = c.encode_utf8(&mut buffer[1..]).len();
    let text = std::str::from_utf8(&buffer[..=length]).unwrap_or_default();
    text.escape_debug().nth(1) == Some(c)
}

/// What `str.strip` and `str.split` take for whitespace.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// `str.strip()`.
pub(super) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

#[cfg(test)]
mod unit_tests {
    use super::{is_printable, write_float, write_string};

    fn float(value: f64) -> String {
        let mut out = String::new();
        write_float(&mut out, value);
        out
    }

    #[test]
    fn floats_are_written_as_python_does() {
        let cases = [
            (0.1, "0.1"),
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e-5, "1.5e-05"),
            (0.0001, "0.0001"),
            (1.7976931348623157e308, "1.7976931348623157e+308"),
            (f64::INFINITY, "inf"),
        ];
        for (value, text) in cases {
            assert_eq!(float(value), text);
        }
    }

    #[test]
    fn strings_are_quoted_as_python_does() {
        let repr = |text: &str| {
            let mut out = String::new();
            write_string(&mut out, text);
            out
        };
        assert_eq!(repr("it's"), "\"it's\"");
        assert_eq!(repr("it's \"so\""), "'it\\'s \"so\"'");
        assert_eq!(
            repr("a\u{a0}\u{7f}\u{200d}\u{e000}é\u{301}世"),
            "'a\\xa0\\x7f\\u200d\\ue000é\u{301}世'"
        );
        assert!(is_printable('🙂') && !is_printable('\u{3000}'));
    }
}
