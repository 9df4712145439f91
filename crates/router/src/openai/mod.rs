//! OpenAI's HTTP API: requests in, generations out to `serve`, text back.
//!
//! A request passes [`intake`], is read by `chat`, `responses`, `completions` or `generate`, runs in [`outputs`]
//! and leaves through `answer`, worded by the endpoint's `Wording`, whole or by `stream`.

mod answer;
mod answer_size;
mod body;
mod calls;
mod chat;
mod chat_names;
mod chat_request;
mod chat_shape;
mod choice;
mod clock;
mod completion_shape;
mod completions;
mod constraint;
mod conversation;
mod deadline;
mod delivery;
mod echo;
mod fields;
mod generate;
mod generate_wording;
mod generator;
pub mod intake;
mod length;
mod limits;
mod logprobs;
mod models;
mod outputs;
mod prompt;
mod responses;
mod running;
mod sampling;
mod shape;
mod stream;
pub mod tenant;
mod tokenize;
mod tools;
mod types;
mod usage;
mod validate;
mod wording;

pub use body::BodyLimits;
pub use calls::{ReasoningParser, ToolParser};
pub use chat::chat_completions;
pub use clock::unix_seconds;
pub use completions::completions;
pub use deadline::Deadline;
pub use generate::generate;
pub use generator::Generator;
pub use length::TextLimit;
pub use models::{list as list_models, retrieve as retrieve_model};
pub use responses::responses;
pub use tokenize::{detokenize, tokenize};
pub use usage::{Usage, milliseconds};

/// What the fuzzing tests read models' answers with.
#[cfg(test)]
pub mod fuzzed {
    pub use super::calls::fuzzed::{scan, scanners};
}
