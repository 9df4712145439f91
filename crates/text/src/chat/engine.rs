//! One compiled template and the environment that it runs in.

use std::error::Error as _;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

use super::python::to_str;
use super::{filters, methods, source, tests};
use crate::TextError;

/// Steps of the template engine that one render may take. A message takes a
/// few hundred; a second or so passes until these are used up.
const FUEL: u64 = 20_000_000;

const NAME: &str = "chat";

/// A chat template, compiled once and rendered by any number of threads.
pub(super) struct Template {
    environment: Environment<'static>,
    pub source: String,
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Template").finish_non_exhaustive()
    }
}

impl Template {
    pub fn compile(text: &str) -> Result<Self, TextError> {
        let mut environment = environment()?;
        environment
            .add_template_owned(NAME, source::prepare(text))
            .map_err(|error| TextError::BadTemplate {
                line: error.line().unwrap_or(1),
                reason: error.detail().unwrap_or("syntax error").to_owned(),
            })?;
        Ok(Self {
            environment,
            source: text.to_owned(),
        })
    }

    pub fn render(&self, variables: Value) -> Result<String, TextError> {
        let render = || self.environment.get_template(NAME)?.render(variables);
        match catch_unwind(AssertUnwindSafe(render)) {
            Ok(result) => result.map_err(|error| explain(&error)),
            Err(_) => Err(TextError::Render("the template engine gave up".to_owned())),
        }
    }
}

fn environment() -> Result<Environment<'static>, TextError> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    let syntax = syntax.map_err(|error| TextError::Render(error.to_string()))?;
    env.set_syntax(syntax);
    env.set_fuel(Some(FUEL));
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_formatter(|out, _, value| out.write_str(&to_str(value)?).map_err(Error::from));
    env.set_unknown_method_callback(methods::call);
    env.add_function("raise_exception", raise_exception);
    env.remove_global("debug");
    filters::register(&mut env);
    tests::register(&mut env);
    Ok(env)
}

/// What `raise_exception` said, carried through minijinja's errors.
#[derive(Debug)]
struct Raised(String);

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

fn explain(error: &Error) -> TextError {
    let mut source = error.source();
    while let Some(inner) = source {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return TextError::Raised(message.clone());
        }
        source = inner.source();
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return TextError::Render(format!("it takes more than {FUEL} steps"));
    }
    TextError::Render(error.to_string())
}
