//! `continue_final_message`: the prompt ends where the last message does.
//!
//! As in transformers, a tag behind the last message shows where it went.

use serde_json::Value as Json;

use super::python::{is_space, strip};
use crate::TextError;

const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";
const FIELD: &str = "content";
const NAME: &str = "continue_final_message";

/// The text that is to be continued.
#[derive(Debug)]
pub(super) struct Continuation {
    text: String,
}

impl Continuation {
    /// Puts the tag behind the text of the last message.
    pub fn mark(messages: &mut [Json], template: &str) -> Result<Self, TextError> {
        let bad = |message: &str| TextError::bad_chat(NAME, format!("{NAME} is set but {message}"));
        let last = messages
            .last_mut()
            .ok_or_else(|| bad("there is no message"))?;
        if !template.contains(FIELD) {
            return Err(bad("the chat template does not use \"content\""));
        }
        let text = match last.get_mut(FIELD) {
            Some(Json::String(text)) => text,
            Some(Json::Array(parts)) => parts
                .iter_mut()
                .rev()
                .find_map(|part| match part.get_mut("text") {
                    Some(Json::String(text)) => Some(text),
                    _ => None,
                })
                .ok_or_else(|| bad("the final message has no text to continue"))?,
            _ => return Err(bad("the final message has no \"content\" to continue")),
        };
        let continuation = Self { text: text.clone() };
        text.push_str(TAG);
        Ok(continuation)
    }

    /// Cuts the render where the tag is.
    pub fn cut(&self, mut rendered: String) -> Result<String, TextError> {
        let tag = strip(TAG);
        let at = rendered
            .rfind(tag)
            .filter(|_| rendered.contains(strip(&self.text)))
            .ok_or_else(|| {
                let message = "the chat template does not show the final message as it is";
                TextError::bad_chat(NAME, format!("{NAME} is set but {message}"))
            })?;
        let whole = rendered[at..].starts_with(TAG);
        rendered.truncate(at);
        if !whole {
            // The template trims messages, so what is before the tag may be its own.
            rendered.truncate(rendered.trim_end_matches(is_space).len());
        }
        Ok(rendered)
    }
}
