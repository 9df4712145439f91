//! `/v1/responses`, whole and streamed.

use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Value, json};
use tasuki_core::FailureKind;

use super::{Answer, post, saying};
use crate::app::App;
use crate::serve::api::{Event, Generation, ServeError};
use crate::testing::{FakeGenerator, MODEL, TestModel, app, say, settings, tokens_of};

const PATH: &str = "/v1/responses";
const TEMPLATE: &str =
    "{# <tool_call> </think> #}{% if tools %}t{% endif %}{{ messages[0].content }}";
const REASONING: &str = "<think>\nhm\n</think>";
const CALLS: &str = "\n\nI look.<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"ü\"}}\n\
    </tool_call>\n<tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call>";

fn with(mut body: Value, more: &Value) -> Value {
    let more = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(more);
    body
}

/// Says reasoning, text and calls, to the end: it is longer than the fake model's context.
fn calling() -> Arc<App> {
    let model = TestModel::with_template(Some(TEMPLATE));
    let generator = FakeGenerator::new(|generation| {
        let mut generation = generation.clone();
        generation.sampling.max_tokens = 1000;
        say(&generation, &format!("{REASONING}{CALLS}"))
    });
    Arc::new(App::new(Arc::new(generator), model.only(), settings()))
}

fn calling_body() -> Value {
    json!({"input": "hi", "tools": [{"type": "function", "name": "f"}]})
}

/// A stream's events. Each has its own name and number.
fn events(answer: &Answer) -> Vec<Value> {
    let events = answer.raw_events().into_iter().enumerate();
    events
        .map(|(at, event)| {
            let (name, data) = event.split_once('\n').expect("an event with a name");
            let data = data.strip_prefix("data: ").unwrap();
            let data: Value = serde_json::from_str(data).unwrap();
            assert_eq!(name, format!("event: {}", data["type"].as_str().unwrap()));
            assert_eq!(data["sequence_number"], at);
            data
        })
        .collect()
}

fn kinds(events: &[Value]) -> Vec<&str> {
    let mut kinds: Vec<&str> = events.iter().map(|e| e["type"].as_str().unwrap()).collect();
    kinds.dedup();
    kinds
}

/// Without what differs between two answers to one request.
fn masked(mut response: Value) -> Value {
    for field in ["id", "created_at", "completed_at"] {
        response[field] = Value::Null;
    }
    for item in response["output"].as_array_mut().unwrap() {
        item["id"] = Value::Null;
        if item.get("call_id").is_some() {
            item["call_id"] = Value::Null;
        }
    }
    response
}

/// The output put together of a stream's deltas, and checked against the other events.
fn assembled(events: &[Value]) -> Vec<Value> {
    let mut output: Vec<Value> = Vec::new();
    let mut deltas: Vec<String> = Vec::new();
    for event in events {
        let at = event["output_index"].as_u64().unwrap_or(0) as usize;
        let id = |output: &[Value]| output[at]["id"].clone();
        match event["type"].as_str().unwrap() {
            "response.output_item.added" => {
                assert_eq!(at, output.len());
                assert_eq!(event["item"]["status"], "in_progress");
                output.push(event["item"].clone());
                deltas.push(String::new());
            }
            "response.output_item.done" => {
                assert_eq!(event["item"]["id"], id(&output));
                output[at] = event["item"].clone();
                let content = &event["item"]["content"][0]["text"];
                let text = content.as_str().or(event["item"]["arguments"].as_str());
                assert_eq!(text, Some(deltas[at].as_str()));
            }
            "response.content_part.done" => {
                assert_eq!(event["part"]["text"], deltas[at]);
            }
            kind if kind.ends_with(".delta") => {
                assert_eq!(event["item_id"], id(&output));
                deltas[at].push_str(event["delta"].as_str().unwrap());
            }
            kind if kind.ends_with(".done") => {
                let text = event["text"].as_str().or(event["arguments"].as_str());
                assert_eq!(text, Some(deltas[at].as_str()), "{kind}");
            }
            _ => {}
        }
    }
    output
}

#[tokio::test]
async fn a_whole_answer() {
    let (generator, app) = saying("Grüße 🙂");
    let body = json!({"model": MODEL, "instructions": "s", "input": "hi",
        "metadata": {"a": "b"}, "store": false});
    let answer = post(&app, PATH, body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    let body = answer.json();
    let id = body["id"].as_str().unwrap();
    assert!(id.starts_with("resp_") && answer.headers["x-request-id"] == id);
    for (field, value) in [
        ("object", json!("response")),
        ("status", json!("completed")),
        ("model", json!(MODEL)),
        ("error", Value::Null),
        ("incomplete_details", Value::Null),
        ("instructions", json!("s")),
        ("metadata", json!({"a": "b"})),
        ("temperature", json!(0.5)),
        ("tools", json!([])),
        (
            "usage",
            json!({"input_tokens": 12, "input_tokens_details": {"cached_tokens": 3},
                "output_tokens": 13, "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 25}),
        ),
    ] {
        assert_eq!(body[field], value, "{field}");
    }
    assert_eq!(
        masked(body)["output"],
        json!([{"id": null, "type": "message", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "Grüße 🙂", "annotations": [],
                "logprobs": []}]}])
    );
    let mut prompt = Vec::new();
    for text in ["s:s", "u:hi", "a:"] {
        prompt.push(257);
        prompt.extend(tokens_of(text));
    }
    assert_eq!(*generator.seen.lock().unwrap()[0].prompt, prompt);
}

#[tokio::test]
async fn a_stream_of_text_has_typed_events() {
    let (_, app) = saying("Hello");
    let body = json!({"input": "hi", "stream": true});
    let answer = post(&app, PATH, body).await;
    let events = events(&answer);
    assert_eq!(
        kinds(&events),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    assert_eq!(events[0]["response"]["status"], "in_progress");
    assert_eq!(events[0]["response"]["output"], json!([]));
    let last = &events.last().unwrap()["response"];
    assert_eq!(last["usage"]["input_tokens_details"]["cached_tokens"], 3);
}

#[tokio::test]
async fn reasoning_text_and_calls_are_items() {
    let app = calling();
    let response = post(&app, PATH, calling_body()).await.json();
    let output = response["output"].as_array().unwrap();
    let types: Vec<&Value> = output.iter().map(|item| &item["type"]).collect();
    assert_eq!(
        types,
        ["reasoning", "message", "function_call", "function_call"]
    );
    assert_eq!(
        output[0]["content"],
        json!([{"type": "reasoning_text", "text": "hm"}])
    );
    assert_eq!(output[1]["content"][0]["text"], "I look.");
    assert_eq!(output[2]["name"], "f");
    assert_eq!(output[2]["arguments"], "{\"x\": \"ü\"}");
    assert_ne!(output[2]["call_id"], output[3]["call_id"]);
    let details = &response["usage"]["output_tokens_details"];
    assert_eq!(details["reasoning_tokens"], REASONING.len());
    assert_eq!(
        response["tools"],
        json!([{"type": "function", "name": "f", "parameters": null, "strict": false}])
    );
    // The next request may have them as they are.
    let mut input = vec![json!({"role": "user", "content": "hi"})];
    input.extend(output.iter().cloned());
    let body = with(calling_body(), &json!({ "input": input }));
    assert_eq!(post(&app, PATH, body).await.status, StatusCode::OK);
}

#[tokio::test]
async fn streamed_is_the_same_as_whole() {
    let (_, plain) = saying("Hello");
    let (_, silent) = saying("");
    for (app, body) in [
        (plain.clone(), json!({"input": "hi"})),
        (plain, json!({"input": "hi", "max_output_tokens": 3})),
        (silent, json!({"input": "hi"})),
        (calling(), calling_body()),
        (calling(), json!({"input": "hi"})),
    ] {
        let whole = masked(post(&app, PATH, body.clone()).await.json());
        let answer = post(&app, PATH, with(body, &json!({"stream": true}))).await;
        let events = events(&answer);
        let last = &events.last().unwrap()["response"];
        assert_eq!(masked(last.clone()), whole);
        assert_eq!(json!(assembled(&events)), last["output"]);
    }
}

#[tokio::test]
async fn an_answer_that_was_cut_is_incomplete() {
    let (_, app) = saying("Hello");
    let body = json!({"input": "hi", "max_output_tokens": 3});
    let response = post(&app, PATH, body.clone()).await.json();
    assert_eq!(response["status"], "incomplete");
    assert_eq!(response["completed_at"], Value::Null);
    assert_eq!(
        response["incomplete_details"],
        json!({"reason": "max_output_tokens"})
    );
    assert_eq!(response["output"][0]["status"], "incomplete");
    let answer = post(&app, PATH, with(body, &json!({"stream": true}))).await;
    let events = events(&answer);
    assert_eq!(events.last().unwrap()["type"], "response.incomplete");
}

fn failing(generation: &Generation) -> Vec<Event> {
    let mut events = say(generation, "Hello");
    events.truncate(2);
    events.push(Event::Failed(ServeError::Failed {
        kind: FailureKind::Device,
        message: "both workers died".to_owned(),
    }));
    events
}

#[tokio::test]
async fn a_stream_that_fails_says_so_last() {
    let app = app(Arc::new(FakeGenerator::new(failing)));
    let body = json!({"input": "hi", "stream": true});
    let answer = post(&app, PATH, body).await;
    let events = events(&answer);
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.failed");
    let response = &last["response"];
    assert_eq!(response["status"], "failed");
    assert_eq!(response["error"]["message"], "both workers died");
    assert_eq!(response["output"][0]["content"][0]["text"], "He");
    let whole = post(&app, PATH, json!({"input": "hi"})).await;
    assert_eq!(whole.status, StatusCode::INTERNAL_SERVER_ERROR);
}

#[tokio::test]
async fn what_is_not_served_is_refused_by_name() {
    let (_, app) = saying("x");
    let too_long = "x".repeat(100);
    for (more, param, says) in [
        (json!({"store": true}), "store", "store is true, which"),
        (
            json!({"previous_response_id": "resp_1"}),
            "previous_response_id",
            "leave it out and send the whole conversation",
        ),
        (
            json!({"conversation": "c"}),
            "conversation",
            "nothing is stored",
        ),
        (json!({"background": true}), "background", "is true"),
        (json!({"truncation": "auto"}), "truncation", "is \"auto\""),
        (
            json!({"include": ["reasoning.encrypted_content"]}),
            "include",
            "is [\"reasoning.encrypted_content\"], which is not supported",
        ),
        (json!({"top_logprobs": 2}), "top_logprobs", "is 2"),
        (
            json!({"max_tokens": 2}),
            "max_tokens",
            "a field of /v1/chat",
        ),
        (
            json!({"max_output_token": 2}),
            "max_output_token",
            "did you mean",
        ),
        (json!({"input": too_long}), "max_output_tokens", "64 tokens"),
        (
            json!({"text": {"format": {"type": "json_schema", "name": "n"}}}),
            "text.format",
            "text.format.schema is missing",
        ),
        (
            json!({"text": {"format": {"type": "text", "schema": {}}}}),
            "text.format.schema",
            "needs text.format.type",
        ),
        (
            json!({"text": {"format": {"type": "grammar"}}}),
            "text.format",
            "text.format.type is \"grammar\"",
        ),
        (
            json!({"tool_choice": "required"}),
            "tool_choice",
            "tools has 0 items",
        ),
        (
            json!({"tools": [{"type": "function", "name": "a b"}], "tool_choice": "required"}),
            "tools[0].name",
            "tools[0].name is \"a b\"",
        ),
    ] {
        let answer = post(&app, PATH, with(json!({"input": "hi"}), &more)).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{more}");
        let error = &answer.json()["error"];
        assert_eq!(error["param"], param, "{error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(says), "{message}");
    }
    let nothing = json!({"store": false, "truncation": "disabled", "include": [],
        "background": false, "previous_response_id": null, "top_logprobs": 0,
        "stream_options": null, "service_tier": "auto", "user": "u", "safety_identifier": "s"});
    let answer = post(&app, PATH, with(json!({"input": "hi"}), &nothing)).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
}
