//! `tokenizer_class: LlamaTokenizer`.
//!
//! transformers 5 builds this class anew from the vocabulary and merges of
//! `tokenizer.json` instead of using the file as it is. The difference shows
//! behind special tokens and for leading spaces, so prompts would differ.
//!
//! Source: `AutoTokenizer.from_pretrained` and `LlamaTokenizer.__init__` of
//! transformers 5. Of the classes that are built anew this is the only one
//! whose result differs from the files that its models ship.

use serde_json::{Map, Value};
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence;
use tokenizers::decoders::strip::Strip;
use tokenizers::normalizers::replace::Replace;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::{DecoderWrapper, NormalizerWrapper, Tokenizer};

use super::folder::Folder;

/// Sets the tokenizer up as the class does, if the folder asks for it.
pub(super) fn apply(folder: &Folder, tokenizer: &mut Tokenizer) -> tokenizers::Result<()> {
    if !is_asked_for(folder) || is_byte_level(tokenizer) {
        return Ok(());
    }
    let flag = |name: &str, default: bool| {
        let value = folder.tokenizer_config.get(name);
        value.and_then(Value::as_bool).unwrap_or(default)
    };
    let adds_space = flag("add_prefix_space", true);
    let scheme = match (adds_space, flag("legacy", false)) {
        (false, _) => PrependScheme::Never,
        (true, false) => PrependScheme::First,
        (true, true) => PrependScheme::Always,
    };
    let mut decoders: Vec<DecoderWrapper> = vec![
        Replace::new("▁", " ")?.into(),
        ByteFallback::new().into(),
        Fuse::new().into(),
    ];
    if adds_space {
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    tokenizer.with_normalizer(None::<NormalizerWrapper>)?;
    tokenizer.with_pre_tokenizer(Some(Metaspace::new('▁', scheme, false)));
    tokenizer.with_decoder(Some(Sequence::new(decoders)));
    Ok(())
}

fn is_asked_for(folder: &Folder) -> bool {
    let text = |object: &Map<String, Value>, key: &str| -> Option<String> {
        Some(object.get(key)?.as_str()?.to_owned())
    };
    let class = text(&folder.tokenizer_config, "tokenizer_class")
        .or_else(|| text(&folder.config, "tokenizer_class"));
    let class = class
        .as_deref()
        .map(|name| name.strip_suffix("Fast").unwrap_or(name));
    class == Some("LlamaTokenizer")
        && text(&folder.config, "model_type").as_deref() == Some("llama")
        && !folder.tokenizer_config.contains_key("auto_map")
}

/// Llama 3's files name this class too, but are used as they are.
fn is_byte_level(tokenizer: &Tokenizer) -> bool {
    let mentions = |part: Option<String>| part.is_some_and(|json| json.contains("\"ByteLevel\""));
    let decoder = tokenizer.get_decoder().map(serde_json::to_string);
    let splitter = tokenizer.get_pre_tokenizer().map(serde_json::to_string);
    mentions(decoder.and_then(Result::ok)) || mentions(splitter.and_then(Result::ok))
}
