//! Special tokens: their names for templates, and those that only
//! `tokenizer_config.json` declares. The rules are those of transformers 5.

use serde_json::{Map, Value};
use tokenizers::{AddedToken, Tokenizer};

use super::folder::Folder;

const NAMED: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// What the config files say about special tokens.
#[derive(Debug, Default)]
pub(super) struct SpecialTokens {
    /// `bos_token` and so on: the variables that chat templates see.
    pub named: Vec<(String, AddedToken)>,
    /// Special tokens without a name.
    extra: Vec<AddedToken>,
    /// `added_tokens_decoder`, by id.
    listed: Vec<(u32, AddedToken)>,
    /// The older `added_tokens.json`, by id; `tokenizer.json` wins over it.
    older: Vec<(u32, AddedToken)>,
}

impl SpecialTokens {
    pub fn read(folder: &Folder) -> Self {
        let mut config = folder.tokenizer_config.clone();
        if !config.contains_key("added_tokens_decoder") {
            config.extend(folder.special_tokens_map.clone());
        }
        let mut tokens = Self::default();
        for (key, value) in &config {
            let is_named = NAMED.contains(&key.as_str());
            if is_named || (key.ends_with("_token") && value.is_string()) {
                let token = special_token(value);
                tokens.named.extend(token.map(|token| (key.clone(), token)));
            }
        }
        if let Some(Value::Object(named)) = config.get("extra_special_tokens") {
            for (name, value) in named {
                let token = special_token(value);
                tokens
                    .named
                    .extend(token.map(|token| (name.clone(), token)));
            }
        }
        // The order of new tokens gives their ids.
        let place = |key: &String| NAMED.iter().position(|name| name == key);
        let last = NAMED.len();
        tokens
            .named
            .sort_by_key(|(key, _)| place(key).unwrap_or(last));
        let extra = ["extra_special_tokens", "additional_special_tokens"]
            .iter()
            .filter_map(|key| config.get(*key)?.as_array())
            .find(|list| !list.is_empty());
        let extra = extra.into_iter().flatten();
        tokens.extra = extra.filter_map(special_token).collect();
        if let Some(Value::Object(listed)) = config.get("added_tokens_decoder") {
            for (id, value) in listed {
                if let (Ok(id), Some(token)) = (id.parse(), added_token(value, false)) {
                    tokens.listed.push((id, token));
                }
            }
            tokens.listed.sort_by_key(|(id, _)| *id);
        } else {
            for (content, id) in &folder.added_tokens {
                let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
                let mut special = tokens.named.iter().map(|(_, token)| token);
                let special = special.any(|token| token.content == *content);
                let token = AddedToken::from(content.clone(), special);
                tokens.older.extend(id.map(|id| (id, token)));
            }
            tokens.older.sort_by_key(|(id, _)| *id);
        }
        tokens
    }

    /// Makes known to the tokenizer what only the config files declare.
    pub fn add_to(&self, tokenizer: &mut Tokenizer) -> tokenizers::Result<()> {
        let known = tokenizer.get_added_tokens_decoder();
        let mut contents: Vec<String> = known.values().map(|t| t.content.clone()).collect();
        let mut missing = Vec::new();
        for (id, token) in &self.listed {
            if known.get(id).is_none_or(|other| !same(other, token)) {
                contents.push(token.content.clone());
                missing.push(token.clone());
            }
        }
        let older = self.older.iter().filter(|(id, _)| !known.contains_key(id));
        let named = self.named.iter().map(|(_, token)| token);
        for token in older
            .map(|(_, token)| token)
            .chain(named)
            .chain(&self.extra)
        {
            if !contents.contains(&token.content) {
                contents.push(token.content.clone());
                missing.push(token.clone());
            }
        }
        if !missing.is_empty() {
            tokenizer.add_tokens(missing)?;
        }
        // A token with a name is special, also where `tokenizer.json` has it as text.
        let added = tokenizer.get_added_tokens_decoder().into_values();
        let mut text: Vec<AddedToken> = added
            .filter(|token| {
                let mut named = self.named.iter();
                !token.special && named.any(|(_, each)| each.content == token.content)
            })
            .collect();
        for token in &mut text {
            token.special = true;
        }
        tokenizer.add_special_tokens(text)?;
        Ok(())
    }
}

/// A token given as its text or as an object.
fn special_token(value: &Value) -> Option<AddedToken> {
    match value {
        Value::String(text) => Some(AddedToken::from(text.clone(), true)),
        Value::Object(_) => added_token(value, true),
        _ => None,
    }
}

fn added_token(value: &Value, special: bool) -> Option<AddedToken> {
    let object: &Map<String, Value> = value.as_object()?;
    let flag =
        |key: &str, default: bool| object.get(key).and_then(Value::as_bool).unwrap_or(default);
    let special = special || flag("special", false);
    let content = object.get("content")?.as_str()?;
    Some(
        AddedToken::from(content, special)
            .single_word(flag("single_word", false))
            .lstrip(flag("lstrip", false))
            .rstrip(flag("rstrip", false))
            .normalized(flag("normalized", !special)),
    )
}

fn same(a: &AddedToken, b: &AddedToken) -> bool {
    let flags = |t: &AddedToken| (t.single_word, t.lstrip, t.rstrip, t.normalized, t.special);
    a.content == b.content && flags(a) == flags(b)
}
