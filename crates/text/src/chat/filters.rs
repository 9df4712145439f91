//! Jinja2's filters where minijinja's differ.

use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::arguments::Arguments;
use super::json::tojson;
use super::python::{pairs, strip, to_str};
use super::strings::{capitalize, justify, strip_as};

/// Replaces the differing filters and removes what Jinja2 does not have.
pub(super) fn register(env: &mut Environment<'_>) {
    env.add_filter("tojson", tojson);
    env.add_filter("string", |value: &Value| to_str(value).map(String::from));
    env.add_filter("trim", trim);
    env.add_filter("capitalize", |value: &Value| {
        to_str(value).map(|text| capitalize(&text))
    });
    env.add_filter("length", length);
    env.add_filter("count", length);
    env.add_filter("items", items);
    env.add_filter("first", first);
    env.add_filter("join", join);
    env.add_filter("list", list);
    env.add_filter("default", default);
    env.add_filter("d", default);
    env.add_filter("replace", replace);
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("center", center);
    env.add_filter("wordcount", |value: &Value| {
        to_str(value).map(|text| count_words(&text))
    });
    for name in ["split", "lines", "bool", "chain", "zip"] {
        env.remove_filter(name);
    }
}

fn trim(value: &Value, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let args = Arguments::new(&args.into_values())?;
    let chars = args.optional_text(0, "chars")?;
    Ok(strip_as(&to_str(value)?, "strip", chars.as_deref()))
}

fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    value.len().ok_or_else(|| {
        let message = format!("a value of type {} has no length", value.kind());
        Error::new(ErrorKind::InvalidOperation, message)
    })
}

fn items(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Map => Ok(pairs(value)?.into_iter().map(Value::from).collect()),
        _ => Err(Error::new(
            ErrorKind::InvalidOperation,
            "can only get item pairs from a mapping",
        )),
    }
}

fn first(value: &Value) -> Result<Value, Error> {
    not_none(value)?;
    value
        .try_iter()?
        .checked()
        .next()
        .unwrap_or(Ok(Value::UNDEFINED))
}

fn list(value: &Value) -> Result<Value, Error> {
    not_none(value)?;
    let items: Result<Vec<Value>, Error> = value.try_iter()?.checked().collect();
    items.map(Value::from)
}

fn default(value: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = Arguments::new(&args.into_values())?;
    args.at_most(2)?;
    let also_false = args
        .value(1, "boolean")
        .is_some_and(|value| value.is_true());
    if value.is_undefined() || (also_false && !value.is_true()) {
        return Ok(args
            .value(0, "default_value")
            .unwrap_or_else(|| Value::from("")));
    }
    Ok(value.clone())
}

fn replace(value: &Value, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let args = Arguments::new(&args.into_values())?;
    args.at_most(3)?;
    let text = to_str(value)?;
    let (old, new) = (args.required(0, "old")?, args.required(1, "new")?);
    let (old, new) = (to_str(&old)?, to_str(&new)?);
    let count = args.integer(2, "count")?.map(usize::try_from);
    Ok(match count {
        Some(Ok(count)) => text.replacen(&*old, &new, count),
        Some(Err(_)) | None => text.replace(&*old, &new),
    })
}

fn int(value: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = Arguments::new(&args.into_values())?;
    let base = args.integer(1, "base")?.unwrap_or(10);
    let whole = |float: f64| float.is_finite().then(|| Value::from(float as i128));
    let number = match value.kind() {
        ValueKind::Bool => Some(Value::from(i32::from(value.is_true()))),
        ValueKind::Number if value.is_integer() => Some(value.clone()),
        ValueKind::Number => f64::try_from(value.clone()).ok().and_then(whole),
        ValueKind::String => {
            let text = strip(value.as_str().unwrap_or_default());
            let integer = parse_int(text, u32::try_from(base).unwrap_or(0)).map(Value::from);
            integer.or_else(|| text.parse().ok().and_then(whole))
        }
        _ => None,
    };
    let default = || args.value(0, "default").unwrap_or_else(|| Value::from(0));
    Ok(number.unwrap_or_else(default))
}

/// Python's `int(text, base)`: a sign, the base's prefix, single underscores.
fn parse_int(text: &str, base: u32) -> Option<i128> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let prefixed = match base {
        2 => digits.strip_prefix("0b").or(digits.strip_prefix("0B")),
        8 => digits.strip_prefix("0o").or(digits.strip_prefix("0O")),
        16 => digits.strip_prefix("0x").or(digits.strip_prefix("0X")),
        3..=36 => None,
        _ => return None,
    };
    let digits = prefixed.unwrap_or(digits);
    let misplaced = digits.ends_with('_') || digits.contains("__");
    if misplaced || !digits.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return None;
    }
    let digits = digits.replace('_', "");
    i128::from_str_radix(&digits, base)
        .ok()
        .map(|value| sign * value)
}

fn float(value: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = Arguments::new(&args.into_values())?;
    let number = match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        ValueKind::String => strip(value.as_str().unwrap_or_default()).parse().ok(),
        _ => None,
    };
    let default = || args.value(0, "default").unwrap_or_else(|| Value::from(0.0));
    Ok(number.map_or_else(default, Value::from))
}

fn center(value: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let mut values = args.into_values();
    if values.is_empty() {
        values.push(Value::from(80));
    }
    justify(&to_str(value)?, "center", &Arguments::new(&values)?)
}

fn count_words(text: &str) -> usize {
    let separator = |c: char| !(c.is_alphanumeric() || c == '_');
    text.split(separator)
        .filter(|word| !word.is_empty())
        .count()
}

fn join(
    state: &mut State<'_, '_>,
    value: &Value,
    args: Rest<ValueOrKwargs>,
) -> Result<String, Error> {
    not_none(value)?;
    let args = Arguments::new(&args.into_values())?;
    let separator = args.value(0, "d").unwrap_or_else(|| Value::from(""));
    let separator = to_str(&separator)?;
    let attribute = args.value(1, "attribute").filter(|value| !value.is_none());
    let values = match attribute {
        Some(attribute) => {
            let named = Kwargs::from_iter([("attribute", attribute)]);
            state.apply_filter("map", &[value.clone(), named.into()])?
        }
        None => value.clone(),
    };
    let mut out = String::new();
    for (index, item) in values.try_iter()?.checked().enumerate() {
        if index > 0 {
            out.push_str(&separator);
        }
        out.push_str(&to_str(&item?)?);
    }
    Ok(out)
}

/// minijinja iterates over `none`; Python does not.
fn not_none(value: &Value) -> Result<(), Error> {
    if value.is_none() {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "none is not iterable",
        ));
    }
    Ok(())
}
