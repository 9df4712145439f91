//! What a request says about a chat.

use serde_json::{Map, Value};

use chrono::NaiveDateTime;

/// Arguments of `apply_chat_template`, by their names there.
#[derive(Debug, Clone)]
pub struct ChatInput<'a> {
    /// A list of objects, as OpenAI's API has it.
    pub messages: Value,
    pub tools: Option<Value>,
    pub documents: Option<Value>,
    pub add_generation_prompt: bool,
    /// Leave the last message open for the model to go on with it.
    pub continue_final_message: bool,
    /// Further variables of the template; they win over special tokens.
    pub template_kwargs: Map<String, Value>,
    /// The name of one of the model's templates, or a template.
    pub chat_template_override: Option<&'a str>,
    /// What `strftime_now` formats: local time.
    pub now: NaiveDateTime,
}

/// What a chat may bring besides messages. Many templates have no place for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extra {
    Tools,
    Documents,
}

impl ChatInput<'_> {
    /// Messages and nothing else, with a generation prompt.
    #[must_use]
    pub fn new(messages: Value, now: NaiveDateTime) -> Self {
        Self {
            messages,
            tools: None,
            documents: None,
            add_generation_prompt: true,
            continue_final_message: false,
            template_kwargs: Map::new(),
            chat_template_override: None,
            now,
        }
    }
}
