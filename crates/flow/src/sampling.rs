//! How tokens are sampled, and what is told of their probabilities.

use std::collections::HashMap;

/// Sampling of one request, as workers get it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SamplingParams {
    /// Always set: the router draws one if the client gave none.
    pub seed: u64,
    /// 0: greedy.
    pub temperature: f32,
    /// 0: off.
    pub top_k: u32,
    /// In (0, 1]; 1: off.
    pub top_p: f32,
    /// In [0, 1]; 0: off.
    pub min_p: f32,
    /// Over output tokens.
    pub presence_penalty: f32,
    /// Over output tokens.
    pub frequency_penalty: f32,
    /// Over prompt and output tokens; 1: off.
    pub repetition_penalty: f32,
    pub logit_bias: HashMap<u32, f32>,
    /// The model's EOS included unless the client ignores it.
    pub stop_token_ids: Vec<u32>,
    /// Output tokens of a choice, at least 1.
    pub max_tokens: u32,
    /// Stop tokens cannot be sampled before this many.
    pub min_tokens: u32,
    /// How many alternatives to report with each output token; `None`: no logprobs.
    pub logprobs: Option<u32>,
    /// The same for the prompt's tokens.
    pub prompt_logprobs: Option<u32>,
    /// What the answer's text must match as a whole; `None`: any text.
    pub grammar: Option<Grammar>,
}

/// What a text must match as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Grammar {
    /// A JSON schema.
    JsonSchema(String),
    /// A regular expression in Rust's syntax.
    Regex(String),
    /// A grammar in llguidance's form of Lark.
    Lark(String),
}

/// A token's log probability, and those of the most likely tokens in its place.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TokenLogprob {
    pub token: u32,
    pub logprob: f32,
    /// 1: the most likely.
    pub rank: u32,
    pub top: Vec<TopLogprob>,
}

/// One alternative.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct TopLogprob {
    pub token: u32,
    pub logprob: f32,
}
