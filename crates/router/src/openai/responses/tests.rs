//! The translation from a response's fields to a chat's.

use serde_json::{Value, json};

use super::request::read;
use super::{input, tools};
use crate::error::ApiError;

fn messages(input: Value) -> Value {
    input::messages(None, Some(&input))
        .expect("a conversation")
        .into()
}

/// The field at fault, and the message.
fn refusal<T>(result: Result<T, ApiError>) -> (String, String) {
    let error = result.err().expect("a refusal");
    let param = error.body().error.param.unwrap_or_default();
    (param, error.to_string())
}

fn refused(body: Value) -> (String, String) {
    refusal(read(body.to_string().as_bytes()))
}

#[test]
fn text_is_a_message_of_the_user() {
    assert_eq!(
        messages(json!("hi")),
        json!([{"role": "user", "content": "hi"}])
    );
    let with = input::messages(Some("be brief"), Some(&json!("hi"))).unwrap();
    assert_eq!(with[0], json!({"role": "system", "content": "be brief"}));
    assert_eq!(with.len(), 2);
}

#[test]
fn parts_of_text_are_content() {
    let said = messages(json!([
        {"role": "developer", "content": "a"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content":
            [{"type": "output_text", "text": "c", "annotations": [], "logprobs": null}]},
        {"role": "user", "content": [{"type": "input_text", "text": "d"},
            {"type": "input_text", "text": "e"}]},
        {"role": "user", "content": []},
    ]));
    assert_eq!(
        said,
        json!([
            {"role": "developer", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": [{"type": "text", "text": "d"},
                {"type": "text", "text": "e"}]},
            {"role": "user", "content": ""},
        ])
    );
}

#[test]
fn what_the_assistant_says_at_once_is_one_message() {
    let call = |id: &str| {
        json!({"type": "function_call", "id": "fc", "call_id": id, "name": "f",
            "arguments": "{}", "status": "completed"})
    };
    let chat_call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let reasoning = json!({"type": "reasoning", "id": "rs", "summary": [],
        "encrypted_content": null, "content": [{"type": "reasoning_text", "text": "hm"}]});
    let said = messages(json!([
        {"role": "user", "content": "x"},
        reasoning, {"role": "assistant", "content": "I look."}, call("1"), call("2"),
        {"type": "function_call_output", "call_id": "1", "output": "7"},
        {"type": "function_call_output", "call_id": "2",
            "output": [{"type": "input_text", "text": "8"}]},
        call("3"), reasoning, {"role": "assistant", "content": "y"},
        {"role": "assistant", "content": "z"},
        reasoning,
    ]));
    assert_eq!(
        said,
        json!([
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "hm",
                "tool_calls": [chat_call("1"), chat_call("2")]},
            {"role": "tool", "tool_call_id": "1", "content": "7"},
            {"role": "tool", "tool_call_id": "2", "content": "8"},
            {"role": "assistant", "content": null, "tool_calls": [chat_call("3")]},
            {"role": "assistant", "content": "y", "reasoning_content": "hm"},
            {"role": "assistant", "content": "z"},
            {"role": "assistant", "content": "", "reasoning_content": "hm"},
        ])
    );
}

#[test]
fn a_past_call_may_have_an_empty_text_for_no_arguments() {
    let call = json!({"type": "function_call", "call_id": "1", "name": "f", "arguments": ""});
    let said = messages(json!([call]));
    assert_eq!(said[0]["tool_calls"][0]["function"]["arguments"], "");
}

#[test]
fn tools_get_a_function_around_them() {
    let given = [
        json!({"type": "function", "name": "f", "description": "d", "strict": true,
        "parameters": {"type": "object"}, "defer_loading": false}),
    ];
    assert_eq!(
        tools::tools(&given).unwrap(),
        [
            json!({"type": "function", "function": {"name": "f", "description": "d",
            "strict": true, "parameters": {"type": "object"}}})
        ]
    );
    let named = json!({"type": "function", "name": "f"});
    assert_eq!(
        tools::choice(Some(&named)).unwrap(),
        Some(json!({"type": "function", "function": {"name": "f"}}))
    );
    assert_eq!(tools::choice(Some(&Value::Null)).unwrap(), None);
}

#[test]
fn fields_become_those_of_a_chat() {
    let schema = json!({"type": "object", "properties": {}});
    let body = json!({"model": "m", "input": "hi", "max_output_tokens": 7, "temperature": 0.5,
        "reasoning": {"effort": "low"}, "parallel_tool_calls": false, "metadata": {"a": "b"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}});
    let (chat, echoed) = read(body.to_string().as_bytes()).unwrap();
    assert_eq!(chat.fields.model.as_deref(), Some("m"));
    assert_eq!(chat.fields.temperature, Some(0.5));
    assert_eq!(
        (chat.max_tokens, chat.parallel_tool_calls),
        (Some(7), Some(false))
    );
    assert_eq!(chat.template.reasoning_effort, Some("low".to_owned()));
    let format = chat.fields.response_format.unwrap();
    let given = format.json_schema.unwrap().schema.unwrap();
    assert_eq!(given.get(), schema.to_string());
    let echoed = serde_json::to_value(echoed).unwrap();
    for (field, value) in [
        ("max_output_tokens", json!(7)),
        ("metadata", json!({"a": "b"})),
        ("reasoning", json!({"effort": "low", "summary": null})),
        ("tool_choice", json!("auto")),
        ("truncation", json!("disabled")),
        ("store", json!(false)),
    ] {
        assert_eq!(echoed[field], value, "{field}");
    }
    assert_eq!(echoed["text"]["format"], body["text"]["format"]);
}

#[test]
fn what_is_no_conversation_is_named() {
    let call = |more: Value| {
        let mut call = json!({"type": "function_call", "call_id": "1", "name": "f"});
        let more = more.as_object().unwrap().clone();
        call.as_object_mut().unwrap().extend(more);
        json!([call])
    };
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    for (input, param, says) in [
        (Value::Null, "input", "input is missing"),
        (json!([]), "input", "0 items"),
        (json!(3), "input", "input is 3"),
        (json!(["x"]), "input[0]", "is \"x\"; it must be an object"),
        (json!([{}]), "input[0].role", "is missing"),
        (
            json!([{"role": "tool"}]),
            "input[0].role",
            "is \"tool\"; it must be",
        ),
        (json!([{"role": "user"}]), "input[0].content", "is missing"),
        (user(json!(1)), "input[0].content", "is 1; it must be"),
        (
            user(json!([{"type": "input_image", "image_url": "x"}])),
            "input[0].content[0].type",
            "is \"input_image\"; only text is supported, as \"input_text\"",
        ),
        (
            json!([{"type": "item_reference", "id": "msg_1"}]),
            "input[0].type",
            "no items are stored here",
        ),
        (
            json!([{"type": "web_search_call"}]),
            "input[0].type",
            "is \"web_search_call\"; it must be",
        ),
        (
            json!([{"type": "reasoning", "encrypted_content": "x"}]),
            "input[0].encrypted_content",
            "is \"x\", which is not supported",
        ),
        (call(json!({})), "input[0].arguments", "is missing"),
        (
            call(json!({"arguments": "{}", "namespace": "n"})),
            "input[0].namespace",
            "is \"n\", which",
        ),
        (
            json!([{"type": "function_call_output", "call_id": "", "output": "x"}]),
            "input[0].call_id",
            "is empty",
        ),
    ] {
        let (at, said) = refused(json!({"input": input}));
        assert_eq!(at, param, "{said}");
        assert!(said.contains(says), "{says:?} is not in {said:?}");
    }
}

#[test]
fn what_other_fields_ask_for_in_vain_is_named() {
    let tool = |tool: Value| json!({"tools": [tool]});
    for (more, param, says) in [
        (
            tool(json!({"type": "web_search"})),
            "tools[0].type",
            "is \"web_search\"; only \"function\"",
        ),
        (
            tool(json!({"type": "function"})),
            "tools[0].name",
            "is missing",
        ),
        (
            tool(json!({"type": "function", "name": "f", "defer_loading": true})),
            "tools[0].defer_loading",
            "is true, which is not supported",
        ),
        (
            json!({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}),
            "tool_choice",
            "allowed_tools",
        ),
        (
            json!({"tool_choice": "any"}),
            "tool_choice",
            "is \"any\"; it must be",
        ),
        (
            json!({"text": {"verbosity": "low"}}),
            "text.verbosity",
            "is \"low\", which is not supported",
        ),
        (
            json!({"reasoning": {"summary": "auto"}}),
            "reasoning.summary",
            "is \"auto\", which is not supported: Tasuki does not summarize reasoning",
        ),
        (
            json!({"reasoning": {"mode": "x"}}),
            "reasoning.mode",
            "unknown field",
        ),
        (
            json!({"metadata": {"a": 1}}),
            "metadata.a",
            "is 1, and must be a string",
        ),
        (
            json!({"max_output_tokens": 0}),
            "max_output_tokens",
            "is 0; it must be at least 1",
        ),
    ] {
        let mut body = json!({"input": "x"});
        let more = more.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(more);
        let (at, said) = refused(body);
        assert_eq!(at, param, "{said}");
        assert!(said.contains(says), "{says:?} is not in {said:?}");
    }
}
