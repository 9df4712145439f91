//! Renders a chat with the model's own Jinja template, character for character
//! as `transformers.apply_chat_template` does.
//!
//! minijinja is the engine; the modules here close what lies between it and
//! Jinja2 as transformers sets it up: Python's `str`, `repr` and `json.dumps`,
//! the methods of `str`, `dict` and `list`, `{% generation %}`,
//! `raise_exception`, `strftime_now`.
//!
//! What still differs is listed, with reasons, as `DEVIATIONS` in
//! `tests/golden.rs`: mostly templates that Python fails on and minijinja does
//! not. Beyond that list, `dict.items` and its like without a call are the
//! item of that name, never the method.

mod arguments;
mod continuation;
mod convert;
mod engine;
mod filters;
mod functions;
mod input;
mod json;
mod limits;
mod methods;
mod python;
mod source;
mod strftime;
mod strings;
mod templates;
mod tests;

pub use input::{ChatInput, Extra};
pub(crate) use templates::Templates;
