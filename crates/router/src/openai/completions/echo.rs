//! A prompt given back before the output (`echo`), with its logprobs.

use std::sync::Arc;

use tasuki_flow::TokenLogprob;
use tasuki_text::{Detokenizer, ModelText};

use crate::openai::answer::choice::{Piece, PlacedToken};

/// What a choice of an echoing request begins with.
#[derive(Debug)]
pub struct Echo {
    text: String,
    tokens: Arc<[u32]>,
    /// Where each token's text begins, in characters; empty without logprobs.
    offsets: Vec<usize>,
    /// Of `tokens[1..]`, once they have come.
    logprobs: Vec<TokenLogprob>,
}

impl Echo {
    /// `given` is the prompt as the client wrote it, if it was text.
    pub fn new(
        model: &ModelText,
        tokens: Arc<[u32]>,
        given: Option<String>,
        with_logprobs: bool,
        skip_special_tokens: bool,
    ) -> Self {
        let (mut text, mut offsets) = (String::new(), Vec::new());
        if with_logprobs || given.is_none() {
            (text, offsets) = placed(model, &tokens, skip_special_tokens);
        }
        if !with_logprobs {
            offsets.clear();
        } else if let Some(given) = &given {
            // It has its special tokens, but for those that the tokenizer put before it.
            let (whole, places) = placed(model, &tokens, false);
            if let Some(added) = whole.strip_suffix(given.as_str()) {
                let added = added.chars().count();
                let places = places.into_iter();
                offsets = places.map(|place| place.saturating_sub(added)).collect();
            }
        }
        Self {
            text: given.unwrap_or(text),
            tokens,
            offsets,
            logprobs: Vec::new(),
        }
    }

    pub fn chars(&self) -> usize {
        self.text.chars().count()
    }

    pub fn bytes(&self) -> usize {
        self.text.len()
    }

    pub fn set_logprobs(&mut self, logprobs: Vec<TokenLogprob>) {
        self.logprobs = logprobs;
    }

    /// The echoed prompt as the beginning of a choice.
    pub fn piece(&self) -> Piece {
        let logprobs = std::iter::once(None).chain(self.logprobs.iter().map(Some));
        let logprobs = logprobs.chain(std::iter::repeat(None));
        let placed = self.tokens.iter().zip(&self.offsets).zip(logprobs);
        Piece {
            text: self.text.clone(),
            logprobs: placed
                .map(|((token, offset), logprob)| PlacedToken {
                    token: *token,
                    logprob: logprob.cloned(),
                    text_offset: *offset,
                })
                .collect(),
            ..Piece::default()
        }
    }
}

/// The text of tokens, and where that of each begins, in characters.
fn placed(model: &ModelText, tokens: &[u32], skip_special_tokens: bool) -> (String, Vec<usize>) {
    let mut detokenizer = Detokenizer::new(model, skip_special_tokens);
    let (mut text, mut chars) = (String::new(), 0);
    let mut offsets = Vec::with_capacity(tokens.len());
    for token in tokens {
        offsets.push(chars);
        let piece = detokenizer.push(&[*token]);
        chars += piece.chars().count();
        text.push_str(&piece);
    }
    text.push_str(&detokenizer.finish());
    (text, offsets)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{EOS, TestModel, logprob, tokens_of};

    #[test]
    fn the_first_token_has_no_logprob() {
        let model = TestModel::new();
        let mut echo = Echo::new(&model.text, tokens_of("éx").into(), None, true, true);
        echo.set_logprobs(tokens_of("éx")[1..].iter().copied().map(logprob).collect());
        let piece = echo.piece();
        assert_eq!((piece.text.as_str(), echo.chars()), ("éx", 2));
        let offsets: Vec<_> = piece.logprobs.iter().map(|t| t.text_offset).collect();
        assert_eq!(offsets, [0, 0, 1]);
        let known: Vec<_> = piece.logprobs.iter().map(|t| t.logprob.is_some()).collect();
        assert_eq!(known, [false, true, true]);
    }

    #[test]
    fn offsets_are_those_in_the_text_that_was_given() {
        let model = TestModel::new();
        for skipped in [true, false] {
            let tokens = [EOS, u32::from(b'x'), EOS, u32::from(b'y')].into();
            let given = Some("x<|eos|>y".into());
            let echo = Echo::new(&model.text, tokens, given, true, skipped);
            let offsets: Vec<_> = echo
                .piece()
                .logprobs
                .iter()
                .map(|t| t.text_offset)
                .collect();
            assert_eq!(offsets, [0, 0, 1, 8]);
        }
    }

    #[test]
    fn text_comes_back_as_it_was_given() {
        let model = TestModel::new();
        let tokens = tokens_of("x").into();
        let echo = Echo::new(&model.text, tokens, Some("given".into()), false, true);
        assert_eq!(echo.piece().text, "given");
        assert!(echo.piece().logprobs.is_empty());
    }
}
