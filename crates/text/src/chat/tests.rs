//! Jinja2's tests (`x is iterable`) where minijinja's differ.

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, Value};

use super::arguments::Arguments;
use super::python::{as_float, to_str};

/// Replaces the differing tests.
pub(super) fn register(env: &mut Environment<'_>) {
    env.add_test("iterable", |value: &Value| {
        !value.is_none() && value.try_iter().is_ok()
    });
    env.add_test("sequence", is_sequence);
    env.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
    env.add_test("divisibleby", is_divisible_by);
    env.add_test("lower", |value: &Value| {
        Ok::<_, Error>(super::strings::is_lower(&to_str(value)?))
    });
    env.add_test("upper", |value: &Value| {
        Ok::<_, Error>(super::strings::is_upper(&to_str(value)?))
    });
    env.remove_test("startingwith");
    env.remove_test("endingwith");
    env.remove_test("safe");
    env.remove_test("int");
}

/// Has a length and can be indexed: strings and mappings as well.
fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::String | ValueKind::Map | ValueKind::Seq | ValueKind::Undefined
    ) || (value.kind() == ValueKind::Iterable && value.len().is_some())
}

fn is_divisible_by(value: &Value, args: Rest<ValueOrKwargs>) -> Result<bool, Error> {
    let divisor = Arguments::new(&args.into_values())?.required(0, "num")?;
    let by_zero = || Error::new(ErrorKind::InvalidOperation, "modulo by zero");
    if as_float(value).is_some() || as_float(&divisor).is_some() {
        let (a, b) = (f64::try_from(value.clone())?, f64::try_from(divisor)?);
        return if b == 0.0 {
            Err(by_zero())
        } else {
            Ok(a % b == 0.0)
        };
    }
    let (a, b) = (i128::try_from(value.clone())?, i128::try_from(divisor)?);
    if b == 0 {
        return Err(by_zero());
    }
    Ok(a.wrapping_rem(b) == 0)
}
