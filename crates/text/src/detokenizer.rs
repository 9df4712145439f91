//! Tokens to text while they are being generated.
//!
//! Whatever is given out is whole UTF-8, and all of it together equals the
//! text that decoding every token at once gives. Cost and memory per token do
//! not grow with the sequence.

use std::sync::Arc;

use tokenizers::Tokenizer;

use crate::ModelText;
use crate::model::{Decoding, Vocabulary};

const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// In the general case, how many tokens may wait for a character to complete.
const MAX_WAITING_TOKENS: usize = 16;

/// The text of one choice's tokens, piece by piece.
#[derive(Debug)]
pub struct Detokenizer {
    vocabulary: Arc<Vocabulary>,
    skip_special: bool,
    /// Special tokens that are not skipped.
    kept: Arc<[u32]>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// `incomplete`: the first bytes of a character, at most three.
    ByteLevel {
        incomplete: Vec<u8>,
    },
    /// `run`: byte tokens whose run has not ended. Should it turn out not to be
    /// UTF-8, every byte of it counts as one U+FFFD, so it has to wait.
    ByteFallback {
        run: Vec<u8>,
        strip: usize,
    },
    Window(Window),
}

/// A few tokens decoded again and again by the tokenizers library: those given
/// out last, as context, and those that wait.
#[derive(Debug)]
struct Window {
    tokenizer: Arc<Tokenizer>,
    tokens: Vec<u32>,
    /// How many of `tokens` were given out, and their text.
    given: usize,
    given_text: String,
}

impl Detokenizer {
    /// Starts a text. With `skip_special`, special tokens have no text.
    #[must_use]
    pub fn new(model: &ModelText, skip_special: bool) -> Self {
        let state = match model.vocabulary.decoding {
            Decoding::ByteLevel => State::ByteLevel {
                incomplete: Vec::new(),
            },
            Decoding::ByteFallback { strip, .. } => State::ByteFallback {
                run: Vec::new(),
                strip,
            },
            Decoding::Other => State::Window(Window {
                tokenizer: Arc::clone(&model.tokenizer),
                tokens: Vec::new(),
                given: 0,
                given_text: String::new(),
            }),
        };
        Self {
            vocabulary: Arc::clone(&model.vocabulary),
            skip_special,
            kept: Arc::default(),
            state,
        }
    }

    /// These special tokens have text nevertheless.
    #[must_use]
    pub fn keeping(mut self, tokens: Arc<[u32]>) -> Self {
        self.kept = tokens;
        self
    }

    /// The text goes on behind these tokens, and their own text is not part of it. A character
    /// that they begin is.
    #[must_use]
    pub fn after(mut self, tokens: &[u32]) -> Self {
        self.push(tokens);
        if let State::ByteFallback { run, strip } = &mut self.state
            && !run.is_empty()
        {
            *strip = 0;
            take_whole_characters(run, &mut String::new());
        }
        self
    }

    /// Takes the next tokens; returns the text that they completed.
    pub fn push(&mut self, tokens: &[u32]) -> String {
        let mut text = String::new();
        for &token in tokens {
            let skipped = self.skip_special
                && self.vocabulary.is_special(token)
                && !self.kept.contains(&token);
            if skipped || !self.vocabulary.is_known(token) {
                continue;
            }
            let bytes = self.vocabulary.bytes(token);
            match &mut self.state {
                State::ByteLevel { incomplete } => {
                    incomplete.extend(bytes);
                    take_whole_characters(incomplete, &mut text);
                }
                State::ByteFallback { run, strip } => {
                    if self.vocabulary.is_byte(token) {
                        run.extend(bytes);
                        continue;
                    }
                    let start = text.len();
                    end_run(run, &mut text);
                    text.push_str(&String::from_utf8_lossy(bytes));
                    strip_start(&mut text, start, strip, &self.vocabulary.decoding);
                }
                State::Window(window) => window.push(token, &mut text),
            }
        }
        text
    }

    /// Ends the text: what was still waiting, with U+FFFD for what never became
    /// a character.
    pub fn finish(&mut self) -> String {
        let mut text = String::new();
        match &mut self.state {
            State::ByteLevel { incomplete } => {
                text.push_str(&String::from_utf8_lossy(incomplete));
                incomplete.clear();
            }
            State::ByteFallback { run, strip } => {
                end_run(run, &mut text);
                strip_start(&mut text, 0, strip, &self.vocabulary.decoding);
            }
            State::Window(window) => window.give(&mut text, true),
        }
        text
    }
}

/// Moves whole characters from `bytes` to `text`; the first bytes of one that
/// may still be completed stay.
fn take_whole_characters(bytes: &mut Vec<u8>, text: &mut String) {
    let mut taken = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        taken += chunk.valid().len();
        let invalid = chunk.invalid();
        if invalid.is_empty() {
            continue;
        }
        if taken + invalid.len() == bytes.len() && may_be_completed(invalid) {
            break;
        }
        text.push(REPLACEMENT);
        taken += invalid.len();
    }
    bytes.drain(..taken);
}

/// Whether more bytes can make a character of this maximal invalid sequence.
fn may_be_completed(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

fn end_run(run: &mut Vec<u8>, text: &mut String) {
    match std::str::from_utf8(run) {
        Ok(characters) => text.push_str(characters),
        Err(_) => text.extend(std::iter::repeat_n(REPLACEMENT, run.len())),
    }
    run.clear();
}

/// Removes up to `strip` characters at the very start of the whole text.
fn strip_start(text: &mut String, start: usize, strip: &mut usize, decoding: &Decoding) {
    let Decoding::ByteFallback { strip_char, .. } = decoding else {
        return;
    };
    while *strip > 0 && text.len() > start {
        if text[start..].starts_with(*strip_char) {
            text.remove(start);
            *strip -= 1;
        } else {
            *strip = 0;
        }
    }
}

impl Window {
    fn push(&mut self, token: u32, text: &mut String) {
        self.tokens.push(token);
        self.give(text, self.tokens.len() - self.given > MAX_WAITING_TOKENS);
    }

    /// Gives out the text of the waiting tokens, unless it ends in what may be
    /// half a character (and `all` is not set).
    fn give(&mut self, text: &mut String, all: bool) {
        let Ok(now) = self.tokenizer.decode(&self.tokens, false) else {
            return;
        };
        if now.ends_with(REPLACEMENT) && !all {
            return;
        }
        let common = common_prefix(&now, &self.given_text);
        text.push_str(&now[common..]);
        self.tokens.drain(..self.given);
        self.given = self.tokens.len();
        self.given_text = self
            .tokenizer
            .decode(&self.tokens, false)
            .unwrap_or_default();
    }
}

fn common_prefix(a: &str, b: &str) -> usize {
    let same = a.chars().zip(b.chars()).take_while(|(a, b)| a == b);
    same.map(|(a, _)| a.len_utf8()).sum()
}
