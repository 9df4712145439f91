//! The bounds of what a request may ask, each defined once.

/// Choices per prompt.
pub const MAX_N: i64 = 128;
/// Prompts in one completions request.
pub const MAX_PROMPTS: usize = 1024;
/// Prompts times choices in one request.
pub const MAX_CHOICES: usize = 2048;
/// Alternatives per position.
pub const MAX_LOGPROBS: i64 = 20;
/// Stop strings, and the bytes of each.
pub const MAX_STOPS: usize = 16;
pub const MAX_STOP_BYTES: usize = 1024;
pub const MAX_STOP_TOKEN_IDS: usize = 128;
pub const MAX_LOGIT_BIASES: usize = 1024;
pub const LOGIT_BIAS: std::ops::RangeInclusive<f64> = -100.0..=100.0;
pub const TEMPERATURE: std::ops::RangeInclusive<f64> = 0.0..=2.0;
pub const PENALTY: std::ops::RangeInclusive<f64> = -2.0..=2.0;
pub const UNIT: std::ops::RangeInclusive<f64> = 0.0..=1.0;
/// Divisors below this make logits that are no numbers any more.
pub const REPETITION_PENALTY: std::ops::RangeInclusive<f64> = 0.01..=10.0;
pub const MAX_CACHE_SALT_BYTES: usize = 256;
/// Of a tenant's name.
pub const MAX_TENANT_BYTES: usize = 256;
pub const PRIORITY: std::ops::RangeInclusive<i32> = -1000..=1000;
/// What `/v1/completions` generates when `max_tokens` is absent, as OpenAI.
pub const DEFAULT_COMPLETION_TOKENS: u32 = 16;
/// And `/generate`, as SGLang.
pub const DEFAULT_NEW_TOKENS: u32 = 128;
