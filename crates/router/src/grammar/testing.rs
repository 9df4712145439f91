//! Follows a grammar as a worker does, one token at a time.

use llguidance::{Matcher, toktrie::TokenId};
use tasuki_flow::Grammar;
use tasuki_text::ModelText;

use super::{compiler, vocabulary};

/// Whether a grammar takes these tokens as a whole answer. Bytes are tokens behind the vocabulary.
///
/// # Panics
/// The grammar cannot be compiled.
pub fn accepts(text: &ModelText, grammar: &Grammar, tokens: &[TokenId]) -> bool {
    let factory = vocabulary::factory(text);
    let grammar = compiler::top_level(grammar).expect("JSON");
    let mut matcher = Matcher::new(Ok(factory.create_parser(grammar).expect("a grammar")));
    let taken = matcher.try_consume_tokens(tokens).expect("no limit");
    taken == tokens.len() && matcher.is_accepting().expect("no limit")
}

/// The tokens of a text: each of `marks` is the token that the model has for it, the rest are bytes.
pub fn tokens(text: &ModelText, answer: &str, marks: &[&str]) -> Vec<TokenId> {
    let bytes = u32::try_from(text.vocab_size()).expect("a small vocabulary");
    let mut tokens = Vec::new();
    let mut rest = answer;
    while let Some(first) = rest.chars().next() {
        let mark = marks.iter().find(|mark| rest.starts_with(**mark));
        let mark = mark.and_then(|mark| Some((mark.len(), text.token_id(mark)?)));
        let length = mark.map_or(first.len_utf8(), |(length, _)| length);
        match mark {
            Some((_, token)) => tokens.push(token),
            None => tokens.extend(rest[..length].bytes().map(|byte| bytes + u32::from(byte))),
        }
        rest = &rest[length..];
    }
    tokens
}
