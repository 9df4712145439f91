//! What a grammar is compiled over: single bytes, and a model's special tokens by name and id.

use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokRxInfo, TokTrie};
use tasuki_text::ModelText;

/// Special tokens have their ids; bytes have those behind the vocabulary.
///
/// # Panics
/// Never: the library refuses only slices, and there are none.
pub fn factory(text: &ModelText) -> ParserFactory {
    let names = (0..).take(text.vocab_size()).map(|id| special(text, id));
    let mut words: Vec<Vec<u8>> = names.map(Option::unwrap_or_default).collect();
    words.extend((0..=u8::MAX).map(|byte| vec![byte]));
    let count = u32::try_from(words.len()).unwrap_or(u32::MAX);
    let eos = text.eos_token_ids().first().copied();
    let eos = eos.filter(|id| *id < count).unwrap_or(count - 1);
    let trie = TokTrie::from(&TokRxInfo::new(count, eos), &words);
    let tokens: llguidance::toktrie::TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new(&tokens, InferenceCapabilities::default(), &[])
        .expect("no slices can be refused");
    factory.quiet().limits_mut().verbose_errors = false;
    factory
}

/// The name of a special token behind the library's marker. Like the workers' tokenizers, tokens
/// that look like markup count as special.
fn special(text: &ModelText, id: u32) -> Option<Vec<u8>> {
    let name = text.token_piece(id)?;
    let is_markup = name.len() > 2 && name.starts_with('<') && name.ends_with('>');
    let is_byte = name.len() == 6 && name.starts_with("<0x");
    (text.is_special(id) || is_markup && !is_byte).then(|| {
        let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
        word.extend(name.as_bytes());
        word
    })
}
