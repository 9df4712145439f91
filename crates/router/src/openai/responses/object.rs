//! The `response` object.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use super::items::Item;
use super::types::FormatField;
use crate::error::{ApiError, ErrorDetail};
use crate::openai::answer::usage::Usage;
use crate::openai::answer::wording::AnswerInfo;

/// A response as far as it is known.
#[derive(Debug, Serialize)]
pub struct ResponseObject<'a> {
    pub id: &'a str,
    pub object: &'static str,
    /// Unix time in seconds, like the next.
    pub created_at: u64,
    pub completed_at: Option<u64>,
    pub status: Status,
    pub error: Option<ResponseError>,
    pub incomplete_details: Option<IncompleteDetails>,
    pub model: &'a str,
    pub output: &'a [Item],
    /// Once the answer has ended.
    pub usage: Option<ResponseUsage>,
    #[serde(flatten)]
    pub echoed: &'a Echoed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

#[derive(Debug, Serialize)]
pub struct IncompleteDetails {
    pub reason: &'static str,
}

/// Why a response failed.
#[derive(Debug, Serialize)]
pub struct ResponseError {
    pub code: &'static str,
    pub message: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub param: Option<String>,
}

/// `usage`, under this API's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ResponseUsage {
    input_tokens: u64,
    input_tokens_details: InputTokensDetails,
    output_tokens: u64,
    output_tokens_details: OutputTokensDetails,
    total_tokens: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct InputTokensDetails {
    cached_tokens: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct OutputTokensDetails {
    reasoning_tokens: u64,
}

/// What the answer repeats of the request, and what is the same in all answers.
#[derive(Debug, Default, Serialize)]
pub struct Echoed {
    pub instructions: Option<String>,
    pub max_output_tokens: Option<u32>,
    pub metadata: BTreeMap<String, String>,
    pub parallel_tool_calls: bool,
    pub reasoning: EchoedReasoning,
    pub text: EchoedText,
    pub tool_choice: Value,
    pub tools: Vec<Value>,
    pub user: Option<String>,
    pub safety_identifier: Option<Value>,
    pub prompt_cache_key: Option<Value>,
    /// As sampled with.
    pub temperature: f32,
    pub top_p: f32,
    #[serde(flatten)]
    pub fixed: Fixed,
}

#[derive(Debug, Default, Serialize)]
pub struct EchoedReasoning {
    pub effort: Option<String>,
    pub summary: Option<String>,
}

#[derive(Debug, Default, Serialize)]
pub struct EchoedText {
    pub format: FormatField,
    pub verbosity: &'static str,
}

/// What no request can change here.
#[derive(Debug, Serialize)]
pub struct Fixed {
    background: bool,
    max_tool_calls: Option<u32>,
    previous_response_id: Option<String>,
    service_tier: &'static str,
    store: bool,
    top_logprobs: u32,
    truncation: &'static str,
}

impl Default for Fixed {
    fn default() -> Self {
        Self {
            background: false,
            max_tool_calls: None,
            previous_response_id: None,
            service_tier: "default",
            store: false,
            top_logprobs: 0,
            truncation: "disabled",
        }
    }
}

impl<'a> ResponseObject<'a> {
    /// One that has just begun.
    pub fn new(info: &'a AnswerInfo, output: &'a [Item], echoed: &'a Echoed) -> Self {
        Self {
            id: &info.id,
            object: "response",
            created_at: info.created,
            completed_at: None,
            status: Status::InProgress,
            error: None,
            incomplete_details: None,
            model: &info.model,
            output,
            usage: None,
            echoed,
        }
    }
}

impl ResponseUsage {
    /// `reasoning`: how many of the output tokens are.
    pub fn new(usage: Usage, reasoning: u64) -> Self {
        Self {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: InputTokensDetails {
                cached_tokens: usage.prompt_tokens_details.cached_tokens,
            },
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputTokensDetails {
                reasoning_tokens: reasoning.min(usage.completion_tokens),
            },
            total_tokens: usage.total_tokens,
        }
    }
}

impl From<&ApiError> for ResponseError {
    fn from(error: &ApiError) -> Self {
        let ErrorDetail {
            message,
            kind,
            param,
            code,
        } = error.body().error;
        Self {
            code: code.unwrap_or("server_error"),
            message,
            kind,
            param,
        }
    }
}
