//! What placement needs to know of a request that is not read here: about how long it is, how
//! many sequences it makes, and what it begins with.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::object::Object;

/// Bytes of text that are taken for a token.
const BYTES_PER_TOKEN: usize = 4;
/// Output tokens of a request that sets no limit, by path: engines have no limit for chats.
const CHAT_TOKENS: u32 = 256;
const COMPLETION_TOKENS: u32 = 16;
const GENERATE_TOKENS: u32 = 128;
/// A request that asks for more sequences is refused by the gate in any case.
const MOST_SEQUENCES: u32 = 1 << 20;

/// Of one request.
#[derive(Debug, PartialEq, Eq)]
pub struct Estimate {
    /// Stand-ins for the tokens of a prompt, equal where prompts begin alike: four bytes of
    /// text each, or the ids themselves. Of several prompts as many as one has on average.
    pub prompt: Vec<u32>,
    /// Prompts times choices.
    pub sequences: u32,
    /// Whether the engines make a list of it: several choices, or a list of prompts.
    pub is_batch: bool,
    pub max_tokens: u32,
}

impl Estimate {
    pub fn of(path: &str, body: &Object) -> Self {
        let mut prompts = Prompts::default();
        let (prompt, n, max_tokens) = match path {
            "/generate" => {
                let sampling: Object = body.read("sampling_params").unwrap_or_default();
                prompts.take(body.get("text").or(body.get("input_ids")));
                let max_tokens = sampling.read("max_new_tokens").unwrap_or(GENERATE_TOKENS);
                (&mut prompts, sampling.read("n"), max_tokens)
            }
            "/v1/completions" => {
                prompts.take(body.get("prompt"));
                let max_tokens = body.read("max_tokens").unwrap_or(COMPLETION_TOKENS);
                (&mut prompts, body.read("n"), max_tokens)
            }
            _ => {
                prompts.take_messages(body);
                let newer = body.read("max_completion_tokens");
                let max_tokens = newer.or(body.read("max_tokens")).unwrap_or(CHAT_TOKENS);
                (&mut prompts, body.read("n"), max_tokens)
            }
        };
        let n: u32 = n.unwrap_or(1).max(1);
        let count = prompt.count.max(1);
        let each = prompt.tokens.len().div_ceil(count as usize).max(1);
        prompt.tokens.resize(each, 0);
        Self {
            prompt: std::mem::take(&mut prompt.tokens),
            sequences: count.saturating_mul(n).min(MOST_SEQUENCES),
            is_batch: prompt.is_list || n > 1,
            max_tokens: max_tokens.max(1),
        }
    }
}

#[derive(Default)]
struct Prompts {
    tokens: Vec<u32>,
    count: u32,
    is_list: bool,
}

/// A text, in its place where nothing in it is escaped.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'a> Text<'a> {
    /// `None`: the value is no text.
    fn of(value: &'a RawValue) -> Option<Self> {
        serde_json::from_str(value.get()).ok()
    }
}

/// The forms of a prompt other than a single text.
#[derive(Deserialize)]
#[serde(untagged)]
enum PromptForm {
    Ids(Vec<u32>),
    Texts(Vec<String>),
    IdLists(Vec<Vec<u32>>),
}

impl Prompts {
    fn take(&mut self, prompt: Option<&RawValue>) {
        let Some(prompt) = prompt else {
            return;
        };
        if let Some(text) = Text::of(prompt) {
            return self.add_text(&text.0);
        }
        match serde_json::from_str(prompt.get()).ok() {
            Some(PromptForm::Ids(ids)) => self.tokens.extend(ids),
            Some(PromptForm::Texts(texts)) => {
                self.is_list = true;
                self.count = u32::try_from(texts.len()).unwrap_or(u32::MAX);
                texts.iter().for_each(|text| self.add_text(text));
            }
            Some(PromptForm::IdLists(lists)) => {
                self.is_list = true;
                self.count = u32::try_from(lists.len()).unwrap_or(u32::MAX);
                self.tokens.extend(lists.into_iter().flatten());
            }
            None => {}
        }
    }

    /// Of a conversation the text, and the tools: templates put them first. Images and the
    /// like do not count: what they cost only the worker knows.
    fn take_messages(&mut self, body: &Object) {
        #[derive(Deserialize)]
        struct Message<'a> {
            #[serde(borrow)]
            content: Option<&'a RawValue>,
        }
        #[derive(Deserialize)]
        struct Part<'a> {
            #[serde(borrow)]
            text: Option<Text<'a>>,
        }
        if let Some(tools) = body.get("tools").filter(|_| body.has("tools")) {
            self.add_text(tools.get());
        }
        let messages: Vec<Message<'_>> = body.read("messages").unwrap_or_default();
        for content in messages.iter().filter_map(|message| message.content) {
            if let Some(text) = Text::of(content) {
                self.add_text(&text.0);
                continue;
            }
            let parts: Vec<Part<'_>> = serde_json::from_str(content.get()).unwrap_or_default();
            for text in parts.iter().filter_map(|part| part.text.as_ref()) {
                self.add_text(&text.0);
            }
        }
    }

    fn add_text(&mut self, text: &str) {
        let (tokens, rest) = text.as_bytes().as_chunks::<BYTES_PER_TOKEN>();
        self.tokens
            .extend(tokens.iter().map(|bytes| u32::from_le_bytes(*bytes)));
        if !rest.is_empty() {
            let mut bytes = [0; BYTES_PER_TOKEN];
            bytes[..rest.len()].copy_from_slice(rest);
            self.tokens.push(u32::from_le_bytes(bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(path: &str, body: &str) -> Estimate {
        Estimate::of(path, &serde_json::from_str(body).expect("an object"))
    }

    fn shape(path: &str, body: &str) -> (usize, u32, bool, u32) {
        let estimate = of(path, body);
        (
            estimate.prompt.len(),
            estimate.sequences,
            estimate.is_batch,
            estimate.max_tokens,
        )
    }

    #[test]
    fn every_form_of_a_request_has_an_estimate() {
        let chat = "/v1/chat/completions";
        let text = r#"{"messages":[{"role":"user","content":"12345678"}]}"#;
        assert_eq!(shape(chat, text), (2, 1, false, 256));
        let parts = r#"{"messages":[{"role":"user","content":[{"type":"text","text":"1234"},
            {"type":"image_url","image_url":{"url":"data:..."}}]}],"n":3,"max_tokens":5,
            "max_completion_tokens":7}"#;
        assert_eq!(shape(chat, parts), (1, 3, true, 7));
        let completions = "/v1/completions";
        assert_eq!(
            shape(completions, r#"{"prompt":[5,6,7]}"#),
            (3, 1, false, 16)
        );
        let texts = r#"{"prompt":["12345678","1234"],"n":2,"max_tokens":9}"#;
        assert_eq!(shape(completions, texts), (2, 4, true, 9));
        assert_eq!(shape(completions, r#"{"prompt":["12"]}"#), (1, 1, true, 16));
        let ids = r#"{"input_ids":[[1,2],[3,4]],"sampling_params":{"max_new_tokens":3,"n":2}}"#;
        assert_eq!(shape("/generate", ids), (2, 4, true, 3));
        assert_eq!(shape("/generate", "{}"), (1, 1, false, 128));
        assert_eq!(shape(chat, r#"{"messages":7}"#), (1, 1, false, 256));
    }

    #[test]
    fn prompts_that_begin_alike_have_equal_beginnings() {
        let [one, other] = ["aaaabbbbcccc", "aaaabbbbdddd"]
            .map(|text| of("/v1/completions", &format!(r#"{{"prompt":"{text}"}}"#)).prompt);
        assert_eq!(one[..2], other[..2]);
        assert_ne!(one[2], other[2]);
    }
}
