//! The arguments of a call, by position or by name, as Python takes them.

use std::borrow::Cow;

use minijinja::value::{Kwargs, from_args};
use minijinja::{Error, ErrorKind, Value};

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
