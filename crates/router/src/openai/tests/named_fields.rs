//! Every refusal names the field at fault in `error.param`: the whole table of fields, and values that
//! other code refuses.

use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::{post, saying};
use crate::app::App;
use crate::openai::fields::{self, Endpoint, Field, Policy};
use crate::testing::{FakeGenerator, TestModel, settings};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const GENERATE: &str = "/generate";
const TOKENIZE: &str = "/tokenize";
const DETOKENIZE: &str = "/detokenize";

/// A good request, and a field in it.
fn with(path: &str, field: &str, value: &Value) -> Value {
    let mut body = match path {
        CHAT | TOKENIZE => json!({"messages": [{"role": "user", "content": "hi"}]}),
        COMPLETIONS => json!({"prompt": "hi"}),
        RESPONSES => json!({"input": "hi"}),
        DETOKENIZE => json!({"tokens": [104]}),
        _ => json!({"text": "hi"}),
    };
    body[field] = value.clone();
    body
}

/// Requests that have this value in the field, by path.
fn requests(field: &Field, value: &Value) -> Vec<(&'static str, Value)> {
    let paths: &[&str] = match field.endpoint {
        Endpoint::Chat => &[CHAT],
        Endpoint::Completions => &[COMPLETIONS],
        Endpoint::Both => &[CHAT, COMPLETIONS],
        Endpoint::Responses => &[RESPONSES],
        Endpoint::Generate => &[GENERATE],
        Endpoint::Tokenize => &[TOKENIZE],
        Endpoint::Detokenize => &[DETOKENIZE],
        Endpoint::SamplingParams => {
            let inner = json!({ field.name: value });
            return vec![(GENERATE, with(GENERATE, "sampling_params", &inner))];
        }
    };
    let paths = paths.iter();
    paths
        .map(|path| (*path, with(path, field.name, value)))
        .collect()
}

/// The parts of an error that programs read.
async fn refusal(app: &Arc<App>, path: &str, body: Value) -> (String, Value) {
    let answer = post(app, path, body.clone()).await;
    let status = answer.status;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{body}: {}", answer.text);
    let error = answer.json()["error"].clone();
    let param = error["param"].as_str();
    let param = param.unwrap_or_else(|| panic!("{body}: {error}"));
    (param.to_owned(), error)
}

fn is_in(param: &str, field: &str) -> bool {
    param
        .strip_prefix(field)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.') || rest.starts_with('['))
}

#[tokio::test]
async fn every_field_that_is_refused_is_named() {
    let (generator, app) = saying("x");
    let refused = fields::all().filter(|field| matches!(field.policy, Policy::Refused { .. }));
    let mut count = 0;
    for field in refused {
        for (path, body) in requests(field, &json!({"something": [1]})) {
            let (param, error) = refusal(&app, path, body).await;
            assert_eq!(param, field.name, "{path}");
            assert_eq!(error["code"], "unsupported_parameter", "{path}: {param}");
            let message = error["message"].as_str().unwrap();
            assert!(message.starts_with(field.name), "{message}");
            count += 1;
        }
    }
    assert!(count > 80, "{count}");
    assert!(generator.seen.lock().unwrap().is_empty());
}

/// Of these fields other values are served.
#[tokio::test]
async fn every_value_that_is_not_supported_has_the_code() {
    let generator = Arc::new(FakeGenerator::saying("x"));
    let mut settings = settings();
    settings.allow_priority = false;
    let fake = Arc::clone(&generator);
    let app = Arc::new(App::new(fake, TestModel::new().only(), settings));
    let obfuscated = json!({"include_usage": true, "include_obfuscation": true});
    let mut streamed = with(CHAT, "stream", &json!(true));
    streamed["stream_options"] = obfuscated;
    let tool = json!([{"type": "function", "function": {"name": "f"}}]);
    let mut called = with(CHAT, "tool_choice", &json!("required"));
    called["tools"] = tool;
    let structural = json!({"structural_tag": "x"});
    for (path, body, field) in [
        (
            COMPLETIONS,
            with(COMPLETIONS, "best_of", &json!(2)),
            "best_of",
        ),
        (
            COMPLETIONS,
            with(COMPLETIONS, "suffix", &json!("x")),
            "suffix",
        ),
        (CHAT, streamed, "stream_options.include_obfuscation"),
        (CHAT, with(CHAT, "priority", &json!(1)), "priority"),
        (
            CHAT,
            with(CHAT, "chat_template", &json!("x")),
            "chat_template",
        ),
        (
            CHAT,
            with(CHAT, "structured_outputs", &structural),
            "structured_outputs.structural_tag",
        ),
        (CHAT, called, "tool_choice"),
    ] {
        let (param, error) = refusal(&app, path, body).await;
        assert_eq!(param, field);
        assert_eq!(error["code"], "unsupported_parameter", "{error}");
    }
    assert!(generator.seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn every_field_with_a_value_of_a_wrong_type_is_named() {
    let (generator, app) = saying("x");
    let supported = fields::all().filter(|field| field.policy == Policy::Supported);
    let mut count = 0;
    for field in supported {
        for (path, body) in requests(field, &json!([[[1.5]]])) {
            let (param, error) = refusal(&app, path, body).await;
            assert!(is_in(&param, field.name), "{path} {}: {error}", field.name);
            let message = error["message"].as_str().unwrap();
            assert!(message.contains(field.name), "{message}");
            count += 1;
        }
    }
    assert!(count > 120, "{count}");
    assert!(generator.seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_value_that_cannot_be_taken_is_named() {
    let (generator, app) = saying("x");
    let tool = |more: Value| {
        let mut function = json!({"name": "f"});
        let more = more.as_object().unwrap().clone();
        function.as_object_mut().unwrap().extend(more);
        json!({"tools": [{"type": "function", "function": function}], "tool_choice": "required"})
    };
    let user = json!({"role": "user", "content": "hi"});
    for (path, more, at_fault) in [
        (CHAT, json!({"documents": "x"}), "documents"),
        (CHAT, json!({"documents": ["x"]}), "documents"),
        (
            CHAT,
            json!({"chat_template_kwargs": {"tools": []}}),
            "chat_template_kwargs",
        ),
        (
            RESPONSES,
            json!({"chat_template_kwargs": {"messages": []}}),
            "chat_template_kwargs",
        ),
        (CHAT, json!({"reasoning_effort": 3}), "reasoning_effort"),
        (
            CHAT,
            json!({"continue_final_message": true, "add_generation_prompt": false,
                "messages": [user, {"role": "assistant", "content": null}]}),
            "continue_final_message",
        ),
        (CHAT, json!({"max_tokens": 0}), "max_tokens"),
        (
            CHAT,
            json!({"max_completion_tokens": 0}),
            "max_completion_tokens",
        ),
        (CHAT, json!({"max_tokens": 60}), "max_tokens"),
        (
            CHAT,
            json!({"max_completion_tokens": 60}),
            "max_completion_tokens",
        ),
        (COMPLETIONS, json!({"max_tokens": 0}), "max_tokens"),
        (
            COMPLETIONS,
            json!({"max_completion_tokens": 0}),
            "max_completion_tokens",
        ),
        (COMPLETIONS, json!({"max_tokens": 90}), "max_tokens"),
        (
            COMPLETIONS,
            json!({"max_completion_tokens": 90}),
            "max_completion_tokens",
        ),
        (
            COMPLETIONS,
            json!({"max_tokens": 0, "max_completion_tokens": 3}),
            "max_tokens",
        ),
        (
            RESPONSES,
            json!({"max_output_tokens": 90}),
            "max_output_tokens",
        ),
        (
            RESPONSES,
            json!({"max_output_tokens": 0}),
            "max_output_tokens",
        ),
        (
            COMPLETIONS,
            json!({"cache_salt": "x".repeat(300)}),
            "cache_salt",
        ),
        (
            RESPONSES,
            json!({"cache_salt": "x".repeat(300)}),
            "cache_salt",
        ),
        (GENERATE, json!({"extra_key": "x".repeat(300)}), "extra_key"),
        (
            GENERATE,
            json!({"sampling_params": {"max_new_tokens": 90}}),
            "max_new_tokens",
        ),
        (
            GENERATE,
            json!({"sampling_params": {"min_new_tokens": 5, "max_new_tokens": 4}}),
            "min_new_tokens",
        ),
        (GENERATE, json!({"sampling_params": {"n": 0}}), "n"),
        (GENERATE, json!({"top_logprobs_num": 3}), "top_logprobs_num"),
        (
            CHAT,
            json!({"stream_options": {"x": 1}}),
            "stream_options.x",
        ),
        (CHAT, json!({"top_logprobs": 3}), "top_logprobs"),
        (CHAT, json!({"user": "x".repeat(300)}), "user"),
        (CHAT, json!({"priority": 5000}), "priority"),
        (CHAT, json!({"chat_template": "x"}), "chat_template"),
        (CHAT, tool(json!({"strict": 1})), "tools[0].function.strict"),
        (
            CHAT,
            tool(json!({"parameters": {"type": "string"}})),
            "tools[0].function.parameters",
        ),
        (
            COMPLETIONS,
            json!({"guided_json": {"not": {}}}),
            "guided_json",
        ),
        (
            COMPLETIONS,
            json!({"guided_json": {}, "guided_whitespace_pattern": "("}),
            "guided_whitespace_pattern",
        ),
        (
            RESPONSES,
            json!({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}),
            "text.format",
        ),
    ] {
        let mut body = with(path, "stream", &false.into());
        let more = more.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(more);
        let (param, error) = refusal(&app, path, body).await;
        assert_eq!(param, at_fault, "{path}: {error}");
    }
    assert!(generator.seen.lock().unwrap().is_empty());
}
