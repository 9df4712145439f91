//! All fields of `/tokenize` and `/detokenize`.

use super::Endpoint::{Detokenize, Tokenize};
use super::Field;
use super::table::{refused, supported};

/// In the order of `docs/api.md`.
pub const TOKEN_FIELDS: &[Field] = &[
    supported("model", Tokenize, "As in chats"),
    supported("prompt", Tokenize, "Text"),
    supported(
        "messages",
        Tokenize,
        "In place of `prompt`: a conversation, as the chat template writes it",
    ),
    supported("tools", Tokenize, "As in chats"),
    supported("tool_choice", Tokenize, "`none` hides the tools"),
    supported("documents", Tokenize, "As in chats"),
    supported("reasoning_effort", Tokenize, "As in chats"),
    supported("chat_template", Tokenize, "As in chats"),
    supported("chat_template_kwargs", Tokenize, "As in chats"),
    supported("add_generation_prompt", Tokenize, "As in chats"),
    supported("continue_final_message", Tokenize, "As in chats"),
    supported(
        "add_special_tokens",
        Tokenize,
        "By the tokenizer; not given: true for `prompt`, false for `messages`",
    ),
    supported(
        "return_token_strs",
        Tokenize,
        "`token_strs`, the tokens as the vocabulary spells them",
    ),
    refused("mm_processor_kwargs", Tokenize, &[], "messages are text"),
    supported("model", Detokenize, "As in chats"),
    supported("tokens", Detokenize, "Token ids"),
    refused(
        "skip_special_tokens",
        Detokenize,
        &["false"],
        "leave them out of tokens",
    ),
];
