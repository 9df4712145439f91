//! Grammars that answers must match, checked before a worker gets them.
//!
//! Workers follow a grammar with llguidance. The same library compiles it here first, over a
//! vocabulary of single bytes and the model's special tokens, so that a client learns at once what
//! cannot be done. [`size`] bounds what is compiled, [`compiler`] the time, [`recent`] remembers
//! results, and [`lark`] writes grammars.

mod compiler;
pub mod lark;
mod recent;
pub mod size;
#[cfg(test)]
pub mod testing;
mod vocabulary;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use llguidance::ParserFactory;
use sha2::{Digest, Sha256};
use tasuki_flow::Grammar;
use tasuki_text::ModelText;

use self::compiler::Compiler;
use self::recent::Recent;
use crate::error::ApiError;

/// Why an answer cannot be made to match a grammar.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    #[error("{0}")]
    TooLarge(#[from] size::SizeError),
    /// What the library says about it.
    #[error("{0}")]
    NotSupported(String),
    #[error("was not compiled within {0:?}, the limit; make it simpler")]
    Slow(Duration),
    /// The fault is not the client's: other grammars are being compiled.
    #[error("Grammars that are being compiled:")]
    Crowded { limit: usize },
}

impl GrammarError {
    /// The answer to a request whose `field` has the grammar.
    pub fn answer(&self, field: &str) -> ApiError {
        match self {
            Self::Crowded { limit } => ApiError::Crowded {
                what: "Grammars that are being compiled:",
                used: *limit,
                limit: *limit,
            },
            Self::NotSupported(reason) => ApiError::Invalid {
                message: format!("{field} is not supported: {reason}."),
                param: Some(field.to_owned()),
                code: Some("unsupported_grammar"),
            },
            Self::TooLarge(_) | Self::Slow(_) => {
                ApiError::invalid(field, format!("{field} {self}."))
            }
        }
    }
}

/// The grammars of one model's answers.
pub struct Grammars {
    text: Arc<ModelText>,
    /// Made when the first grammar comes.
    factory: Arc<OnceLock<ParserFactory>>,
    recent: Mutex<Recent>,
    compiler: Compiler,
}

impl Grammars {
    pub fn new(text: Arc<ModelText>) -> Self {
        Self {
            text,
            factory: Arc::default(),
            recent: Mutex::default(),
            compiler: Compiler::default(),
        }
    }

    /// Whether a worker can follow the grammar. May take [`compiler::LIMIT`]: not for the event loop.
    ///
    /// # Errors
    /// [`GrammarError`]; only `Crowded` is no fault of the grammar.
    pub fn check(&self, grammar: &Grammar) -> Result<(), GrammarError> {
        size::check(grammar)?;
        let key = key(grammar);
        if let Some(known) = self.recent().get(&key) {
            return known;
        }
        let (text, factory) = (Arc::clone(&self.text), Arc::clone(&self.factory));
        let grammar = grammar.clone();
        let result = self.compiler.run(move || {
            let factory = factory.get_or_init(|| vocabulary::factory(&text));
            compiler::compile(factory, &grammar)
        });
        // Those two are of the moment.
        if !matches!(
            result,
            Err(GrammarError::Crowded { .. } | GrammarError::Slow(_))
        ) {
            self.recent().put(key, result.clone());
        }
        result
    }

    fn recent(&self) -> std::sync::MutexGuard<'_, Recent> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn key(grammar: &Grammar) -> [u8; 32] {
    let (kind, text) = match grammar {
        Grammar::JsonSchema(text) => ("json", text),
        Grammar::Regex(text) => ("regex", text),
        Grammar::Lark(text) => ("lark", text),
    };
    let mut hash = Sha256::new();
    hash.update(kind);
    hash.update([0]);
    hash.update(text);
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestModel;

    fn grammars() -> Grammars {
        Grammars::new(Arc::clone(&TestModel::new().text))
    }

    #[track_caller]
    fn refusal(grammar: Grammar) -> String {
        let error = grammars().check(&grammar).unwrap_err();
        error.answer("field").to_string()
    }

    #[test]
    fn what_the_library_can_do_is_taken() {
        let grammars = grammars();
        for grammar in [
            Grammar::JsonSchema(r#"{"type": "object"}"#.into()),
            Grammar::JsonSchema("true".into()),
            Grammar::Regex("^[a-z]+/b$".into()),
            Grammar::Lark("start: \"a\" | <|m|> | <[257]>".into()),
        ] {
            assert_eq!(grammars.check(&grammar), Ok(()), "{grammar:?}");
            // From the cache.
            assert_eq!(grammars.check(&grammar), Ok(()), "{grammar:?}");
        }
    }

    #[test]
    fn what_it_cannot_do_is_named() {
        let schema = |text: &str| Grammar::JsonSchema(text.into());
        let lark = |text: &str| Grammar::Lark(text.into());
        let regex = |text: &str| Grammar::Regex(text.into());
        for (grammar, says) in [
            (schema(r#"{"not": {}, "if": {}}"#), "the keywords if, not"),
            (
                schema(r#"{"type": "array", "uniqueItems": true}"#),
                "uniqueItems",
            ),
            (
                schema(r#"{"oneOf": [{"type": "object"}, {"required": ["a"]}]}"#),
                "oneOf",
            ),
            (
                schema(r#"{"type": "string", "format": "foo"}"#),
                "Unknown format: foo",
            ),
            (schema(r##"{"$ref": "#/nope"}"##), "/nope"),
            (schema("false"), "schema is false"),
            (schema("{"), "is no JSON"),
            (schema("[1]"), "object or boolean"),
            (regex("a(?=b)"), "look-around"),
            (regex("(a"), "unclosed group"),
            (regex(r"[^\s\S]"), "no text can match"),
            (lark("start: nope"), "unknown name: \"nope\""),
            (lark("start: <nope>"), "unknown special token"),
            (lark("start: start"), "no text can match"),
            (lark("root ::= \"a\""), "Expected token"),
        ] {
            let said = refusal(grammar);
            assert!(said.starts_with("field is not supported: "), "{said}");
            assert!(said.contains(says), "{says:?} is not in {said:?}");
            assert!(!said.contains('\n') && said.len() < 400, "{said:?}");
        }
    }

    #[test]
    fn a_defect_of_the_library_is_a_refusal() {
        // An error's excerpt is cut inside a character.
        let grammar = Grammar::JsonSchema(format!(r#"{{"$ref": ["{}"]}}"#, "ü".repeat(80)));
        let said = refusal(grammar);
        assert!(said.contains("not supported"), "{said}");
    }
}
