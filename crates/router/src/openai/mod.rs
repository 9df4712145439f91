//! OpenAI's HTTP API: requests in, generations out to `serve`, text back.
//!
//! `request::intake` receives a request, its endpoint (`chat`, `responses`, `completions` or `generate`)
//! reads it, and `answer` sends the answer in the form that the endpoint's `Wording` gives it.

mod answer;
mod calls;
mod chat;
mod completions;
mod fields;
mod generate;
mod generator;
mod models;
mod request;
mod responses;
#[cfg(test)]
mod tests;
mod tokenize;

pub use answer::usage::{Usage, milliseconds};
pub use answer::wording::unix_seconds;
pub use calls::{ReasoningParser, ToolParser};
pub use chat::chat_completions;
pub use completions::completions;
pub use generate::generate;
pub use generator::Generator;
pub use models::{list as list_models, retrieve as retrieve_model};
pub use request::body::BodyLimits;
pub use request::tenant;
pub use responses::responses;
pub use tokenize::{detokenize, tokenize};

/// What the fuzzing tests read models' answers with.
#[cfg(test)]
pub mod fuzzed {
    pub use super::calls::fuzzed::{called, readers, scan};
    pub use super::request::constraint::usual_whitespace;
}
