//! The fields of requests, as clients send them. Every number is read as wide
//! as JSON has it, so that `validate` can name a value that is out of range.

use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::openai::chat::request::ChatNames;

/// What `/v1/chat/completions` and `/v1/completions` have in common.
#[derive(Debug, Default, Deserialize)]
pub struct CommonFields {
    pub model: Option<String>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub n: Option<i64>,
    pub best_of: Option<i64>,
    pub max_tokens: Option<i64>,
    pub max_completion_tokens: Option<i64>,
    pub min_tokens: Option<i64>,
    pub ignore_eos: Option<bool>,
    pub stop: Option<OneOrMany>,
    pub stop_token_ids: Option<Vec<i64>>,
    pub include_stop_str_in_output: Option<bool>,
    pub skip_special_tokens: Option<bool>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub logit_bias: Option<HashMap<String, f64>>,
    pub seed: Option<i64>,
    pub response_format: Option<ResponseFormat>,
    pub guided_json: Option<Box<RawValue>>,
    pub guided_regex: Option<String>,
    pub guided_choice: Option<Vec<String>>,
    pub guided_grammar: Option<String>,
    pub guided_json_object: Option<bool>,
    pub guided_whitespace_pattern: Option<String>,
    pub structured_outputs: Option<StructuredOutputs>,
    /// SGLang's name for it, and the next one.
    pub json_schema: Option<Box<RawValue>>,
    pub regex: Option<String>,
    /// Whose request it is, where no header says it.
    pub user: Option<String>,
    /// Of requests that wait, less goes first.
    pub priority: Option<i64>,
    /// Keeps this request's prefix cache apart from that of others.
    pub cache_salt: Option<String>,
    pub return_token_ids: Option<bool>,
    /// Puts `timings` into the body of a response that is not streamed.
    pub timings: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamOptions {
    pub include_usage: Option<bool>,
    /// With `include_usage`: the usage so far in every chunk that has tokens.
    pub continuous_usage_stats: Option<bool>,
    /// Not done: chunks have no padding.
    pub include_obfuscation: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResponseFormat {
    #[serde(rename = "type")]
    pub kind: String,
    pub json_schema: Option<NamedSchema>,
    #[serde(skip)]
    pub names: ChatNames,
}

/// `response_format.json_schema`. Its name and description are for the client's own use, and every
/// schema is followed strictly.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamedSchema {
    pub schema: Option<Box<RawValue>>,
    #[serde(rename = "name", default)]
    pub _name: IgnoredAny,
    #[serde(rename = "description", default)]
    pub _description: IgnoredAny,
    #[serde(rename = "strict", default)]
    pub _strict: IgnoredAny,
}

/// vLLM's `structured_outputs`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StructuredOutputs {
    pub json: Option<Box<RawValue>>,
    pub regex: Option<String>,
    pub choice: Option<Vec<String>>,
    pub grammar: Option<String>,
    pub json_object: Option<bool>,
    pub whitespace_pattern: Option<String>,
    pub disable_any_whitespace: Option<bool>,
    pub disable_additional_properties: Option<bool>,
    /// There is one way of doing it.
    #[serde(rename = "disable_fallback")]
    pub _disable_fallback: Option<bool>,
    pub structural_tag: Option<Value>,
}

/// What `/v1/chat/completions` and `/tokenize` need to render a conversation.
#[derive(Debug, Default, Deserialize)]
pub struct TemplateFields {
    pub messages: Option<Vec<Value>>,
    pub tools: Option<Vec<Value>>,
    pub tool_choice: Option<Value>,
    pub documents: Option<Value>,
    pub add_generation_prompt: Option<bool>,
    pub continue_final_message: Option<bool>,
    pub add_special_tokens: Option<bool>,
    pub chat_template: Option<String>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// One of these, by OpenAI's name for it.
    pub reasoning_effort: Option<String>,
    #[serde(skip)]
    pub names: ChatNames,
}

/// The rest of `/v1/chat/completions`.
#[derive(Debug, Default, Deserialize)]
pub struct ChatFields {
    pub logprobs: Option<bool>,
    pub top_logprobs: Option<i64>,
    pub parallel_tool_calls: Option<bool>,
}

/// The rest of `/v1/completions`.
#[derive(Debug, Default, Deserialize)]
pub struct CompletionFields {
    pub prompt: Option<PromptField>,
    pub echo: Option<bool>,
    pub suffix: Option<String>,
    pub logprobs: Option<i64>,
    pub add_special_tokens: Option<bool>,
}

/// The rest of `/tokenize`.
#[derive(Debug, Default, Deserialize)]
pub struct TokenizeFields {
    pub model: Option<String>,
    pub prompt: Option<String>,
    pub return_token_strs: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
pub struct DetokenizeFields {
    pub model: Option<String>,
    pub tokens: Option<Vec<i64>>,
}

/// A string, or a list of strings.
#[derive(Debug, PartialEq, Eq)]
pub struct OneOrMany(pub Vec<String>);

impl<'de> Deserialize<'de> for OneOrMany {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Strings;
        impl<'de> Visitor<'de> for Strings {
            type Value = OneOrMany;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of strings")
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<OneOrMany, E> {
                Ok(OneOrMany(vec![value.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<OneOrMany, A::Error> {
                let mut strings = Vec::new();
                while let Some(string) = seq.next_element()? {
                    strings.push(string);
                }
                Ok(OneOrMany(strings))
            }
        }
        deserializer.deserialize_any(Strings)
    }
}

/// The four forms of a completion's prompt.
#[derive(Debug, PartialEq, Eq)]
pub enum PromptField {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<i64>),
    TokenLists(Vec<Vec<i64>>),
}

impl<'de> Deserialize<'de> for PromptField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptVisitor)
    }
}

struct PromptVisitor;

const PROMPT_FORMS: &str =
    "a string, a list of strings, a list of token ids or a list of lists of token ids";

impl<'de> Visitor<'de> for PromptVisitor {
    type Value = PromptField;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PROMPT_FORMS)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<PromptField, E> {
        Ok(PromptField::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<PromptField, A::Error> {
        fn rest<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(
            first: T,
            seq: &mut A,
        ) -> Result<Vec<T>, A::Error> {
            let mut items = vec![first];
            while let Some(item) = seq.next_element()? {
                items.push(item);
            }
            Ok(items)
        }
        Ok(match seq.next_element()? {
            None => PromptField::Texts(Vec::new()),
            Some(PromptItem::Text(first)) => PromptField::Texts(rest(first, &mut seq)?),
            Some(PromptItem::Token(first)) => PromptField::Tokens(rest(first, &mut seq)?),
            Some(PromptItem::Tokens(first)) => PromptField::TokenLists(rest(first, &mut seq)?),
        })
    }
}

/// What stands first in a prompt list; the others must be of its kind.
enum PromptItem {
    Text(String),
    Token(i64),
    Tokens(Vec<i64>),
}

impl<'de> Deserialize<'de> for PromptItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Item;
        impl<'de> Visitor<'de> for Item {
            type Value = PromptItem;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id or a list of token ids")
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<PromptItem, E> {
                Ok(PromptItem::Text(value.to_owned()))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<PromptItem, E> {
                Ok(PromptItem::Token(value))
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<PromptItem, E> {
                Ok(PromptItem::Token(i64::try_from(value).unwrap_or(i64::MAX)))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<PromptItem, A::Error> {
                let mut tokens = Vec::new();
                while let Some(token) = seq.next_element()? {
                    tokens.push(token);
                }
                Ok(PromptItem::Tokens(tokens))
            }
        }
        deserializer.deserialize_any(Item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(json: &str) -> Result<PromptField, serde_json::Error> {
        serde_json::from_str(json)
    }

    #[test]
    fn a_prompt_has_four_forms() {
        assert_eq!(prompt(r#""a""#).unwrap(), PromptField::Text("a".into()));
        assert_eq!(
            prompt(r#"["a","b"]"#).unwrap(),
            PromptField::Texts(vec!["a".into(), "b".into()])
        );
        assert_eq!(prompt("[1,-2]").unwrap(), PromptField::Tokens(vec![1, -2]));
        assert_eq!(
            prompt("[[1],[]]").unwrap(),
            PromptField::TokenLists(vec![vec![1], vec![]])
        );
    }

    #[test]
    fn other_forms_are_refused_with_the_forms_there_are() {
        assert!(prompt("{}").unwrap_err().to_string().contains(PROMPT_FORMS));
        assert!(prompt(r#"["a",1]"#).is_err());
        assert!(prompt(r#"[1,"a"]"#).is_err());
        assert!(prompt("[1.5]").is_err());
    }

    #[test]
    fn stop_is_one_or_many() {
        let one: OneOrMany = serde_json::from_str(r#""x""#).unwrap();
        let many: OneOrMany = serde_json::from_str(r#"["x","y"]"#).unwrap();
        assert_eq!((one.0.len(), many.0.len()), (1, 2));
        assert!(serde_json::from_str::<OneOrMany>("3").is_err());
    }
}
