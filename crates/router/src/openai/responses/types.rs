//! The fields of `/v1/responses` that chats do not have, as clients send them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// The rest is read as the fields that all endpoints share.
#[derive(Debug, Default, Deserialize)]
pub struct ResponseFields {
    /// A string, or a list of items.
    pub input: Option<Value>,
    pub instructions: Option<String>,
    pub max_output_tokens: Option<i64>,
    pub text: Option<TextField>,
    pub tools: Option<Vec<Value>>,
    pub tool_choice: Option<Value>,
    pub parallel_tool_calls: Option<bool>,
    pub reasoning: Option<ReasoningField>,
    pub metadata: Option<BTreeMap<String, String>>,
    pub safety_identifier: Option<Value>,
    pub prompt_cache_key: Option<Value>,
    pub chat_template_kwargs: Option<Map<String, Value>>,
}

/// `text`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextField {
    pub format: Option<FormatField>,
    pub verbosity: Option<String>,
}

/// `text.format`.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct FormatField {
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strict: Option<bool>,
}

/// `reasoning`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReasoningField {
    pub effort: Option<String>,
    pub summary: Option<String>,
    pub generate_summary: Option<String>,
}

impl Default for FormatField {
    /// Any text.
    fn default() -> Self {
        Self {
            kind: "text".to_owned(),
            name: None,
            description: None,
            schema: None,
            strict: None,
        }
    }
}
