//! Bounds on what a single call may ask for.
//!
//! Steps are counted by the engine's fuel, but one step can pad a string to any
//! width; minijinja would abort the process when memory runs out.

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};

use super::arguments::Arguments;

/// Longest padding, in characters or items.
pub(super) const MAX_WIDTH: usize = 1 << 20;

/// Guards minijinja's own filters that take a size.
pub(super) fn register(env: &mut Environment<'_>) {
    guard(env, "indent", Value::from_function(filters::indent));
    guard(env, "batch", Value::from_function(filters::batch));
    guard(env, "slice", Value::from_function(filters::slice));
    guard(env, "format", Value::from_function(filters::format));
}

fn guard(env: &mut Environment<'_>, name: &'static str, filter: Value) {
    let guarded = move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
        let args = args.into_values();
        if name == "format" {
            check_format(args.first().and_then(Value::as_str).unwrap_or_default())?;
        } else {
            check_sizes(args.get(1..).unwrap_or_default())?;
        }
        filter.call(state, &args)
    };
    env.add_filter(name, guarded);
}

/// Refuses a width beyond [`MAX_WIDTH`].
pub(super) fn check_width(width: usize) -> Result<usize, Error> {
    if width > MAX_WIDTH {
        let message = format!("a width of {width}, at most {MAX_WIDTH}");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    Ok(width)
}

fn check_sizes(args: &[Value]) -> Result<(), Error> {
    let args = Arguments::new(args)?;
    let named = args.named()?.into_iter().map(|(_, value)| value);
    for value in args.positional().iter().cloned().chain(named) {
        if value.kind() == ValueKind::Number {
            check_width(usize::try_from(value).unwrap_or(0))?;
        }
    }
    Ok(())
}

/// Refuses format strings with a large width or precision, or one that is an
/// argument itself.
pub(super) fn check_format(format: &str) -> Result<(), Error> {
    if format.contains('*') && format.contains('%') {
        let message = "a format may not take its width from an argument";
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    for digits in format.split(|c: char| !c.is_ascii_digit()) {
        if !digits.is_empty() {
            check_width(digits.parse().unwrap_or(usize::MAX))?;
        }
    }
    Ok(())
}
