//! The text side of one model: everything that its folder says about text.

mod folder;
mod generation;
mod llama_class;
mod special;
mod vocabulary;

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use crate::TextError;
use crate::chat::{ChatInput, Extra, Templates};
use folder::{Folder, bad_file};
pub use generation::GenerationDefaults;
use special::SpecialTokens;
pub(crate) use vocabulary::{Decoding, Vocabulary};

/// Tokenizer, template and settings of a model. Read-only once loaded, so one
/// instance serves every request from any thread.
#[derive(Debug)]
pub struct ModelText {
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) vocabulary: Arc<Vocabulary>,
    templates: Templates,
    eos_token_ids: Vec<u32>,
    generation_defaults: GenerationDefaults,
    max_context: Option<u32>,
}

impl ModelText {
    /// Loads a Hugging Face folder.
    ///
    /// # Errors
    /// [`TextError::NoTokenizer`] without a `tokenizer.json`,
    /// [`TextError::BadFile`] for one that cannot be used. A template that does
    /// not compile is reported when a chat needs it.
    pub fn load(path: &Path) -> Result<Self, TextError> {
        let folder = Folder::read(path)?;
        let unusable = |error| bad_file(&path.join("tokenizer.json"), error);
        let mut tokenizer = Tokenizer::from_bytes(&folder.tokenizer).map_err(unusable)?;
        llama_class::apply(&folder, &mut tokenizer).map_err(unusable)?;
        let special = SpecialTokens::read(&folder);
        special.add_to(&mut tokenizer).map_err(unusable)?;
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(unusable)?;
        let split = folder.tokenizer_config.get("split_special_tokens");
        tokenizer.set_encode_special_tokens(split.and_then(Value::as_bool).unwrap_or(false));

        let mut eos_token_ids =
            generation::eos_token_ids(&folder.generation_config, &folder.config);
        let eos = special.named.iter().find(|(name, _)| name == "eos_token");
        let eos = eos.and_then(|(_, token)| tokenizer.token_to_id(&token.content));
        eos_token_ids.extend(eos.filter(|id| !eos_token_ids.contains(id)));
        let variables: Map<String, Value> = special
            .named
            .iter()
            .map(|(name, token)| (name.clone(), Value::from(token.content.clone())))
            .collect();
        Ok(Self {
            vocabulary: Arc::new(Vocabulary::new(&tokenizer)),
            templates: Templates::new(&folder.path, folder.templates, variables),
            eos_token_ids,
            generation_defaults: GenerationDefaults::read(&folder.generation_config),
            max_context: generation::max_context(&folder.config),
            tokenizer: Arc::new(tokenizer),
        })
    }

    /// The token ids of a text. `add_special_tokens` adds what the tokenizer
    /// puts around a text (BOS for many models); a rendered chat has it already.
    ///
    /// # Errors
    /// [`TextError::Encode`] when the tokenizer has no token for some character.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self
            .tokenizer
            .encode_fast(text, add_special_tokens)
            .map_err(TextError::Encode)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of token ids; unknown ids have none.
    ///
    /// # Errors
    /// [`TextError::Decode`] when the tokenizer's decoder fails.
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> Result<String, TextError> {
        self.tokenizer
            .decode(tokens, skip_special)
            .map_err(TextError::Decode)
    }

    /// The text of one token, with U+FFFD for bytes that are no UTF-8 alone.
    #[must_use]
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.vocabulary.bytes(id)).into_owned()
    }

    /// The bytes that one token stands for; empty for an unknown id.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.vocabulary.bytes(id).to_vec()
    }

    /// The token as the vocabulary spells it (`Ġthe`, `▁the`).
    #[must_use]
    pub fn token_piece(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }

    /// The token that is exactly this text, if there is one.
    #[must_use]
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.tokenizer.token_to_id(text)
    }

    /// Whether the token is special: markup, not text.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.vocabulary.is_special(id)
    }

    /// Whether the vocabulary has a token of this id.
    #[must_use]
    pub fn is_token(&self, id: u32) -> bool {
        self.vocabulary.is_known(id)
    }

    /// The number of token ids, added tokens included. A model's head may be
    /// larger (padding), so ids beyond it can still occur.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }

    /// The ids that end a text: those of the model's config files and the tokenizer's.
    #[must_use]
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.eos_token_ids
    }

    /// The sampling that the model's authors suggest.
    #[must_use]
    pub fn generation_defaults(&self) -> &GenerationDefaults {
        &self.generation_defaults
    }

    /// The context length in tokens, where `config.json` states it.
    #[must_use]
    pub fn max_context(&self) -> Option<u32> {
        self.max_context
    }

    /// Whether the model brings a chat template.
    #[must_use]
    pub fn has_chat_template(&self) -> bool {
        !self.templates.is_empty()
    }

    /// Whether a text is in the source of one of the model's chat templates: templates
    /// show how the model writes what has a form, such as tool calls.
    #[must_use]
    pub fn template_contains(&self, text: &str) -> bool {
        self.templates.contain(text)
    }

    /// Renders a chat to the prompt's text, to be encoded without special
    /// tokens.
    ///
    /// # Errors
    /// [`TextError::NoTemplate`], [`TextError::BadTemplate`],
    /// [`TextError::BadChat`], [`TextError::Raised`], [`TextError::Render`].
    pub fn render_chat(&self, input: ChatInput<'_>) -> Result<String, TextError> {
        self.templates.render(input)
    }

    /// Whether `rendered`, the prompt that this chat was rendered to, would be another one without
    /// its tools or documents. Where it would not, the model does not see them.
    #[must_use]
    pub fn shows(&self, extra: Extra, input: ChatInput<'_>, rendered: &str) -> bool {
        self.templates.shows(extra, input, rendered)
    }

    /// Fits messages to the template: where it prints `content` as it is
    /// (most templates of text models), a list of text parts becomes one
    /// string, its parts joined by line feeds. Templates that read the parts
    /// themselves get them unchanged, and so does a `chat_template_override`.
    #[must_use]
    pub fn fit_content(&self, messages: Value) -> Value {
        self.templates.fit_content(messages)
    }
}
