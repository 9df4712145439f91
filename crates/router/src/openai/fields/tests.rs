//! The table against the code that reads fields, and `docs/api.md` against the table.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::openai::generate::{GenerateFields, SamplingFields};
use crate::openai::request::types::{
    ChatFields, CommonFields, CompletionFields, DetokenizeFields, TemplateFields, TokenizeFields,
};
use crate::openai::responses::ResponseFields;

fn refusal(endpoint: Endpoint, body: &Value) -> Option<String> {
    let refused = check(endpoint, body.to_string().as_bytes()).err()?;
    Some(refused.to_string())
}

#[test]
fn a_field_stands_once_and_in_no_sentence_that_ends() {
    for endpoint in [
        Endpoint::Chat,
        Endpoint::Completions,
        Endpoint::Responses,
        Endpoint::Tokenize,
        Endpoint::Detokenize,
        Endpoint::Generate,
        Endpoint::SamplingParams,
    ] {
        let names: BTreeSet<&str> = of(endpoint).map(|field| field.name).collect();
        assert_eq!(names.len(), of(endpoint).count());
    }
    for field in all() {
        assert!(!field.text.ends_with('.'), "{}", field.text);
        if let Policy::Refused { unless } = field.policy {
            for json in unless {
                assert!(serde_json::from_str::<Value>(json).is_ok(), "{json}");
            }
        }
    }
}

/// Fields of any type: nothing can be wrong with their values here.
const OF_ANY_TYPE: [&str; 4] = ["documents", "tool_choice", "guided_json", "json_schema"];

#[test]
fn what_is_supported_is_read() {
    for field in all() {
        if field.policy != Policy::Supported || OF_ANY_TYPE.contains(&field.name) {
            continue;
        }
        // No field is a list of lists of lists.
        let body = json!({ field.name: [[[1.5]]] }).to_string();
        let bytes = body.as_bytes();
        let common = body::parse::<CommonFields>(bytes).is_err();
        let template = body::parse::<TemplateFields>(bytes).is_err();
        let chat = body::parse::<ChatFields>(bytes).is_err() || template;
        let completions = body::parse::<CompletionFields>(bytes).is_err();
        let read = match field.endpoint {
            Endpoint::Both => common || (chat && completions),
            Endpoint::Chat => chat,
            Endpoint::Completions => completions,
            Endpoint::Responses => common || body::parse::<ResponseFields>(bytes).is_err(),
            Endpoint::Tokenize => template || body::parse::<TokenizeFields>(bytes).is_err(),
            Endpoint::Detokenize => body::parse::<DetokenizeFields>(bytes).is_err(),
            Endpoint::Generate => body::parse::<GenerateFields>(bytes).is_err(),
            Endpoint::SamplingParams => body::parse::<SamplingFields>(bytes).is_err(),
        };
        // Lists of anything are checked later.
        assert!(
            read || ["input", "messages", "tools", "sampling_params"].contains(&field.name),
            "{}",
            field.name
        );
    }
}

#[test]
fn a_field_that_asks_for_nothing_is_taken() {
    for body in [
        json!({"ebnf": null, "length_penalty": 1.0, "bad_words": []}),
        json!({"use_beam_search": false, "metadata": {"a": 1}, "modalities": ["text"]}),
    ] {
        assert_eq!(refusal(Endpoint::Chat, &body), None);
    }
}

#[test]
fn a_constraint_that_is_not_kept_is_refused_by_name() {
    for (body, message) in [
        (
            json!({"ebnf": "root ::= \"a\""}),
            "ebnf is not supported: write the grammar in Lark",
        ),
        (
            json!({"structural_tag": {}}),
            "structural_tag is not supported: use tool_choice",
        ),
        (
            json!({"prompt_logprobs": 0}),
            "prompt_logprobs is not supported: /v1/completions has",
        ),
        (
            json!({"length_penalty": 1.5}),
            "length_penalty is 1.5, which is not supported: it is of beam search.",
        ),
    ] {
        let said = refusal(Endpoint::Chat, &body).expect("a refusal");
        assert!(said.starts_with(message), "{said}");
    }
}

#[test]
fn an_unknown_field_is_refused_with_the_likeliest_name() {
    let chat = |body| refusal(Endpoint::Chat, &body).expect("a refusal");
    let said = chat(json!({"max_token": 5}));
    assert_eq!(said, "max_token is not a field; did you mean max_tokens?");
    let said = chat(json!({"quite_another": 5}));
    assert_eq!(
        said,
        "quite_another is not a field; docs/api.md lists those that there are."
    );
    // Were it compared with each name, that would take minutes.
    let long = "a".repeat(8 << 20);
    let said = chat(json!({ long: 5 }));
    let rest = said.strip_prefix(&"a".repeat(64)).expect("its beginning");
    assert_eq!(
        rest,
        " is not a field; docs/api.md lists those that there are."
    );
    assert_eq!(
        chat(json!({"prompt": "x"})),
        "prompt is a field of /v1/completions."
    );
    let said = refusal(Endpoint::Generate, &json!({"max_new_tokens": 5})).expect("a refusal");
    assert_eq!(
        said,
        "max_new_tokens is a field of sampling_params of /generate."
    );
}

#[test]
fn the_page_is_made_of_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/api.md");
    let made = page();
    if std::env::var_os("TASUKI_WRITE_GENERATED").is_some() {
        std::fs::write(&path, &made).expect("docs/api.md is written");
    }
    let found = std::fs::read_to_string(&path).expect("docs/api.md");
    assert!(
        found == made,
        "docs/api.md differs from the table: run `make proto`"
    );
}

const HEAD: &str = "\
# API

Made of `crates/router/src/openai/fields` by `make proto`; a test compares them.

The paths are OpenAI's (`POST /v1/chat/completions`, `/v1/responses`, `/v1/completions`, `GET /v1/models`), vLLM's
(`/tokenize`, `/detokenize`), SGLang's (`/generate` and [others](#sglangs-paths)), `/health`, `/ready` and `/metrics`.
The router does what a field asks for, or refuses the request with status 400, the field in `error.param`, and
`unsupported_parameter` in `error.code`. That holds for names that are not in these tables too. Values out of range are
a 400 with another code or none. A field of the tables that is `null` counts as left out. `both` in the tables is chats
and completions.

Fields that bind the form of an answer: [docs/structured-output.md](structured-output.md).

All of this is of models that Tasuki's own workers serve. Requests for models of vLLM and SGLang workers are
passed on with every field as it is ([docs/foreign-workers.md](foreign-workers.md)), but for those that only the
router sets: `kv_transfer_params`, `ec_transfer_params`, `bootstrap_host`, `bootstrap_port`, `bootstrap_room`,
`bootstrap_pair_key`, `decode_tp_size` and `disagg_prefill_dp_rank` are a 400, inside `vllm_xargs` too.
";

const RESPONSES: &str = "
## Responses

`POST /v1/responses` is a chat in the form of OpenAI's Responses API, without memory: each request has the whole
conversation as `input`. The answer has items of type `reasoning`, `message` and `function_call`, which may stand in
the next request's `input` as they are; `status` is `incomplete` where `max_output_tokens` cut it. A stream has typed
events with a `sequence_number` and ends with `response.completed`, `response.incomplete` or `response.failed`. There
are no built-in tools, files or images, and no other paths below `/v1/responses`. Models of vLLM and SGLang workers are
not served by this path (400).
";

const TOKENS: &str = "
## Tokens

`POST /tokenize` answers with the `tokens` of a text or a conversation, their `count`, and `max_model_len`;
`POST /detokenize` with the text of `tokens` as `prompt`. Models of vLLM and SGLang workers are not served by these
paths (400).
";

const GENERATE: &str = "
## SGLang's paths

`POST /generate`, so that SGLang's clients and `sglang.bench_serving --backend sglang` run against our workers
too: one answer, or a list for several prompts or choices. `finish_reason` has no `matched`, and
`sampling_params` is one object for all prompts. `GET /server_info` and `/model_info` (`/get_server_info`,
`/get_model_info`) tell what is served. `POST /flush_cache` empties all prefix caches; on a `--host` other than a
loopback address it is served at `--admin-port` alone, and so is what SGLang workers tell in `/server_info`;
`/model_info` then has an SGLang worker's model by its name, without its folder. Where SGLang workers serve the model
the request is passed on to them as it is.

`GET /health_generate` is 200 if a worker of the model can generate, else 503 with the reason; `?model=` selects one of
several models, whatever engine serves it. A token that a worker of the model decoded within the last second answers it.
Otherwise the router generates two tokens as for any request, as tenant `health_generate`, and gives that 20 s.
Probes that come meanwhile, or within a second after it, get the same answer. It needs no API key.
";

fn page() -> String {
    let mut page = HEAD.to_owned();
    tables(&mut page, "##", "endpoint", FIELDS);
    page.push_str(RESPONSES);
    tables(&mut page, "###", "in", RESPONSES_FIELDS);
    page.push_str(TOKENS);
    tables(&mut page, "###", "path", TOKEN_FIELDS);
    page.push_str(GENERATE);
    tables(&mut page, "###", "in", NATIVE_FIELDS);
    page
}

fn tables(page: &mut String, level: &str, second: &str, fields: &'static [Field]) {
    let mut part = |title: &str, third: &str, text: &dyn Fn(&Field) -> Option<String>| {
        if fields.iter().all(|field| text(field).is_none()) {
            return;
        }
        let _ = write!(
            page,
            "\n{level} {title}\n\n| field | {second} | {third} |\n|---|---|---|\n"
        );
        for (field, text) in fields.iter().filter_map(|f| Some((f, text(f)?))) {
            let at = match field.endpoint {
                Endpoint::Both => "both",
                Endpoint::Chat => "chat",
                Endpoint::Completions => "completions",
                Endpoint::Tokenize => "`/tokenize`",
                Endpoint::Detokenize => "`/detokenize`",
                Endpoint::Responses | Endpoint::Generate => "body",
                Endpoint::SamplingParams => "`sampling_params`",
            };
            let _ = writeln!(page, "| `{}` | {at} | {text} |", field.name);
        }
    };
    let of = |policy: Policy| {
        move |field: &Field| (field.policy == policy).then(|| field.text.to_owned())
    };
    part("Supported", "here", &of(Policy::Supported));
    part("Taken, without effect", "because", &of(Policy::Harmless));
    part("Refused", "because", &|field| match field.policy {
        Policy::Refused { unless: [] } => Some(field.text.to_owned()),
        Policy::Refused { unless } => {
            let taken = unless.join("`, `");
            Some(format!("{}; `{taken}` is taken", field.text))
        }
        _ => None,
    });
}
