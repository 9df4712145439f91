//! Jinja2's filters where minijinja's differ.

use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::json::tojson;
use super::methods::Arguments;
use super::python::{pairs, to_str};
use super::strings::{capitalize, strip_as};

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
    for name in ["split", "lines", "bool", "chain", "zip"] {
        env.remove_filter(name);
    }
}

fn trim(value: &Value, args: Rest<Value>) -> Result<String, Error> {
    let args = Arguments::new(&args)?;
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

fn join(state: &mut State<'_, '_>, value: &Value, args: Rest<Value>) -> Result<String, Error> {
    not_none(value)?;
    let args = Arguments::new(&args)?;
    let separator = args.value(0, "d").unwrap_or_else(|| Value::from(""));
    let separator = to_str(&separator)?;
    let attribute = args.value(1, "attribute").filter(|value| !value.is_none());
    let values = match attribute {
        Some(attribute) => {
            let named = minijinja::value::Kwargs::from_iter([("attribute", attribute)]);
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
