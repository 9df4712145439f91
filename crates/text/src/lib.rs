//! The text layer of the router: workers see tokens, clients see text, and
//! this crate is what lies between. It does no network I/O, reads no clock and
//! keeps no global state; [`ModelText`] reads the model's folder once and is
//! shared from then on.
//!
//! * [`ModelText`]: tokenizer, special tokens, EOS ids, sampling defaults and
//!   chat template of one Hugging Face folder. Ids and renders equal those of
//!   Python's `transformers` (golden files in `tests/text`).
//! * [`Detokenizer`]: tokens to text as they come, never half a character.
//! * [`StopMatcher`]: stop strings across token borders.

mod chat;
mod detokenizer;
mod error;
mod model;
mod stop;

pub use chat::{ChatInput, Extra};
pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use model::{GenerationDefaults, ModelText};
pub use stop::{StopMatcher, StopStrings};
