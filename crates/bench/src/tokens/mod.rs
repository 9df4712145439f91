//! How prompts of exactly N tokens are made.
//!
//! A prompt is a row of [`Segment`]s of pseudo-random content. Its content is a
//! function of the seed and the segment's stream alone, and a short segment is
//! the beginning of a longer one of the same stream: this is how prompts share
//! prefixes, whatever their form.
//!
//! | form | made of | count |
//! |---|---|---|
//! | tokens | ids of the model's ordinary tokens | exact: the server adds nothing |
//! | text | words, each one token of the model's tokenizer | exact: special tokens and chat template are subtracted |
//! | words | common English words, one per token asked for | the server's usage tells |

#[cfg(test)]
mod tests;
mod text;
mod words;

use std::path::Path;

use rand::Rng;
use tasuki_text::ModelText;

use crate::error::PlanError;
use crate::plan::{Api, Prompt, PromptForm};
use crate::seeds::generator;
use text::TextMaker;
use words::WORDS;

/// A run of pseudo-random tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Equal streams have equal content; see [`crate::seeds::stream`].
    pub stream: u64,
    pub tokens: u32,
}

/// Tokens of all segments; of more than a `u32` holds, its largest value.
fn total(segments: &[Segment]) -> u32 {
    let tokens = segments.iter().map(|segment| segment.tokens);
    tokens.fold(0, u32::saturating_add)
}

/// A prompt and the tokens it has, if that is known.
pub type Counted = (Prompt, Option<u32>);

/// Makes prompts for one endpoint.
#[derive(Debug)]
pub struct PromptMaker {
    api: Api,
    seed: u64,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Ids { ids: Vec<u32>, model: ModelText },
    Text(TextMaker),
    Words,
    Lengths,
}

impl PromptMaker {
    /// Prompts of token ids.
    ///
    /// # Errors
    /// [`PlanError::OutOfRange`] for chats, which have no token ids;
    /// [`PlanError::NoExactText`] for a vocabulary of special tokens only.
    pub fn tokens(api: Api, model: ModelText, path: &Path, seed: u64) -> Result<Self, PlanError> {
        if api == Api::Chat {
            return Err(PlanError::OutOfRange {
                option: "prompt-as",
                value: "tokens".to_owned(),
                limit: "/v1/chat/completions takes text only".to_owned(),
                remedy: "use /v1/completions, or --prompt-as text".to_owned(),
            });
        }
        #[allow(clippy::cast_possible_truncation)]
        let all = 0..model.vocab_size() as u32;
        let ends = model.eos_token_ids();
        let is_ordinary =
            |id: &u32| model.is_token(*id) && !model.is_special(*id) && !ends.contains(id);
        let ids: Vec<u32> = all.filter(is_ordinary).collect();
        if ids.is_empty() {
            return Err(PlanError::NoExactText {
                path: path.to_owned(),
                reason: "every token of its vocabulary is special".to_owned(),
            });
        }
        let content = Content::Ids { ids, model };
        Ok(Self { api, seed, content })
    }

    /// Prompts of text with a known number of tokens.
    ///
    /// # Errors
    /// As [`TextMaker::new`].
    pub fn text(api: Api, model: ModelText, path: &Path, seed: u64) -> Result<Self, PlanError> {
        let content = Content::Text(TextMaker::new(api, model, path)?);
        Ok(Self { api, seed, content })
    }

    /// Prompts of words.
    #[must_use]
    pub fn words(api: Api, seed: u64) -> Self {
        let content = Content::Words;
        Self { api, seed, content }
    }

    /// Prompts without content, for a simulation.
    #[must_use]
    pub fn lengths(seed: u64) -> Self {
        let content = Content::Lengths;
        Self {
            api: Api::Completions,
            seed,
            content,
        }
    }

    /// Where prompts go.
    #[must_use]
    pub fn api(&self) -> Api {
        self.api
    }

    /// The form that prompts have.
    #[must_use]
    pub fn form(&self) -> PromptForm {
        match self.content {
            Content::Ids { .. } => PromptForm::Tokens,
            Content::Text(_) => PromptForm::Text,
            Content::Words => PromptForm::Words,
            Content::Lengths => PromptForm::Lengths,
        }
    }

    /// Checks that a prompt of so few tokens can be made.
    ///
    /// # Errors
    /// [`PlanError::TooShort`].
    pub fn check_length(&self, tokens: u32) -> Result<(), PlanError> {
        let least = match &self.content {
            Content::Text(text) => text.overhead(),
            Content::Ids { .. } | Content::Words | Content::Lengths => 1,
        };
        if tokens < least {
            let form = self.form();
            return Err(PlanError::TooShort {
                tokens,
                least,
                form,
            });
        }
        Ok(())
    }

    /// The prompt of these segments: as many tokens as they have together,
    /// those that the server adds included (they are taken off the end).
    #[must_use]
    pub fn prompt(&self, segments: &[Segment]) -> Counted {
        let count = total(segments);
        match &self.content {
            Content::Ids { ids, .. } => {
                let ids = self.draw(segments, count, ids.len()).map(|i| ids[i]);
                (Prompt::Tokens(ids.collect()), Some(count))
            }
            Content::Text(text) => {
                let rest = count.saturating_sub(text.overhead());
                let drawn = self.draw(segments, rest, text.pieces().len());
                let content = text.join(drawn);
                (self.first(content), Some(count.max(text.overhead())))
            }
            Content::Words => (self.first(self.join_words(segments, count)), None),
            Content::Lengths => (Prompt::Segments(segments.to_vec()), Some(count)),
        }
    }

    /// The next turn: what was asked, its answer, and new content of the user,
    /// `segment` long. The count is of the whole conversation; text is not
    /// counted again, because this happens during the run: the server tells.
    #[must_use]
    pub fn follow(&self, asked: Prompt, answer: &str, segment: Segment) -> Counted {
        let segments = [segment];
        match (asked, &self.content) {
            (Prompt::Tokens(mut tokens), Content::Ids { ids, model }) => {
                tokens.extend(model.encode(answer, false).unwrap_or_default());
                let new = self.draw(&segments, segment.tokens, ids.len());
                tokens.extend(new.map(|i| ids[i]));
                #[allow(clippy::cast_possible_truncation)]
                let count = tokens.len() as u32;
                (Prompt::Tokens(tokens), Some(count))
            }
            (Prompt::Messages(mut messages), _) => {
                messages.push(("assistant".to_owned(), answer.to_owned()));
                messages.push(("user".to_owned(), self.message(segment)));
                (Prompt::Messages(messages), None)
            }
            (Prompt::Text(text), _) => {
                let new = self.message(segment);
                (Prompt::Text(format!("{text}{answer}\n{new}")), None)
            }
            // A byte of the answer stands for a token.
            (Prompt::Segments(mut asked), _) => {
                let tokens = answer.len() as u32;
                let stream = !segment.stream;
                asked.extend([Segment { stream, tokens }, segment]);
                let count = total(&asked);
                (Prompt::Segments(asked), Some(count))
            }
            (asked @ Prompt::Tokens(_), _) => (asked, None),
        }
    }

    /// Text of a segment, with nothing taken off for what the server adds.
    fn message(&self, segment: Segment) -> String {
        match &self.content {
            Content::Text(text) => {
                let rest = segment.tokens.saturating_sub(1);
                text.join(self.draw(&[segment], rest, text.pieces().len()))
            }
            _ => self.join_words(&[segment], segment.tokens),
        }
    }

    /// A prompt made elsewhere, with its tokens counted if there is a tokenizer.
    #[must_use]
    pub fn counted(&self, prompt: Prompt) -> Counted {
        #[allow(clippy::cast_possible_truncation)]
        let count = match (&prompt, &self.content) {
            (Prompt::Tokens(tokens), _) => Some(tokens.len() as u32),
            (_, Content::Words | Content::Lengths) => None,
            (_, Content::Ids { model, .. }) => text::count(model, &prompt),
            (_, Content::Text(text)) => text::count(text.model(), &prompt),
        };
        (prompt, count)
    }

    /// `content` as a whole prompt of its own.
    #[must_use]
    pub fn first(&self, content: String) -> Prompt {
        match self.api {
            Api::Completions => Prompt::Text(content),
            Api::Chat => Prompt::Messages(vec![("user".to_owned(), content)]),
        }
    }

    /// The first `limit` draws out of `choices` of these segments.
    fn draw(
        &self,
        segments: &[Segment],
        limit: u32,
        choices: usize,
    ) -> impl Iterator<Item = usize> {
        let draws = segments.iter().flat_map(move |segment| {
            let mut generator = generator(self.seed, segment.stream);
            (0..segment.tokens).map(move |_| generator.random_range(0..choices))
        });
        draws.take(limit as usize)
    }

    fn join_words(&self, segments: &[Segment], count: u32) -> String {
        let mut content = String::with_capacity(count as usize * 6);
        for i in self.draw(segments, count, WORDS.len()) {
            if !content.is_empty() {
                content.push(' ');
            }
            content.push_str(WORDS[i]);
        }
        content
    }
}
