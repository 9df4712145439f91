//! Python's methods of the built-in types, by name.

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::arguments::Arguments;
use super::limits::check_format;
use super::python::pairs;
use super::strings;

/// Methods that change their object; transformers' sandbox forbids them.
const MUTATING: [&str; 14] = [
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
    "add",
    "discard",
    "difference_update",
];

/// What minijinja calls for a method that a value does not have by itself.
pub(super) fn call(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let arguments = Arguments::new(args)?;
    let result = match value.kind() {
        ValueKind::String => strings::call(value.as_str().unwrap_or_default(), name, &arguments),
        ValueKind::Map => call_dict(value, name, &arguments),
        ValueKind::Seq | ValueKind::Iterable => call_list(value, name, &arguments),
        _ => None,
    };
    match result {
        Some(result) => result,
        // `str.format` and whatever else is known there.
        None => {
            if let (Some(text), "format") = (value.as_str(), name) {
                check_format(text)?;
            }
            minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
        }
    }
}

fn call_dict(dict: &Value, name: &str, args: &Arguments) -> Option<Result<Value, Error>> {
    let limit = usize::from(name == "get") * 2;
    let list = |pick: fn((Value, Value)) -> Value| {
        args.at_most(limit)?;
        Ok(pairs(dict)?.into_iter().map(pick).collect())
    };
    Some(match name {
        "items" => list(|(key, value)| Value::from(Tuple::from([key, value]))),
        "keys" => list(|(key, _)| key),
        "values" => list(|(_, value)| value),
        "copy" => args.at_most(limit).map(|()| dict.clone()),
        "get" => args.at_most(limit).and_then(|()| {
            let key = args.required(0, "key")?;
            let found = dict.as_object().and_then(|dict| dict.get_value(&key));
            Ok(found.unwrap_or_else(|| args.value(1, "default").unwrap_or(Value::from(()))))
        }),
        _ if MUTATING.contains(&name) => Err(immutable(name)),
        _ => return None,
    })
}

fn call_list(list: &Value, name: &str, args: &Arguments) -> Option<Result<Value, Error>> {
    let positions = |args: &Arguments| -> Result<Vec<usize>, Error> {
        let what = args.required(0, "value")?;
        let mut found = Vec::new();
        for (index, item) in list.try_iter()?.checked().enumerate() {
            if item? == what {
                found.push(index);
            }
        }
        Ok(found)
    };
    Some(match name {
        "count" => positions(args).map(|found| Value::from(found.len())),
        "index" => positions(args).and_then(|found| match found.first() {
            Some(index) => Ok(Value::from(*index)),
            None => Err(Error::new(
                ErrorKind::InvalidOperation,
                "value is not in list",
            )),
        }),
        "copy" => args.at_most(0).map(|()| list.clone()),
        _ if MUTATING.contains(&name) => Err(immutable(name)),
        _ => return None,
    })
}

fn immutable(name: &str) -> Error {
    let message = format!("'{name}' would change a value, which templates may not");
    Error::new(ErrorKind::InvalidOperation, message)
}
