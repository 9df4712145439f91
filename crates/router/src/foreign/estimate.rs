//! What placement needs to know of a request that is not read here: about how long it is, how
//! many sequences it makes, and what it begins with.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;
use tasuki_core::Indivisible;

use super::indivisible;
use super::object::Object;
use crate::error::ApiError;

/// Bytes of text that are taken for a token.
const BYTES_PER_TOKEN: usize = 4;
/// Output tokens of a request that sets no limit, by path: engines have no limit for chats.
const CHAT_TOKENS: u32 = 256;
const COMPLETION_TOKENS: u32 = 16;
const GENERATE_TOKENS: u32 = 128;
/// A request that asks for more sequences is refused by the gate in any case.
const MOST_SEQUENCES: u32 = 1 << 20;
/// Characters of a value that an error repeats.
const MOST_SHOWN: usize = 64;

/// Of one request.
#[derive(Debug, PartialEq, Eq)]
pub struct Estimate {
    /// Stand-ins for the tokens of a prompt, equal where prompts begin alike: four bytes of
    /// text each, or the ids themselves. Of several prompts as many as one has on average.
    pub prompt: Vec<u32>,
    /// Prompts times choices.
    pub sequences: u32,
    /// Whether it has a list of prompts.
    pub is_batch: bool,
    /// What of it two workers cannot serve, one can.
    pub indivisible: Option<Indivisible>,
    pub max_tokens: u32,
    /// The limit of its output, where it sets one.
    pub asked_tokens: Option<u32>,
}

impl Estimate {
    /// # Errors
    /// `Invalid`: a number that says how much work this is has a form that engines may read
    /// otherwise than the router.
    pub fn of(path: &str, body: &Object) -> Result<Self, ApiError> {
        let mut prompts = Prompts::default();
        let (n, limit, usual_limit) = match path {
            "/generate" => {
                let field = if body.has("text") {
                    "text"
                } else {
                    "input_ids"
                };
                prompts.take(body.get(field));
                let sampling = sampling_params(body)?;
                let most = |name| -> Result<Option<u32>, ApiError> {
                    let given = sampling.iter().map(|sampling| number(sampling, name));
                    Ok(given
                        .collect::<Result<Vec<_>, _>>()?
                        .into_iter()
                        .flatten()
                        .max())
                };
                let max_tokens = most("max_new_tokens")?;
                (most("n")?, max_tokens, GENERATE_TOKENS)
            }
            "/v1/completions" => {
                prompts.take(body.get("prompt"));
                let max_tokens = number(body, "max_tokens")?;
                (number(body, "n")?, max_tokens, COMPLETION_TOKENS)
            }
            _ => {
                prompts.take_messages(body);
                let newer = number(body, "max_completion_tokens")?;
                let max_tokens = newer.or(number(body, "max_tokens")?);
                (number(body, "n")?, max_tokens, CHAT_TOKENS)
            }
        };
        let n: u32 = n.unwrap_or(1).max(1);
        let count = prompts.count.max(1);
        let each = prompts.tokens.len().div_ceil(count as usize).max(1);
        prompts.tokens.resize(each, 0);
        Ok(Self {
            prompt: prompts.tokens,
            sequences: count.saturating_mul(n).min(MOST_SEQUENCES),
            is_batch: prompts.is_list,
            indivisible: indivisible::of(path, body, n),
            max_tokens: limit.unwrap_or(usual_limit).max(1),
            asked_tokens: limit,
        })
    }
}

/// A whole number; `None`: it is not given, or negative, which engines refuse themselves. They take
/// others, such as `2.0` and `"2"`, and would do more than the router counts.
fn number(body: &Object, name: &str) -> Result<Option<u32>, ApiError> {
    let given: Option<Whole> = read(body, name, "a whole number, without quotes or a fraction")?;
    Ok(given.and_then(|given| match given {
        Whole::Positive(given) => Some(u32::try_from(given).unwrap_or(u32::MAX)),
        Whole::Negative(_) => None,
    }))
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Whole {
    Positive(u64),
    Negative(#[expect(dead_code, reason = "only its form matters")] i64),
}

/// A switch; false if it is not given.
///
/// # Errors
/// `Invalid`: it is neither true nor false.
pub fn switch(body: &Object, name: &str) -> Result<bool, ApiError> {
    Ok(read(body, name, "true or false, without quotes")?.unwrap_or(false))
}

/// The adapters that SGLang's `lora_path` names: one for all prompts, or one or none for each.
///
/// # Errors
/// `Invalid`: it has another form.
pub fn lora_path(body: &Object) -> Result<Vec<String>, ApiError> {
    let form = "the name of an adapter, or a list of names and nulls";
    let given: Option<OneOrMany> = read(body, "lora_path", form)?;
    let mut names = match given {
        None => Vec::new(),
        Some(OneOrMany::One(name)) => vec![name],
        Some(OneOrMany::Many(names)) => names.into_iter().flatten().collect(),
    };
    names.retain(|name| !name.is_empty()); // SGLang's base
    Ok(names)
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<Option<String>>),
}

/// Of `/generate`: one object, or one for each prompt.
fn sampling_params(body: &Object) -> Result<Vec<Object>, ApiError> {
    let name = "sampling_params";
    if let Some(list) = body.read(name) {
        return Ok(list);
    }
    let one: Option<Object> = read(body, name, "an object, or a list of one for each prompt")?;
    Ok(one.into_iter().collect())
}

fn read<'a, T: Deserialize<'a>>(
    body: &'a Object,
    name: &str,
    form: &str,
) -> Result<Option<T>, ApiError> {
    let Some(value) = body.get(name).filter(|_| body.has(name)) else {
        return Ok(None);
    };
    let read = serde_json::from_str(value.get());
    read.map(Some).map_err(|_| {
        let given: String = value.get().chars().take(MOST_SHOWN).collect();
        ApiError::invalid(name, format!("{name} is {given}; it must be {form}."))
    })
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
            // Engines may read more forms than these, such as ids written `1.0`.
            None => {
                let items: Vec<&RawValue> = serde_json::from_str(prompt.get()).unwrap_or_default();
                let first = items.first().map(|item| item.get());
                self.is_list = first.is_some_and(|item| item.starts_with(['[', '"']));
                if self.is_list {
                    self.count = u32::try_from(items.len()).unwrap_or(u32::MAX);
                }
            }
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

    const CHAT: &str = "/v1/chat/completions";
    const COMPLETIONS: &str = "/v1/completions";
    const GENERATE: &str = "/generate";

    fn of(path: &str, body: &str) -> Estimate {
        tried(path, body).expect("a request that can be read")
    }

    fn tried(path: &str, body: &str) -> Result<Estimate, ApiError> {
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
        let text = r#"{"messages":[{"role":"user","content":"12345678"}]}"#;
        assert_eq!(shape(CHAT, text), (2, 1, false, 256));
        let parts = r#"{"messages":[{"role":"user","content":[{"type":"text","text":"1234"},
            {"type":"image_url","image_url":{"url":"data:..."}}]}],"n":3,"max_tokens":5,
            "max_completion_tokens":7}"#;
        assert_eq!(shape(CHAT, parts), (1, 3, false, 7));
        assert_eq!(
            shape(COMPLETIONS, r#"{"prompt":[5,6,7]}"#),
            (3, 1, false, 16)
        );
        let texts = r#"{"prompt":["12345678","1234"],"n":2,"max_tokens":9}"#;
        assert_eq!(shape(COMPLETIONS, texts), (2, 4, true, 9));
        assert_eq!(shape(COMPLETIONS, r#"{"prompt":["12"]}"#), (1, 1, true, 16));
        let ids = r#"{"input_ids":[[1,2],[3,4]],"sampling_params":{"max_new_tokens":3,"n":2}}"#;
        assert_eq!(shape(GENERATE, ids), (2, 4, true, 3));
        let each = r#"{"text":["1234","5678"],"sampling_params":[{"n":3},{"max_new_tokens":9}]}"#;
        assert_eq!(shape(GENERATE, each), (1, 6, true, 9));
        let no_text = r#"{"text":null,"input_ids":[[1,2],[3,4]]}"#;
        assert_eq!(shape(GENERATE, no_text), (2, 2, true, 128));
        // Engines make whole numbers of these, and text of half a surrogate pair.
        let odd = r#"{"prompt":[[1.0],[true],[3]]}"#;
        assert_eq!(shape(COMPLETIONS, odd), (1, 3, true, 16));
        let half = r#"{"prompt":["\ud800","a"]}"#;
        assert_eq!(shape(COMPLETIONS, half), (1, 2, true, 16));
        assert_eq!(
            shape(COMPLETIONS, r#"{"prompt":[1.0,2]}"#),
            (1, 1, false, 16)
        );
        assert_eq!(shape(GENERATE, "{}"), (1, 1, false, 128));
        let nothing = r#"{"n":null,"max_tokens":null}"#;
        assert_eq!(shape(CHAT, nothing), (1, 1, false, 256));
        // The engine refuses it.
        let negative = r#"{"n":-1,"max_tokens":-3}"#;
        assert_eq!(shape(CHAT, negative), (1, 1, false, 256));
        let large = r#"{"n":4294967297}"#;
        assert_eq!(shape(CHAT, large), (1, MOST_SEQUENCES, false, 256));
        assert_eq!(shape(CHAT, r#"{"messages":7}"#), (1, 1, false, 256));
    }

    #[test]
    fn what_engines_may_read_otherwise_is_refused_by_name() {
        let params = |params: &str| format!(r#"{{"sampling_params":{params}}}"#);
        for (path, body, said) in [
            (
                COMPLETIONS,
                r#"{"n":2.0}"#.to_owned(),
                "n is 2.0; it must be a whole number",
            ),
            (COMPLETIONS, r#"{"n":"2"}"#.to_owned(), r#"n is "2"; "#),
            (
                CHAT,
                r#"{"max_tokens":1e3}"#.to_owned(),
                "max_tokens is 1e3; ",
            ),
            (
                CHAT,
                r#"{"max_completion_tokens":[7]}"#.to_owned(),
                "max_completion_tokens is [7]; ",
            ),
            (GENERATE, params(r#"{"n":"2"}"#), r#"n is "2"; "#),
            (GENERATE, params(r#"[{},{"n":2.0}]"#), "n is 2.0; "),
            (
                GENERATE,
                params("7"),
                "sampling_params is 7; it must be an object, or a list",
            ),
        ] {
            let error = tried(path, &body).expect_err(&body).to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn prompts_that_begin_alike_have_equal_beginnings() {
        let [one, other] = ["aaaabbbbcccc", "aaaabbbbdddd"]
            .map(|text| of("/v1/completions", &format!(r#"{{"prompt":"{text}"}}"#)).prompt);
        assert_eq!(one[..2], other[..2]);
        assert_ne!(one[2], other[2]);
    }
}
