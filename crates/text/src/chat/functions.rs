//! The functions that transformers and Jinja2 give to every template.

use std::fmt;

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, Value, functions};
use minijinja_contrib::globals::{cycler, joiner};

use super::arguments::Arguments;
use super::python::{pairs, to_str};

/// Adds the functions; `strftime_now` comes with each render.
pub(super) fn register(env: &mut Environment<'_>) {
    env.add_function("raise_exception", raise_exception);
    env.add_function("dict", |args: Rest<ValueOrKwargs>| {
        dict(args).map(Value::from_pairs)
    });
    env.add_function("namespace", |args: Rest<ValueOrKwargs>| {
        let attributes = Value::from_pairs(dict(args)?);
        functions::namespace(Some(attributes.into()))
    });
    env.add_function("cycler", |items: Rest<Value>| cycler(items.to_vec()));
    env.add_function("joiner", joiner);
    env.remove_global("debug");
}

/// What `raise_exception` said, carried through minijinja's errors.
#[derive(Debug)]
pub(super) struct Raised(pub String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let message = to_str(message)?.into_owned();
    Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(message)))
}

/// The items of `dict(...)`: of a mapping or of pairs, then those by keyword.
fn dict(args: Rest<ValueOrKwargs>) -> Result<Vec<(Value, Value)>, Error> {
    let args = Arguments::new(&args.into_values())?;
    let mut items = match args.value(0, "") {
        None => Vec::new(),
        Some(mapping) if mapping.kind() == ValueKind::Map => pairs(&mapping)?,
        Some(list) if !list.is_none() => {
            let pair = |item: Value| Ok((item.get_item_by_index(0)?, item.get_item_by_index(1)?));
            let pairs: Result<Vec<_>, Error> = list.try_iter()?.map(pair).collect();
            pairs?
        }
        Some(_) => {
            let message = "dict() takes a mapping or a list of pairs";
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
    };
    items.extend(args.named()?);
    Ok(items)
}
