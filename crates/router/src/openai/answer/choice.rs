//! One choice's way from tokens to text: detokenizer, stop strings, and the
//! bookkeeping of which token stands where in the text.

use std::collections::VecDeque;
use std::sync::Arc;

use tasuki_flow::TokenLogprob;
use tasuki_text::{Detokenizer, StopMatcher};

use crate::openai::request::delivery::Delivery;
use crate::serve::api::Finish;

/// What one event added to a choice.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Piece {
    pub text: String,
    /// Every token of the output, a stop token included.
    pub tokens: Vec<u32>,
    /// Of the tokens whose text has begun to be given out.
    pub logprobs: Vec<PlacedToken>,
    pub finish: Option<Finish>,
}

impl Piece {
    /// Nothing in it that a client would want to see.
    pub fn is_empty(&self, token_ids: bool) -> bool {
        self.text.is_empty()
            && self.logprobs.is_empty()
            && self.finish.is_none()
            && (self.tokens.is_empty() || !token_ids)
    }

    /// Adds what follows in the same choice.
    pub fn append(&mut self, next: Piece) {
        self.text.push_str(&next.text);
        self.tokens.extend(next.tokens);
        self.logprobs.extend(next.logprobs);
        self.finish = self.finish.or(next.finish);
    }
}

/// A token and where its text begins.
#[derive(Debug, Clone, PartialEq)]
pub struct PlacedToken {
    pub token: u32,
    /// `None` for the first token of an echoed prompt.
    pub logprob: Option<TokenLogprob>,
    /// In characters from the beginning of the choice's text.
    pub text_offset: usize,
}

/// The state of one choice. Its text is cut at the first stop string; a token
/// belongs to the text if its own text begins before the cut.
pub struct ChoiceText {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    include_stop: bool,
    stop_token_ids: Arc<[u32]>,
    /// Stop strings count in the text after so many tokens.
    min_tokens: usize,
    output_tokens: usize,
    /// Characters detokenized, and of those the characters given out.
    detokenized_chars: usize,
    emitted_chars: usize,
    /// Tokens whose text is still held back, oldest first.
    held: VecDeque<PlacedToken>,
    /// Nothing of the output is for the client (`max_tokens` of 0).
    muted: bool,
    finished: bool,
}

/// How one choice's output begins.
#[derive(Debug, Clone, Copy, Default)]
pub struct Beginning {
    /// Characters of echoed prompt before the output's text.
    pub echoed_chars: usize,
    /// Give out no output at all.
    pub muted: bool,
}

impl ChoiceText {
    /// `detokenizer` may have been shown the end of the prompt already.
    pub fn new(detokenizer: Detokenizer, delivery: &Delivery, beginning: Beginning) -> Self {
        Self {
            detokenizer,
            stops: StopMatcher::new(Arc::clone(&delivery.stops), delivery.include_stop),
            include_stop: delivery.include_stop,
            stop_token_ids: Arc::clone(&delivery.stop_token_ids),
            min_tokens: delivery.min_tokens as usize,
            output_tokens: 0,
            detokenized_chars: beginning.echoed_chars,
            emitted_chars: beginning.echoed_chars,
            held: VecDeque::new(),
            muted: beginning.muted,
            finished: false,
        }
    }

    /// Output tokens so far, for the usage.
    pub fn output_tokens(&self) -> usize {
        self.output_tokens
    }

    /// Whether the choice has its `finish`; what still comes is ignored.
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// Takes the next tokens of the choice, with as many logprobs or none.
    pub fn push(
        &mut self,
        tokens: &[u32],
        logprobs: Vec<TokenLogprob>,
        finish: Option<Finish>,
    ) -> Piece {
        let mut piece = Piece::default();
        if self.finished {
            return piece;
        }
        if self.muted {
            self.finished = finish.is_some();
            piece.finish = finish.map(|_| Finish::Length);
            return piece;
        }
        let mut logprobs = logprobs.into_iter();
        for (index, token) in tokens.iter().enumerate() {
            let logprob = logprobs.next();
            self.output_tokens += 1;
            piece.tokens.push(*token);
            let is_last = index + 1 == tokens.len() && finish == Some(Finish::Stop);
            let is_stop_token = is_last && self.stop_token_ids.contains(token);
            if is_stop_token && !self.include_stop {
                break;
            }
            if let Some(logprob) = logprob {
                self.held.push_back(PlacedToken {
                    token: *token,
                    logprob: Some(logprob),
                    text_offset: self.detokenized_chars,
                });
            }
            let text = self.detokenizer.push(&[*token]);
            if self.emit(&text, &mut piece) {
                return piece;
            }
        }
        if finish.is_some() {
            self.end(finish, &mut piece);
        }
        piece
    }

    /// Gives out text as far as no stop string can begin in it. True when a
    /// stop string ended the choice.
    fn emit(&mut self, text: &str, piece: &mut Piece) -> bool {
        self.detokenized_chars += text.chars().count();
        let before = piece.text.len();
        let stopped = if self.output_tokens <= self.min_tokens {
            piece.text.push_str(text);
            false
        } else {
            self.stops.push(text, &mut piece.text).is_some()
        };
        self.emitted_chars += piece.text[before..].chars().count();
        let begun = self
            .held
            .iter()
            .take_while(|token| token.text_offset < self.emitted_chars)
            .count();
        piece.logprobs.extend(self.held.drain(..begun));
        if stopped {
            self.held.clear();
            self.finished = true;
            piece.finish = Some(Finish::Stop);
        }
        stopped
    }

    fn end(&mut self, finish: Option<Finish>, piece: &mut Piece) {
        let tail = self.detokenizer.finish();
        if self.emit(&tail, piece) {
            return;
        }
        let rest = self.stops.finish();
        self.emitted_chars += rest.chars().count();
        piece.text.push_str(&rest);
        piece.logprobs.extend(self.held.drain(..));
        self.finished = true;
        piece.finish = finish;
    }
}

#[cfg(test)]
mod tests {
    use tasuki_text::StopStrings;

    use super::*;
    use crate::testing::{EOS, TestModel, logprob, tokens_of};

    fn choice(
        model: &TestModel,
        stops: &[&str],
        include_stop: bool,
        min_tokens: u32,
    ) -> ChoiceText {
        let stops: Vec<_> = stops.iter().map(ToString::to_string).collect();
        let delivery = Delivery {
            stops: Arc::new(StopStrings::new(&stops)),
            include_stop,
            stop_token_ids: [EOS].into(),
            min_tokens,
            ..Delivery::plain()
        };
        ChoiceText::new(
            Detokenizer::new(&model.text, true),
            &delivery,
            Beginning::default(),
        )
    }

    /// One push per token; the pieces, and everything in one.
    fn run(choice: &mut ChoiceText, tokens: &[u32], finish: Finish) -> (Vec<Piece>, Piece) {
        let mut pieces = Vec::new();
        let mut whole = Piece::default();
        for (index, token) in tokens.iter().enumerate() {
            let finish = (index + 1 == tokens.len()).then_some(finish);
            let piece = choice.push(&[*token], vec![logprob(*token)], finish);
            pieces.push(piece.clone());
            whole.append(piece);
        }
        (pieces, whole)
    }

    #[test]
    fn text_is_whole_characters_and_ends_complete() {
        let model = TestModel::new();
        let mut choice = choice(&model, &[], false, 0);
        let (pieces, whole) = run(&mut choice, &tokens_of("é🙂x"), Finish::Length);
        let texts: Vec<_> = pieces.iter().map(|piece| piece.text.as_str()).collect();
        assert_eq!(texts, ["", "é", "", "", "", "🙂", "x"]);
        assert_eq!(whole.tokens.len(), 7);
        let offsets: Vec<_> = whole.logprobs.iter().map(|t| t.text_offset).collect();
        assert_eq!(offsets, [0, 0, 1, 1, 1, 1, 2]);
        assert_eq!(whole.finish, Some(Finish::Length));
    }

    #[test]
    fn a_stop_string_cuts_text_and_logprobs_alike() {
        let model = TestModel::new();
        let mut choice = choice(&model, &["END"], false, 0);
        let (_, whole) = run(&mut choice, &tokens_of("abENxENDzz"), Finish::Length);
        assert_eq!(whole.text, "abENx");
        assert_eq!(whole.logprobs.len(), 5);
        assert_eq!(whole.tokens, tokens_of("abENxEND"));
        assert_eq!(choice.output_tokens(), 8);
        assert_eq!(whole.finish, Some(Finish::Stop));
    }

    #[test]
    fn a_stop_string_can_be_kept() {
        let model = TestModel::new();
        let mut choice = choice(&model, &["END"], true, 0);
        let (_, whole) = run(&mut choice, &tokens_of("abENDz"), Finish::Length);
        assert_eq!((whole.text.as_str(), whole.logprobs.len()), ("abEND", 5));
    }

    #[test]
    fn held_text_is_given_out_at_the_end() {
        let model = TestModel::new();
        let mut choice = choice(&model, &["END"], false, 0);
        let (pieces, whole) = run(&mut choice, &tokens_of("abEN"), Finish::Length);
        assert_eq!(pieces[2].text, "");
        assert_eq!((whole.text.as_str(), whole.logprobs.len()), ("abEN", 4));
    }

    #[test]
    fn the_last_token_of_a_grammar_is_text() {
        let model = TestModel::new();
        let mut choice = choice(&model, &[], false, 0);
        let (_, whole) = run(&mut choice, &tokens_of("{}"), Finish::Stop);
        assert_eq!(
            (whole.text.as_str(), whole.finish),
            ("{}", Some(Finish::Stop))
        );
        assert_eq!(whole.logprobs.len(), 2);
    }

    #[test]
    fn the_stop_token_counts_but_has_no_text() {
        let model = TestModel::new();
        let mut tokens = tokens_of("ab");
        tokens.push(EOS);
        let (_, whole) = run(&mut choice(&model, &[], false, 0), &tokens, Finish::Stop);
        assert_eq!((whole.text.as_str(), whole.logprobs.len()), ("ab", 2));
        assert_eq!(whole.tokens, tokens);
    }

    #[test]
    fn min_tokens_keeps_stop_strings_off() {
        let model = TestModel::new();
        let mut choice = choice(&model, &["b"], false, 3);
        let (_, whole) = run(&mut choice, &tokens_of("abbbb"), Finish::Length);
        assert_eq!(whole.text, "abb");
        assert_eq!(choice.output_tokens(), 4);
    }

    #[test]
    fn many_tokens_at_once_are_cut_at_the_stop() {
        let model = TestModel::new();
        let mut choice = choice(&model, &["b"], false, 0);
        let piece = choice.push(&tokens_of("abcd"), Vec::new(), None);
        assert_eq!((piece.text.as_str(), piece.tokens.len()), ("a", 2));
        assert!(choice.is_finished());
        let late = choice.push(&tokens_of("x"), Vec::new(), Some(Finish::Length));
        assert_eq!(late, Piece::default());
    }
}
