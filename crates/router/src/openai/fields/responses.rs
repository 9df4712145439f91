//! All fields of OpenAI's `/v1/responses`, and those of vLLM and SGLang that mean the same there.

use super::Endpoint::Responses;
use super::Field;
use super::table::{harmless, refused, supported};

const NOT_STORED: &str =
    "nothing is stored here; leave it out and send the whole conversation as input";
const NO_BUILT_INS: &str = "there are no built-in tools; functions are called by the client";
const CACHED: &str = "Requests go where their prefix is cached by themselves";

/// In the order of `docs/api.md`.
pub const RESPONSES_FIELDS: &[Field] = &[
    supported("model", Responses, "As in chats"),
    supported(
        "input",
        Responses,
        "Text, or a list of items: `message` with text (`input_text`, `output_text`), `function_call`, \
         `function_call_output`, `reasoning`",
    ),
    supported(
        "instructions",
        Responses,
        "A system message before the input",
    ),
    supported("stream", Responses, "Typed server-sent events"),
    supported(
        "max_output_tokens",
        Responses,
        "At least 1; not given: what fits the context",
    ),
    supported("temperature", Responses, "0 to 2"),
    supported("top_p", Responses, "Above 0, at most 1"),
    supported(
        "text",
        Responses,
        "`format`: `text`, `json_object`, or `json_schema`, whose `schema` is always followed; \
         `verbosity`: only `medium`",
    ),
    supported("tools", Responses, "Of type `function` only; as in chats"),
    supported(
        "tool_choice",
        Responses,
        "`auto`, `none`, which hides the tools, `required`, or `{\"type\": \"function\", \"name\": …}`",
    ),
    supported("parallel_tool_calls", Responses, "false: at most one call"),
    supported(
        "reasoning",
        Responses,
        "`effort` is given to the chat template; `summary`: only null",
    ),
    supported("metadata", Responses, "Given back in the answer"),
    supported(
        "user",
        Responses,
        "The tenant, where --tenant-header is not given",
    ),
    supported("stop", Responses, "Up to 16 strings of 1 KiB"),
    supported(
        "ignore_eos",
        Responses,
        "Goes on after the model's end token",
    ),
    supported("top_k", Responses, "-1 or 0: off"),
    supported("min_p", Responses, "0 to 1"),
    supported("presence_penalty", Responses, "-2 to 2"),
    supported("frequency_penalty", Responses, "-2 to 2"),
    supported(
        "repetition_penalty",
        Responses,
        "0.01 to 10, of prompt and output",
    ),
    supported(
        "logit_bias",
        Responses,
        "-100 to 100 for up to 1,024 tokens",
    ),
    supported("seed", Responses, "The same seed gives the same tokens"),
    supported(
        "chat_template_kwargs",
        Responses,
        "Variables of the chat template",
    ),
    supported(
        "priority",
        Responses,
        "-1,000 to 1,000, less goes first; with --allow-request-priority",
    ),
    supported(
        "cache_salt",
        Responses,
        "Keeps the request's prefix cache apart",
    ),
    harmless("service_tier", Responses, "There is one"),
    harmless("safety_identifier", Responses, "Nobody is reported"),
    harmless("prompt_cache_key", Responses, CACHED),
    harmless(
        "prompt_cache_retention",
        Responses,
        "Prefixes stay cached while there is room",
    ),
    refused("store", Responses, &["false"], NOT_STORED),
    refused("previous_response_id", Responses, &[], NOT_STORED),
    refused("conversation", Responses, &[], NOT_STORED),
    refused(
        "background",
        Responses,
        &["false"],
        "nothing is stored here; wait for the answer, or stream it",
    ),
    refused(
        "prompt",
        Responses,
        &[],
        "prompt templates are not stored here; write the prompt into instructions and input",
    ),
    refused(
        "truncation",
        Responses,
        &["\"disabled\""],
        "an input that is too long is an error; shorten it",
    ),
    refused(
        "context_management",
        Responses,
        &["[]"],
        "inputs are taken as they are; shorten them",
    ),
    refused(
        "top_logprobs",
        Responses,
        &["0"],
        "/v1/chat/completions has logprobs",
    ),
    refused(
        "include",
        Responses,
        &["[]"],
        "answers have no logprobs, encrypted reasoning or output of built-in tools; leave it out",
    ),
    refused("max_tool_calls", Responses, &[], NO_BUILT_INS),
    refused(
        "stream_options",
        Responses,
        &["{}", "{\"include_obfuscation\":false}"],
        "events are not obfuscated",
    ),
    refused("moderation", Responses, &[], "answers are not moderated"),
    refused(
        "prompt_cache_options",
        Responses,
        &[],
        "prefixes are cached by themselves; cache_salt keeps them apart",
    ),
    refused("image", Responses, &[], "inputs are text"),
    refused("access_programs", Responses, &[], "there are none"),
    refused(
        "background_options",
        Responses,
        &[],
        "nothing runs in the background",
    ),
];
