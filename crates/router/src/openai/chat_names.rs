//! What the APIs of chats call the same things, for the errors that name a field.

/// The names of one API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChatNames {
    /// The conversation.
    pub messages: &'static str,
    /// The most output tokens.
    pub max_tokens: &'static str,
    /// The form of the answer, and the JSON schema in it.
    pub format: &'static str,
    pub schema: &'static str,
    /// What an item of `tools` has its function in, with a dot before.
    pub function: &'static str,
}

/// Those of `/v1/chat/completions`.
pub const CHAT: ChatNames = ChatNames {
    messages: "messages",
    max_tokens: "max_tokens",
    format: "response_format",
    schema: "response_format.json_schema.schema",
    function: ".function",
};

/// Those of `/v1/responses`.
pub const RESPONSES: ChatNames = ChatNames {
    messages: "input",
    max_tokens: "max_output_tokens",
    format: "text.format",
    schema: "text.format.schema",
    function: "",
};

impl Default for ChatNames {
    fn default() -> Self {
        CHAT
    }
}
