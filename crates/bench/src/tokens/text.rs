//! Text that has exactly N tokens of a model's tokenizer.
//!
//! Every text is an opener and then pieces (words after a space), of which each
//! adds one token whatever stands beside it: it does so beside itself, and no
//! token of the vocabulary reaches from the end of such a word into the next.
//! So no prompt has to be tokenized again: N tokens are N - overhead pieces,
//! where the overhead is what the opener, the special tokens and the chat
//! template have together.

use std::collections::HashSet;
use std::path::Path;

use chrono::Utc;
use rand::seq::SliceRandom;
use serde_json::{Value, json};
use tasuki_text::{ChatInput, ModelText, TextError};

use crate::error::PlanError;
use crate::plan::{Api, Prompt};
use crate::seeds::{Purpose, generator, stream};

/// Begins every text, so that the first piece has something before it and no
/// template strips it.
const OPENER: &str = "I";
/// So many pieces are enough for any two prompts to differ early.
const MOST_PIECES: usize = 4096;
/// Fewer would make prompts too much alike.
const LEAST_PIECES: usize = 16;

/// Joins pieces to texts of a known number of tokens.
#[derive(Debug)]
pub struct TextMaker {
    model: ModelText,
    pieces: Vec<String>,
    overhead: u32,
}

impl TextMaker {
    /// Finds the pieces of this tokenizer. `path` is for messages.
    ///
    /// # Errors
    /// [`PlanError::NoExactText`] when pieces do not add one token each,
    /// [`PlanError::Tokenizer`] when the chat template fails.
    pub fn new(api: Api, model: ModelText, path: &Path) -> Result<Self, PlanError> {
        let refuse = |reason: String| PlanError::NoExactText {
            path: path.to_owned(),
            reason,
        };
        let pieces = words(&model);
        if pieces.len() < LEAST_PIECES {
            let found = pieces.len();
            return Err(refuse(format!(
                "only {found} of its tokens are words that stay one token in a row, \
                 and at least {LEAST_PIECES} are needed"
            )));
        }
        let count = |content: String| match api {
            Api::Completions => try_count(&model, &Prompt::Text(content)),
            Api::Chat => try_count(
                &model,
                &Prompt::Messages(vec![("user".to_owned(), content)]),
            ),
        };
        let overhead = count(OPENER.to_owned())?;
        let mut all: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let mut generator = generator(0, stream(Purpose::OwnTokens, 0));
        for _ in 0..2 {
            all.shuffle(&mut generator);
            let tokens = count(format!("{OPENER}{}", all.concat()))?;
            #[allow(clippy::cast_possible_truncation)]
            let expected = overhead + all.len() as u32;
            if tokens != expected {
                return Err(refuse(format!("{expected} tokens became {tokens}")));
            }
        }
        Ok(Self {
            model,
            pieces,
            overhead,
        })
    }

    pub fn model(&self) -> &ModelText {
        &self.model
    }

    /// What each adds one token.
    pub fn pieces(&self) -> &[String] {
        &self.pieces
    }

    /// Tokens of a prompt without pieces.
    pub fn overhead(&self) -> u32 {
        self.overhead
    }

    /// The text of the opener and these pieces.
    pub fn join(&self, pieces: impl Iterator<Item = usize>) -> String {
        let mut text = OPENER.to_owned();
        text.extend(pieces.map(|i| self.pieces[i].as_str()));
        text
    }
}

/// The tokens that a server of this model reads; None if the chat template fails.
pub fn count(model: &ModelText, prompt: &Prompt) -> Option<u32> {
    try_count(model, prompt).ok()
}

fn try_count(model: &ModelText, prompt: &Prompt) -> Result<u32, TextError> {
    let tokens = match prompt {
        Prompt::Tokens(tokens) => tokens.len(),
        Prompt::Segments(segments) => segments.iter().map(|s| s.tokens as usize).sum(),
        Prompt::Text(text) => model.encode(text, true)?.len(),
        Prompt::Messages(messages) => {
            let message =
                |(role, content): &(String, String)| json!({"role": role, "content": content});
            let messages: Value = messages.iter().map(message).collect();
            let now = Utc::now().naive_utc();
            let text = model.render_chat(ChatInput::new(model.fit_content(messages), now))?;
            model.encode(&text, false)?.len()
        }
    };
    #[allow(clippy::cast_possible_truncation)]
    Ok(tokens as u32)
}

/// Words that stay one token each after a space, in any company.
fn words(model: &ModelText) -> Vec<String> {
    #[allow(clippy::cast_possible_truncation)]
    let ids = (0..model.vocab_size() as u32).filter(|id| !model.is_special(*id));
    let tokens: Vec<String> = ids
        .map(|id| model.token_text(id).replace('▁', " "))
        .collect();
    let mut is_crossed = [false; 256];
    for pair in tokens.iter().flat_map(|token| token.as_bytes().windows(2)) {
        is_crossed[usize::from(pair[0])] |= pair[1] == b' ';
    }
    let mut seen = HashSet::new();
    let is_word = |word: &&str| word.len() > 1 && word.bytes().all(|b| b.is_ascii_lowercase());
    tokens
        .iter()
        .map(|token| token.trim_start_matches(' '))
        .filter(is_word)
        .filter(|word| {
            word.bytes()
                .last()
                .is_some_and(|end| !is_crossed[usize::from(end)])
        })
        .filter(|word| seen.insert(*word))
        .map(|word| format!(" {word}"))
        .filter(|piece| adds_one(model, piece))
        .take(MOST_PIECES)
        .collect()
}

fn adds_one(model: &ModelText, piece: &str) -> bool {
    let count = |text: &str| model.encode(text, false).map(|tokens| tokens.len());
    match (count(OPENER), count(&format!("{OPENER}{piece}{piece}"))) {
        (Ok(before), Ok(after)) => after == before + 2,
        _ => false,
    }
}
