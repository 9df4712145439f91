//! One compiled template and the environment that it runs in.

use std::error::Error as _;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

use super::functions::Raised;
use super::python::to_str;
use super::{filters, functions, limits, methods, source, tests};
use crate::TextError;

/// Who wrote a template, which decides how far it is trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Author {
    Model,
    Client,
}

impl Author {
    /// Steps of the template engine that one render may take. A message takes
    /// a few hundred; a second or so passes until the model's are used up.
    fn fuel(self) -> u64 {
        match self {
            Self::Model => 20_000_000,
            Self::Client => 2_000_000,
        }
    }
}

/// Stack for clients' templates: a value can nest as deep as there are steps to
/// nest it, and is freed by recursion. Only what is used takes memory.
const CLIENT_STACK_BYTES: usize = 512 << 20;

const NAME: &str = "chat";

/// A chat template, compiled once and rendered by any number of threads.
pub(super) struct Template {
    environment: Environment<'static>,
    pub source: String,
    author: Author,
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Template").finish_non_exhaustive()
    }
}

impl Template {
    pub fn compile(text: &str, author: Author) -> Result<Self, TextError> {
        let mut environment = environment(author.fuel())?;
        environment
            .add_template_owned(NAME, source::prepare(text))
            .map_err(|error| bad_template(&error))?;
        Ok(Self {
            environment,
            source: text.to_owned(),
            author,
        })
    }

    pub fn render(&self, variables: Value) -> Result<String, TextError> {
        if self.author == Author::Model {
            return self.run(variables);
        }
        thread::scope(|scope| {
            let thread = thread::Builder::new()
                .name("chat-template".to_owned())
                .stack_size(CLIENT_STACK_BYTES)
                .spawn_scoped(scope, || self.run(variables));
            match thread.map(thread::ScopedJoinHandle::join) {
                Ok(Ok(result)) => result,
                Ok(Err(_)) => Err(gave_up()),
                Err(error) => Err(TextError::Render(format!(
                    "no thread to run it on: {error}"
                ))),
            }
        })
    }

    fn run(&self, variables: Value) -> Result<String, TextError> {
        let render = || self.environment.get_template(NAME)?.render(variables);
        match catch_unwind(AssertUnwindSafe(render)) {
            Ok(result) => result.map_err(|error| explain(&error, self.author.fuel())),
            Err(_) => Err(gave_up()),
        }
    }
}

/// A panic inside the engine, which is a defect of it.
fn gave_up() -> TextError {
    TextError::Render("the template engine gave up".to_owned())
}

fn environment(fuel: u64) -> Result<Environment<'static>, TextError> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    let syntax = syntax.map_err(|error| TextError::Render(error.to_string()))?;
    env.set_syntax(syntax);
    env.set_fuel(Some(fuel));
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_formatter(|out, _, value| out.write_str(&to_str(value)?).map_err(Error::from));
    env.set_unknown_method_callback(methods::call);
    functions::register(&mut env);
    limits::register(&mut env);
    filters::register(&mut env);
    tests::register(&mut env);
    Ok(env)
}

fn bad_template(error: &Error) -> TextError {
    TextError::BadTemplate {
        line: error.line().unwrap_or(1),
        reason: error.detail().unwrap_or("syntax error").to_owned(),
    }
}

fn explain(error: &Error, fuel: u64) -> TextError {
    let mut source = error.source();
    while let Some(inner) = source {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return TextError::Raised(message.clone());
        }
        source = inner.source();
    }
    match error.kind() {
        ErrorKind::OutOfFuel => TextError::Render(format!("it takes more than {fuel} steps")),
        ErrorKind::UnknownFilter | ErrorKind::UnknownTest => bad_template(error),
        _ => TextError::Render(error.to_string()),
    }
}
