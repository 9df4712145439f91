//! Python's methods of `str`.

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::arguments::Arguments;
use super::limits::check_width;
use super::python::is_space;

/// Calls `text.name(...)`; `None` when there is no such method here.
pub(super) fn call(text: &str, name: &str, args: &Arguments) -> Option<Result<Value, Error>> {
    Some(match name {
        "strip" | "lstrip" | "rstrip" => strip_method(text, name, args),
        "split" | "rsplit" => split(text, args, name == "rsplit"),
        "splitlines" => split_lines(text, args),
        "partition" | "rpartition" => partition(text, args, name == "rpartition"),
        "join" => join(text, args),
        "replace" => replace(text, args),
        "removeprefix" => args
            .text(0, "prefix")
            .map(|p| text.strip_prefix(&*p).unwrap_or(text).into()),
        "removesuffix" => args
            .text(0, "suffix")
            .map(|s| text.strip_suffix(&*s).unwrap_or(text).into()),
        "startswith" => affix(text, args, |text, prefix| text.starts_with(prefix)),
        "endswith" => affix(text, args, |text, suffix| text.ends_with(suffix)),
        "find" | "rfind" | "index" | "rindex" => find(text, name, args),
        "count" => count(text, args),
        "zfill" => zero_fill(text, args),
        "ljust" | "rjust" | "center" => justify(text, name, args),
        "upper" => plain(args, text.to_uppercase()),
        "lower" | "casefold" => plain(args, text.to_lowercase()),
        "title" => plain(args, title(text)),
        "capitalize" => plain(args, capitalize(text)),
        "swapcase" => plain(args, swap_case(text)),
        "isascii" => plain(args, text.is_ascii()),
        "islower" => plain(args, is_lower(text)),
        "isupper" => plain(args, is_upper(text)),
        "istitle" => plain(args, text.chars().any(is_cased) && title(text) == text),
        "isspace" => plain(args, all(text, is_space)),
        "isalpha" => plain(args, all(text, |c| c.is_alphabetic() && !c.is_numeric())),
        "isalnum" => plain(args, all(text, char::is_alphanumeric)),
        "isdecimal" => plain(args, all(text, is_decimal)),
        "isdigit" => plain(args, all(text, |c| is_decimal(c) || is_raised_digit(c))),
        "isnumeric" => plain(args, all(text, char::is_numeric)),
        _ => return None,
    })
}

/// A method without arguments.
fn plain(args: &Arguments, value: impl Into<Value>) -> Result<Value, Error> {
    args.at_most(0).map(|()| value.into())
}

fn all(text: &str, check: impl Fn(char) -> bool) -> bool {
    !text.is_empty() && text.chars().all(check)
}

fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase()
}

/// Some cased character, and all of them lower case.
pub(super) fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)
}

/// Some cased character, and all of them upper case.
pub(super) fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)
}

/// Decimal digits (category Nd) of the Basic Multilingual Plane; each script
/// has ten in a row from its zero on.
fn is_decimal(c: char) -> bool {
    const ZEROS: [u32; 37] = [
        0x30, 0x660, 0x6F0, 0x7C0, 0x966, 0x9E6, 0xA66, 0xAE6, 0xB66, 0xBE6, 0xC66, 0xCE6, 0xD66,
        0xDE6, 0xE50, 0xED0, 0xF20, 0x1040, 0x1090, 0x17E0, 0x1810, 0x1946, 0x19D0, 0x1A80, 0x1A90,
        0x1B50, 0x1BB0, 0x1C40, 0x1C50, 0xA620, 0xA8D0, 0xA900, 0xA9D0, 0xA9F0, 0xAA50, 0xABF0,
        0xFF10,
    ];
    let code = u32::from(c);
    ZEROS.iter().any(|zero| (*zero..zero + 10).contains(&code))
}

fn is_raised_digit(c: char) -> bool {
    matches!(c, '²' | '³' | '¹' | '\u{2070}' | '\u{2074}'..='\u{2079}' | '\u{2080}'..='\u{2089}')
}

fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        if in_word {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        in_word = is_cased(c);
    }
    out
}

pub(super) fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(char::to_uppercase);
    let mut out: String = first.into_iter().flatten().collect();
    out.push_str(&chars.as_str().to_lowercase());
    out
}

fn swap_case(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_uppercase() {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
    }
    out
}

/// `strip`, `lstrip`, `rstrip`, of whitespace or of the given characters.
pub(super) fn strip_as(text: &str, name: &str, chars: Option<&str>) -> String {
    let stripped = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    match name {
        "lstrip" => text.trim_start_matches(stripped).to_owned(),
        "rstrip" => text.trim_end_matches(stripped).to_owned(),
        _ => text.trim_matches(stripped).to_owned(),
    }
}

fn strip_method(text: &str, name: &str, args: &Arguments) -> Result<Value, Error> {
    args.at_most(1)?;
    let chars = args.optional_text(0, "chars")?;
    Ok(strip_as(text, name, chars.as_deref()).into())
}

fn split(text: &str, args: &Arguments, from_right: bool) -> Result<Value, Error> {
    args.at_most(2)?;
    let separator = args.optional_text(0, "sep")?;
    let limit = args.integer(1, "maxsplit")?.unwrap_or(-1);
    let limit = usize::try_from(limit).map_or(usize::MAX, |limit| limit.saturating_add(1));
    let parts: Vec<&str> = match separator.as_deref() {
        Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
        Some(separator) if from_right => reversed(text.rsplitn(limit, separator)),
        Some(separator) => text.splitn(limit, separator).collect(),
        None if from_right => split_spaces_right(text, limit),
        None => split_spaces(text, limit),
    };
    Ok(parts.into_iter().map(Value::from).collect())
}

fn reversed<'a>(parts: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut parts: Vec<&str> = parts.collect();
    parts.reverse();
    parts
}

/// At most `limit` parts; the last keeps its trailing whitespace.
fn split_spaces(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        let end = if parts.len() + 1 == limit {
            None
        } else {
            rest.find(is_space)
        };
        let (part, after) = rest.split_at(end.unwrap_or(rest.len()));
        parts.push(part);
        rest = after.trim_start_matches(is_space);
    }
    parts
}

fn split_spaces_right(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_end_matches(is_space);
    while !rest.is_empty() {
        let space = if parts.len() + 1 == limit {
            None
        } else {
            rest.char_indices().rev().find(|(_, c)| is_space(*c))
        };
        let start = space.map_or(0, |(at, c)| at + c.len_utf8());
        parts.push(&rest[start..]);
        rest = rest[..start].trim_end_matches(is_space);
    }
    parts.reverse();
    parts
}

fn split_lines(text: &str, args: &Arguments) -> Result<Value, Error> {
    args.at_most(1)?;
    let keep_ends = args
        .value(0, "keepends")
        .is_some_and(|value| value.is_true());
    let is_end =
        |c: char| matches!(c, '\n'..='\r' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (line, end) = match rest.find(is_end) {
            Some(at) if rest[at..].starts_with("\r\n") => (at, at + 2),
            Some(at) => (at, at + rest[at..].chars().next().map_or(0, char::len_utf8)),
            None => (rest.len(), rest.len()),
        };
        lines.push(Value::from(&rest[..if keep_ends { end } else { line }]));
        rest = &rest[end..];
    }
    Ok(Value::from(lines))
}

fn partition(text: &str, args: &Arguments, from_right: bool) -> Result<Value, Error> {
    args.at_most(1)?;
    let separator = args.text(0, "sep")?;
    if separator.is_empty() {
        return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
    }
    let found = if from_right {
        text.rsplit_once(&*separator)
    } else {
        text.split_once(&*separator)
    };
    let parts = match found {
        Some((before, after)) => [before, &*separator, after],
        None if from_right => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}

fn join(text: &str, args: &Arguments) -> Result<Value, Error> {
    args.at_most(1)?;
    let mut out = String::new();
    for (index, item) in args
        .required(0, "iterable")?
        .try_iter()?
        .checked()
        .enumerate()
    {
        if index > 0 {
            out.push_str(text);
        }
        let item = item?;
        match item.as_str() {
            Some(item) => out.push_str(item),
            None => {
                let message = format!("sequence item {index}: expected str, {} found", item.kind());
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
    }
    Ok(out.into())
}

fn replace(text: &str, args: &Arguments) -> Result<Value, Error> {
    args.at_most(3)?;
    let (old, new) = (args.text(0, "old")?, args.text(1, "new")?);
    Ok(
        match usize::try_from(args.integer(2, "count")?.unwrap_or(-1)) {
            Ok(count) => text.replacen(&*old, &new, count).into(),
            Err(_) => text.replace(&*old, &new).into(),
        },
    )
}

/// The part of `text` between the character positions that arguments 1 and 2
/// give as Python slices do, and where it starts.
fn range<'a>(text: &'a str, args: &Arguments) -> Result<Option<(usize, &'a str)>, Error> {
    args.at_most(3)?;
    let (start, end) = (args.integer(1, "start")?, args.integer(2, "end")?);
    if start.is_none() && end.is_none() {
        return Ok(Some((0, text)));
    }
    let length = i64::try_from(text.chars().count()).unwrap_or(i64::MAX);
    let absolute = |at: i64| {
        if at < 0 {
            (at.saturating_add(length)).max(0)
        } else {
            at
        }
    };
    let start = absolute(start.unwrap_or(0));
    let end = absolute(end.unwrap_or(length)).min(length);
    if start > end {
        return Ok(None);
    }
    let byte = |at: i64| {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        text.char_indices()
            .nth(at)
            .map_or(text.len(), |(byte, _)| byte)
    };
    Ok(Some((
        usize::try_from(start).unwrap_or(0),
        &text[byte(start)..byte(end)],
    )))
}

fn affix(text: &str, args: &Arguments, check: fn(&str, &str) -> bool) -> Result<Value, Error> {
    let Some((_, text)) = range(text, args)? else {
        return Ok(Value::from(false));
    };
    let affix = args.required(0, "prefix")?;
    if let Some(affix) = affix.as_str() {
        return Ok(check(text, affix).into());
    }
    if affix.downcast_object_ref::<Tuple>().is_some() {
        for affix in affix.try_iter()? {
            let affix = affix.as_str().ok_or_else(|| not_a_string(affix.kind()))?;
            if check(text, affix) {
                return Ok(true.into());
            }
        }
        return Ok(false.into());
    }
    Err(not_a_string(affix.kind()))
}

fn not_a_string(kind: ValueKind) -> Error {
    let message = format!("expected a string or a tuple of strings, not {kind}");
    Error::new(ErrorKind::InvalidOperation, message)
}

fn find(text: &str, name: &str, args: &Arguments) -> Result<Value, Error> {
    let what = args.text(0, "sub")?;
    let found = range(text, args)?.and_then(|(start, text)| {
        let at = if name.starts_with('r') {
            text.rfind(&*what)
        } else {
            text.find(&*what)
        };
        at.map(|at| start + text[..at].chars().count())
    });
    match found {
        Some(at) => Ok(Value::from(at)),
        None if name.ends_with("find") => Ok(Value::from(-1)),
        None => Err(Error::new(
            ErrorKind::InvalidOperation,
            "substring not found",
        )),
    }
}

fn count(text: &str, args: &Arguments) -> Result<Value, Error> {
    let what = args.text(0, "sub")?;
    let text = range(text, args)?.map(|(_, text)| text);
    Ok(Value::from(
        text.map_or(0, |text| text.matches(&*what).count()),
    ))
}

fn width(args: &Arguments) -> Result<usize, Error> {
    let width = args.integer(0, "width")?;
    let width = width.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
    check_width(usize::try_from(width).unwrap_or(0))
}

fn zero_fill(text: &str, args: &Arguments) -> Result<Value, Error> {
    args.at_most(1)?;
    let missing = width(args)?.saturating_sub(text.chars().count());
    let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
    Ok(format!("{sign}{}{digits}", "0".repeat(missing)).into())
}

/// `ljust`, `rjust` or `center`.
pub(super) fn justify(text: &str, name: &str, args: &Arguments) -> Result<Value, Error> {
    args.at_most(2)?;
    let fill = args.optional_text(1, "fillchar")?;
    let fill = fill.as_deref().unwrap_or(" ");
    if fill.chars().count() != 1 {
        let message = "the fill character must be exactly one character long";
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    let width = width(args)?;
    let missing = width.saturating_sub(text.chars().count());
    let left = match name {
        "ljust" => 0,
        "rjust" => missing,
        // CPython puts the odd space left when both it and the width are odd.
        _ => missing / 2 + (missing & width & 1),
    };
    Ok(format!("{}{text}{}", fill.repeat(left), fill.repeat(missing - left)).into())
}

#[cfg(test)]
mod unit_tests {
    use super::{split_spaces, split_spaces_right};

    #[test]
    fn splitting_at_spaces_keeps_the_rest() {
        assert_eq!(split_spaces(" a  b  c ", usize::MAX), ["a", "b", "c"]);
        assert_eq!(split_spaces(" a  b  c ", 2), ["a", "b  c "]);
        assert_eq!(split_spaces_right(" a  b  c ", 2), [" a  b", "c"]);
        assert!(split_spaces("  ", 3).is_empty());
    }
}
