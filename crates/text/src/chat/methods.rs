//! Python's methods of the built-in types, by name.

use std::borrow::Cow;

use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

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

/// The arguments of a call, to be asked for by position or name.
pub(super) struct Arguments {
    positional: Vec<Value>,
    named: Kwargs,
}

impl Arguments {
    pub fn new(args: &[Value]) -> Result<Self, Error> {
        let (positional, named): (&[Value], Kwargs) = from_args(args)?;
        Ok(Self {
            positional: positional.to_vec(),
            named,
        })
    }

    /// Refuses more arguments than the method takes.
    pub fn at_most(&self, limit: usize) -> Result<(), Error> {
        let given = self.positional.len() + self.named.args().count();
        if given > limit {
            return Err(Error::from(ErrorKind::TooManyArguments));
        }
        Ok(())
    }

    /// The arguments given by position.
    pub fn positional(&self) -> &[Value] {
        &self.positional
    }

    /// The arguments given by name.
    pub fn named(&self) -> Result<Vec<(Value, Value)>, Error> {
        let item = |name: &str| Ok((Value::from(name), self.named.peek(name)?));
        self.named.args().map(item).collect()
    }

    pub fn value(&self, index: usize, name: &str) -> Option<Value> {
        match self.positional.get(index) {
            Some(value) => Some(value.clone()),
            None => self.named.peek::<Value>(name).ok(),
        }
    }

    pub fn required(&self, index: usize, name: &str) -> Result<Value, Error> {
        self.value(index, name)
            .ok_or_else(|| Error::from(ErrorKind::MissingArgument))
    }

    pub fn text(&self, index: usize, name: &str) -> Result<Cow<'static, str>, Error> {
        let value = self.required(index, name)?;
        match value.as_str() {
            Some(text) => Ok(Cow::Owned(text.to_owned())),
            None => {
                let message = format!("{name} must be a string, not {}", value.kind());
                Err(Error::new(ErrorKind::InvalidOperation, message))
            }
        }
    }

    /// `None` counts as not given.
    pub fn optional_text(
        &self,
        index: usize,
        name: &str,
    ) -> Result<Option<Cow<'static, str>>, Error> {
        match self.value(index, name) {
            Some(value) if !value.is_none() => self.text(index, name).map(Some),
            _ => Ok(None),
        }
    }

    /// `None` counts as not given.
    pub fn integer(&self, index: usize, name: &str) -> Result<Option<i64>, Error> {
        match self.value(index, name) {
            Some(value) if !value.is_none() => i64::try_from(value).map(Some),
            _ => Ok(None),
        }
    }
}
