//! All fields of OpenAI's two generating endpoints, and those that vLLM and SGLang add.

use super::Endpoint::{Both, Chat, Completions};
use super::{Endpoint, Field, Policy};

/// In the order of `docs/api.md`.
pub const FIELDS: &[Field] = &[
    supported(
        "model",
        Both,
        "A served name or alias; may be left out where one model is served",
    ),
    supported(
        "messages",
        Chat,
        "The conversation; content is text, or a list of text parts",
    ),
    supported(
        "prompt",
        Completions,
        "Text, token ids, or a list of either",
    ),
    supported("stream", Both, "Server-sent events"),
    supported(
        "stream_options",
        Both,
        "`include_usage`, with it `continuous_usage_stats`; `include_obfuscation` is a 400",
    ),
    supported(
        "n",
        Both,
        "Choices, 1 to 128, and no more than a worker generates at once (`--max-running-requests`)",
    ),
    supported("best_of", Both, "Only equal to `n`"),
    supported(
        "max_tokens",
        Both,
        "At least 1, in completions with `echo` 0 too; not given: chats fill the context, completions have 16",
    ),
    supported("max_completion_tokens", Both, "The newer name, which wins"),
    supported("min_tokens", Both, "No stop before"),
    supported("ignore_eos", Both, "Goes on after the model's end token"),
    supported("stop", Both, "Up to 16 strings of 1 KiB"),
    supported("stop_token_ids", Both, "Up to 128 further end tokens"),
    supported(
        "include_stop_str_in_output",
        Both,
        "Keeps the stop string in the text",
    ),
    supported(
        "skip_special_tokens",
        Both,
        "Leaves special tokens out of the text",
    ),
    supported("temperature", Both, "0 to 2"),
    supported("top_p", Both, "Above 0, at most 1"),
    supported("top_k", Both, "-1 or 0: off"),
    supported("min_p", Both, "0 to 1"),
    supported("presence_penalty", Both, "-2 to 2"),
    supported("frequency_penalty", Both, "-2 to 2"),
    supported(
        "repetition_penalty",
        Both,
        "0.01 to 10, of prompt and output",
    ),
    supported("logit_bias", Both, "-100 to 100 for up to 1,024 tokens"),
    supported(
        "seed",
        Both,
        "A signed number of 64 bits; the same seed gives the same tokens, also after a fault",
    ),
    supported(
        "logprobs",
        Both,
        "Chats: true or false; completions: alternatives, up to 20",
    ),
    supported("top_logprobs", Chat, "Alternatives, up to 20"),
    supported(
        "echo",
        Completions,
        "The prompt before the answer, with its log probabilities",
    ),
    supported("suffix", Completions, "Only empty"),
    supported(
        "response_format",
        Both,
        "`text`, `json_object`, or `json_schema`, whose `schema` is always followed",
    ),
    supported("guided_json", Both, "A JSON schema, or a string of one"),
    supported("guided_json_object", Both, "true: any JSON object"),
    supported(
        "guided_regex",
        Both,
        "A regular expression in Rust's syntax",
    ),
    supported("guided_choice", Both, "One of up to 1,024 strings"),
    supported(
        "guided_grammar",
        Both,
        "A grammar in llguidance's form of Lark",
    ),
    supported(
        "guided_whitespace_pattern",
        Both,
        "White space in JSON, a regular expression",
    ),
    supported(
        "structured_outputs",
        Both,
        "vLLM's object: `json`, `regex`, `choice`, `grammar` or `json_object`; `whitespace_pattern`, \
         `disable_any_whitespace`",
    ),
    supported("json_schema", Both, "SGLang's name of `guided_json`"),
    supported("regex", Both, "SGLang's name of `guided_regex`"),
    supported(
        "tools",
        Chat,
        "Shown to the model by its chat template; calls in the answer are parsed, see --tool-parser. \
         With `auto` a 400 where the template shows no tools",
    ),
    supported(
        "tool_choice",
        Chat,
        "`auto`, `none`, which hides the tools, `required`, or a function, which is called once",
    ),
    supported("parallel_tool_calls", Chat, "false: at most one call"),
    supported(
        "documents",
        Chat,
        "Given to the chat template; a 400 where it shows none",
    ),
    supported(
        "reasoning_effort",
        Chat,
        "A string, given to the chat template unless `chat_template_kwargs` has it",
    ),
    supported("chat_template", Chat, "With --allow-request-chat-template"),
    supported(
        "chat_template_kwargs",
        Chat,
        "Variables of the chat template, such as `enable_thinking`",
    ),
    supported(
        "add_generation_prompt",
        Chat,
        "Ends the prompt with the beginning of an answer [true]",
    ),
    supported(
        "continue_final_message",
        Chat,
        "The answer continues the last message",
    ),
    supported(
        "add_special_tokens",
        Both,
        "By the tokenizer, before the prompt",
    ),
    supported(
        "user",
        Both,
        "The tenant, where --tenant-header is not given",
    ),
    supported(
        "priority",
        Both,
        "-1,000 to 1,000, less goes first; with --allow-request-priority",
    ),
    supported("cache_salt", Both, "Keeps the request's prefix cache apart"),
    supported("return_token_ids", Both, "`token_ids` of prompt and answer"),
    supported(
        "timings",
        Both,
        "Where the time went, with a whole answer; a stream's last chunk has it beside `usage`",
    ),
    harmless("metadata", Both, "Nothing is stored"),
    harmless("store", Both, "Nothing is stored"),
    harmless("service_tier", Both, "There is one"),
    harmless("safety_identifier", Both, "Nobody is reported"),
    harmless(
        "prompt_cache_key",
        Both,
        "Requests go where their prefix is cached by themselves",
    ),
    harmless(
        "prompt_cache_retention",
        Both,
        "Prefixes stay cached while there is room",
    ),
    harmless(
        "guided_decoding_backend",
        Both,
        "There is one, llguidance; what it cannot do is a 400",
    ),
    harmless("prediction", Chat, "It would only change the speed"),
    harmless("request_id", Both, "The answer has an id of its own"),
    harmless("rid", Both, "The answer has an id of its own"),
    refused("functions", Chat, NOTHING, "use tools"),
    refused("function_call", Chat, &["\"none\""], "use tool_choice"),
    refused("modalities", Chat, &["[\"text\"]"], "answers are text"),
    refused("audio", Chat, NOTHING, "answers are text"),
    refused("web_search_options", Chat, NOTHING, "there is no search"),
    refused(
        "verbosity",
        Chat,
        &["\"medium\""],
        "say it in the prompt, or by chat_template_kwargs",
    ),
    refused(
        "thinking",
        Chat,
        NOTHING,
        "use chat_template_kwargs, as the model's template names it",
    ),
    refused(
        "enable_thinking",
        Chat,
        NOTHING,
        "put it into chat_template_kwargs",
    ),
    refused(
        "include_reasoning",
        Chat,
        &["true"],
        "the operator decides, with --reasoning-parser",
    ),
    refused(
        "separate_reasoning",
        Chat,
        &["true"],
        "the operator decides, with --reasoning-parser",
    ),
    refused(
        "stream_reasoning",
        Chat,
        &["true"],
        "the operator decides, with --reasoning-parser",
    ),
    refused("mm_processor_kwargs", Chat, NOTHING, "messages are text"),
    refused("structural_tag", Both, NOTHING, NO_TAGS),
    refused("ebnf", Both, NOTHING, NO_EBNF),
    refused("allowed_token_ids", Both, &["[]"], "use logit_bias"),
    refused("bad_words", Both, &["[]"], "use logit_bias"),
    refused(
        "logits_processors",
        Both,
        &["[]"],
        "no code of clients is run",
    ),
    refused(
        "custom_logit_processor",
        Both,
        NOTHING,
        "no code of clients is run",
    ),
    refused("custom_params", Both, NOTHING, "no code of clients is run"),
    refused(
        "use_beam_search",
        Both,
        &["false"],
        "answers are sampled; use n",
    ),
    refused("length_penalty", Both, &["1"], "it is of beam search"),
    refused("early_stopping", Both, &["false"], "it is of beam search"),
    refused(
        "prompt_logprobs",
        Both,
        NOTHING,
        "/v1/completions has echo with logprobs",
    ),
    refused(
        "truncate_prompt_tokens",
        Both,
        NOTHING,
        "a prompt that is too long is an error; shorten it",
    ),
    refused(
        "spaces_between_special_tokens",
        Both,
        &["true"],
        "the tokenizer decides",
    ),
    refused(
        "return_tokens_as_token_ids",
        Both,
        &["false"],
        "use return_token_ids",
    ),
    refused(
        "return_hidden_states",
        Both,
        &["false"],
        "workers send tokens alone",
    ),
    refused(
        "no_stop_trim",
        Both,
        &["false"],
        "use include_stop_str_in_output",
    ),
    refused("lora_path", Both, NOTHING, "adapters are not served"),
    refused(
        "session_params",
        Both,
        NOTHING,
        "send the whole conversation: its prefix is cached",
    ),
    refused("kv_transfer_params", Both, NOTHING, NO_PLACEMENT),
    refused("bootstrap_host", Both, NOTHING, NO_PLACEMENT),
    refused("bootstrap_port", Both, NOTHING, NO_PLACEMENT),
    refused("bootstrap_room", Both, NOTHING, NO_PLACEMENT),
    refused("data_parallel_rank", Both, NOTHING, NO_PLACEMENT),
    refused("vllm_xargs", Both, NOTHING, "the workers are not vLLM's"),
    refused("nvext", Both, NOTHING, "the router is not Dynamo's"),
];

const NOTHING: &[&str] = &[];
const NO_EBNF: &str = "write the grammar in Lark, as guided_grammar";
const NO_TAGS: &str = "use tool_choice, or write it as a grammar in guided_grammar";
pub(super) const NO_PLACEMENT: &str =
    "the router chooses workers and hands the KV cache over by itself";

pub(super) const fn supported(name: &'static str, endpoint: Endpoint, text: &'static str) -> Field {
    field(name, endpoint, Policy::Supported, text)
}

pub(super) const fn harmless(name: &'static str, endpoint: Endpoint, text: &'static str) -> Field {
    field(name, endpoint, Policy::Harmless, text)
}

pub(super) const fn refused(
    name: &'static str,
    endpoint: Endpoint,
    unless: &'static [&'static str],
    text: &'static str,
) -> Field {
    field(name, endpoint, Policy::Refused { unless }, text)
}

const fn field(
    name: &'static str,
    endpoint: Endpoint,
    policy: Policy,
    text: &'static str,
) -> Field {
    Field {
        name,
        endpoint,
        policy,
        text,
    }
}
