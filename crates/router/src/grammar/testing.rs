//! Follows a grammar as a worker does, one token at a time.

use llguidance::{Matcher, ParserFactory, toktrie::TokenId};
use tasuki_flow::Grammar;
use tasuki_text::ModelText;

pub use super::vocabulary::factory;
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

/// An answer in bytes that keeps to a grammar. `choose` takes each token from those that are allowed.
/// `None`: it has not ended after `most` tokens, or the library gave up.
///
/// # Panics
/// The grammar cannot be compiled, or a token that is allowed is refused.
pub fn written(
    text: &ModelText,
    factory: &ParserFactory,
    grammar: &Grammar,
    most: usize,
    mut choose: impl FnMut(&[TokenId]) -> TokenId,
) -> Option<Vec<u8>> {
    let bytes = u32::try_from(text.vocab_size()).expect("a small vocabulary");
    let grammar = compiler::top_level(grammar).expect("JSON");
    let parser = factory.create_parser(grammar).expect("a grammar");
    let mut matcher = Matcher::new(Ok(parser));
    let mut answer = Vec::new();
    for _ in 0..most {
        let allowed = matcher.compute_mask_or_eos().ok()?.to_list();
        let token = choose(&allowed);
        if text.eos_token_ids().contains(&token) {
            assert!(
                matcher.is_accepting().expect("no limit"),
                "it ends too early"
            );
            return Some(answer);
        }
        matcher.consume_token(token).expect("it is allowed");
        let byte = token.checked_sub(bytes);
        answer.extend(byte.map(|byte| u8::try_from(byte).expect("a byte")));
    }
    None
}
