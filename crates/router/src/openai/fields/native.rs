//! All fields of SGLang's `/generate`.

use super::Endpoint::{Generate, SamplingParams};
use super::Field;
use super::table::{NO_PLACEMENT, harmless, refused, supported};

const NO_MEDIA: &str = "prompts are text";
const NOT_KEPT: &str = "workers send tokens alone";

/// In the order of `docs/api.md`.
pub const NATIVE_FIELDS: &[Field] = &[
    supported("model", Generate, "As in chats; SGLang has none"),
    supported("text", Generate, "The prompt, or a list of prompts"),
    supported(
        "input_ids",
        Generate,
        "The prompt as token ids, or a list of such prompts",
    ),
    supported(
        "sampling_params",
        Generate,
        "One object for all prompts; see below",
    ),
    supported(
        "stream",
        Generate,
        "Server-sent events, each with the choice's whole text so far",
    ),
    supported(
        "return_logprob",
        Generate,
        "`output_token_logprobs` in `meta_info`",
    ),
    supported(
        "top_logprobs_num",
        Generate,
        "`output_top_logprobs`, up to 20 for each token",
    ),
    supported("return_text_in_logprobs", Generate, "Tokens as text, too"),
    supported("priority", Generate, "As in chats: less goes first"),
    supported(
        "extra_key",
        Generate,
        "Keeps the request's prefix cache apart",
    ),
    harmless("rid", Generate, "The answer has an id of its own"),
    harmless("log_metrics", Generate, "Every request is counted"),
    harmless(
        "session_id",
        Generate,
        "Requests go where their prefix is cached by themselves",
    ),
    harmless(
        "conversation_id",
        Generate,
        "Requests go where their prefix is cached by themselves",
    ),
    harmless(
        "routing_key",
        Generate,
        "Requests go where their prefix is cached by themselves",
    ),
    refused(
        "logprob_start_len",
        Generate,
        &["-1"],
        "/v1/completions has echo with logprobs",
    ),
    refused(
        "token_ids_logprob",
        Generate,
        &["[]"],
        "use top_logprobs_num",
    ),
    refused("input_embeds", Generate, &[], NO_MEDIA),
    refused("positional_embed_overrides", Generate, &[], NO_MEDIA),
    refused("image_data", Generate, &["[]"], NO_MEDIA),
    refused("video_data", Generate, &["[]"], NO_MEDIA),
    refused("audio_data", Generate, &["[]"], NO_MEDIA),
    refused("modalities", Generate, &["[]", "[\"text\"]"], NO_MEDIA),
    refused("return_hidden_states", Generate, &["false"], NOT_KEPT),
    refused("return_routed_experts", Generate, &["false"], NOT_KEPT),
    refused("return_indexer_topk", Generate, &["false"], NOT_KEPT),
    refused("return_sampling_mask", Generate, &["false"], NOT_KEPT),
    refused("lora_path", Generate, &[], "adapters are not served"),
    refused("lora_id", Generate, &[], "adapters are not served"),
    refused(
        "session_params",
        Generate,
        &[],
        "send the whole conversation: its prefix is cached",
    ),
    refused(
        "custom_logit_processor",
        Generate,
        &[],
        "no code of clients is run",
    ),
    refused("require_reasoning", Generate, &["false"], "use chats"),
    refused(
        "max_thinking_tokens",
        Generate,
        &[],
        "use chat_template_kwargs in chats",
    ),
    refused("background", Generate, &["false"], "answers are not stored"),
    refused("bootstrap_host", Generate, &[], NO_PLACEMENT),
    refused("bootstrap_port", Generate, &[], NO_PLACEMENT),
    refused("bootstrap_room", Generate, &[], NO_PLACEMENT),
    refused("bootstrap_pair_key", Generate, &[], NO_PLACEMENT),
    refused("decode_tp_size", Generate, &[], NO_PLACEMENT),
    refused("routed_dp_rank", Generate, &[], NO_PLACEMENT),
    refused("data_parallel_rank", Generate, &[], NO_PLACEMENT),
    refused("disagg_prefill_dp_rank", Generate, &[], NO_PLACEMENT),
    supported(
        "max_new_tokens",
        SamplingParams,
        "At least 1; not given: 128",
    ),
    supported("min_new_tokens", SamplingParams, "No stop before"),
    supported(
        "n",
        SamplingParams,
        "Choices for each prompt, 1 to 128; the answer is a list",
    ),
    supported("stop", SamplingParams, "Up to 16 strings of 1 KiB"),
    supported(
        "stop_token_ids",
        SamplingParams,
        "Up to 128 further end tokens",
    ),
    supported(
        "ignore_eos",
        SamplingParams,
        "Goes on after the model's end token",
    ),
    supported(
        "no_stop_trim",
        SamplingParams,
        "Keeps the stop string in the text",
    ),
    supported(
        "skip_special_tokens",
        SamplingParams,
        "Leaves special tokens out of the text",
    ),
    supported("temperature", SamplingParams, "0 to 2"),
    supported("top_p", SamplingParams, "Above 0, at most 1"),
    supported("top_k", SamplingParams, "-1 or 0: off"),
    supported("min_p", SamplingParams, "0 to 1"),
    supported("presence_penalty", SamplingParams, "-2 to 2"),
    supported("frequency_penalty", SamplingParams, "-2 to 2"),
    supported(
        "repetition_penalty",
        SamplingParams,
        "0.01 to 10, of prompt and output",
    ),
    supported(
        "logit_bias",
        SamplingParams,
        "-100 to 100 for up to 1,024 tokens",
    ),
    supported(
        "sampling_seed",
        SamplingParams,
        "The same seed gives the same tokens",
    ),
    supported(
        "json_schema",
        SamplingParams,
        "A string of a JSON schema, or the schema",
    ),
    supported(
        "regex",
        SamplingParams,
        "A regular expression in Rust's syntax",
    ),
    harmless(
        "stream_interval",
        SamplingParams,
        "Tokens are sent as they come",
    ),
    refused(
        "ebnf",
        SamplingParams,
        &[],
        "write a grammar in Lark, as guided_grammar of /v1/completions",
    ),
    refused(
        "structural_tag",
        SamplingParams,
        &[],
        "write a grammar in Lark, as guided_grammar of /v1/completions",
    ),
    refused("stop_regex", SamplingParams, &["[]"], "use stop"),
    refused(
        "beam_width",
        SamplingParams,
        &["1"],
        "answers are sampled; use n",
    ),
    refused(
        "spaces_between_special_tokens",
        SamplingParams,
        &["true"],
        "the tokenizer decides",
    ),
    refused(
        "custom_params",
        SamplingParams,
        &[],
        "no code of clients is run",
    ),
    refused(
        "watermark",
        SamplingParams,
        &[],
        "answers have no watermark",
    ),
];
