use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::{post, saying};
use tasuki_core::FailureKind;

use crate::serve::api::{Event, ServeError};
use crate::testing::{EOS, FakeGenerator, MAX_MODEL_LEN, MODEL, app, tokens_of};

const PATH: &str = "/v1/chat/completions";

fn hi(more: Value) -> Value {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]});
    let more = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(more);
    body
}

/// The prompt of [`hi`], rendered.
fn hi_tokens() -> Vec<u32> {
    let mut tokens = vec![257];
    tokens.extend(tokens_of("u:hi"));
    tokens.push(257);
    tokens.extend(tokens_of("a:"));
    tokens
}

#[tokio::test]
async fn a_whole_answer() {
    let (generator, app) = saying("Grüße 🙂");
    let answer = post(&app, PATH, hi(json!({"timings": true, "seed": 5}))).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    let body = answer.json();
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], MODEL);
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(
        body["choices"],
        json!([{"index": 0, "logprobs": null, "finish_reason": "stop",
            "message": {"role": "assistant", "content": "Grüße 🙂", "refusal": null}}])
    );
    assert_eq!(
        body["usage"],
        json!({"prompt_tokens": 8, "completion_tokens": 13, "total_tokens": 21,
            "prompt_tokens_details": {"cached_tokens": 3}})
    );
    assert_eq!(body["timings"]["total_ms"], 12.0);
    let header = answer.headers["server-timing"].to_str().unwrap();
    assert!(header.contains("total;dur=12.000"), "{header}");
    assert_eq!(answer.headers["x-request-id"], body["id"].as_str().unwrap());

    let seen = generator.seen.lock().unwrap();
    assert_eq!(*seen[0].prompt, hi_tokens());
    assert_eq!(seen[0].sampling.max_tokens, MAX_MODEL_LEN - 8);
    assert_eq!(seen[0].sampling.stop_token_ids, [EOS]);
    assert_eq!(
        (seen[0].sampling.seed, seen[0].sampling.temperature),
        (5, 0.5)
    );
}

#[tokio::test]
async fn timings_are_in_the_body_only_on_request() {
    let (_, app) = saying("x");
    let answer = post(&app, PATH, hi(json!({}))).await;
    assert!(answer.json().get("timings").is_none());
    assert!(answer.headers.contains_key("server-timing"));
}

#[tokio::test]
async fn a_stream_has_role_text_finish_usage_and_done() {
    let (_, app) = saying("é🙂");
    let body = hi(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let events = post(&app, PATH, body).await.events();
    assert!(
        events
            .iter()
            .all(|e| e["object"] == "chat.completion.chunk")
    );
    let deltas: Vec<_> = events[..events.len() - 1]
        .iter()
        .map(|event| {
            assert_eq!(event["usage"], Value::Null);
            (
                event["choices"][0]["delta"].clone(),
                event["choices"][0]["finish_reason"].clone(),
            )
        })
        .collect();
    assert_eq!(
        deltas,
        [
            (json!({"role": "assistant", "content": ""}), Value::Null),
            (json!({"content": "é"}), Value::Null),
            (json!({"content": "🙂"}), Value::Null),
            (json!({}), json!("stop")),
        ]
    );
    let last = events.last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 7);
    assert_eq!(last["timings"]["prefill_worker"], "p0");
}

#[tokio::test]
async fn every_chunk_tells_the_tokens_so_far_if_asked_to() {
    let (_, app) = saying("é🙂");
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let body = hi(json!({"stream": true, "stream_options": options}));
    let events = post(&app, PATH, body).await.events();
    let so_far: Vec<_> = events
        .iter()
        .map(|event| event["usage"]["completion_tokens"].clone())
        .collect();
    // The role, 2 tokens, 4 more, the end of sequence, and the total.
    let expected = [Value::Null, json!(2), json!(6), json!(7), json!(7)];
    assert_eq!(so_far, expected);
}

#[tokio::test]
async fn a_stream_without_usage_does_not_speak_of_it() {
    let (_, app) = saying("x");
    let events = post(&app, PATH, hi(json!({"stream": true}))).await.events();
    assert!(events.iter().all(|event| event.get("usage").is_none()));
    assert!(events.iter().all(|event| event["choices"][0].is_object()));
}

#[tokio::test]
async fn every_choice_has_its_own_index() {
    let (_, app) = saying("ab");
    let body = post(&app, PATH, hi(json!({"n": 3}))).await.json();
    let choices = body["choices"].as_array().unwrap();
    let indices: Vec<_> = choices.iter().map(|c| c["index"].clone()).collect();
    assert_eq!(indices, [0, 1, 2]);
    assert!(choices.iter().all(|c| c["message"]["content"] == "ab"));
    assert_eq!(body["usage"]["completion_tokens"], 9);
}

#[tokio::test]
async fn a_stop_string_over_token_borders_ends_the_choice_and_tells_the_workers() {
    let (generator, app) = saying("one END two");
    let body = hi(json!({"stop": ["END"], "stream": true}));
    let events = post(&app, PATH, body).await.events();
    let text: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(text, "one ");
    let last = &events.last().unwrap()["choices"][0];
    assert_eq!(last["finish_reason"], "stop");
    let mut started = generator.started.lock().unwrap();
    assert_eq!(started[0].1.try_recv().unwrap(), 0);
}

#[tokio::test]
async fn logprobs_are_of_the_tokens_in_the_text() {
    let (generator, app) = saying("abc");
    let body = hi(json!({"logprobs": true, "top_logprobs": 2, "stop": "c"}));
    let body = post(&app, PATH, body).await.json();
    let content = body["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    let tokens: Vec<_> = content.iter().map(|t| t["token"].clone()).collect();
    assert_eq!(tokens, ["a", "b"]);
    assert_eq!(content[0]["bytes"], json!([97]));
    assert_eq!(generator.seen.lock().unwrap()[0].sampling.logprobs, Some(2));
}

#[tokio::test]
async fn token_ids_come_when_asked_for() {
    let (_, app) = saying("a");
    let whole = post(&app, PATH, hi(json!({"return_token_ids": true})))
        .await
        .json();
    assert_eq!(whole["prompt_token_ids"], json!(hi_tokens()));
    assert_eq!(whole["choices"][0]["token_ids"], json!([97, EOS]));
    let body = hi(json!({"return_token_ids": true, "stream": true}));
    let events = post(&app, PATH, body).await.events();
    assert_eq!(events[0]["prompt_token_ids"], json!(hi_tokens()));
    let ids: Vec<_> = events
        .iter()
        .filter_map(|event| event["choices"][0]["token_ids"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(ids, [97, EOS]);
}

#[tokio::test]
async fn a_failure_before_the_first_token_has_a_status() {
    for stream in [false, true] {
        let app = app(Arc::new(FakeGenerator::new(|_| {
            vec![Event::Failed(ServeError::Unavailable {
                reason: "no decode worker is up".into(),
                retry_after_s: 4,
            })]
        })));
        let answer = post(&app, PATH, hi(json!({"stream": stream}))).await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(answer.headers["retry-after"], "4");
        let message = answer.json()["error"]["message"].clone();
        assert!(message.as_str().unwrap().contains("no decode worker is up"));
    }
}

#[tokio::test]
async fn a_failure_in_mid_stream_is_an_error_event_and_the_end() {
    let app = app(Arc::new(FakeGenerator::new(|_| {
        vec![
            Event::Tokens {
                choice: 0,
                tokens: tokens_of("a"),
                logprobs: Vec::new(),
                finish: None,
            },
            Event::Failed(ServeError::Failed {
                kind: FailureKind::Device,
                message: "gave up after 5 attempts".into(),
            }),
        ]
    })));
    let answer = post(&app, PATH, hi(json!({"stream": true}))).await;
    let events = answer.raw_events();
    let error = events.last().unwrap();
    let data = error.strip_prefix("event: error\ndata: ").unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["error"]["message"], "gave up after 5 attempts");
    assert_eq!(data["error"]["type"], "server_error");
    assert_eq!(data["error"]["code"], "device_failure");
    assert!(!answer.text.contains("[DONE]"));
}

#[tokio::test]
async fn content_parts_and_tools_reach_the_template() {
    let (generator, app) = saying("x");
    let parts = json!([{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]);
    let body = json!({"messages": [{"role": "user", "content": parts}]});
    let answer = post(&app, PATH, body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    let text: Vec<u8> = generator.seen.lock().unwrap()[0]
        .prompt
        .iter()
        .filter_map(|id| u8::try_from(*id).ok())
        .collect();
    assert_eq!(String::from_utf8(text).unwrap(), "u:h\nia:");
}

#[tokio::test]
async fn the_last_message_can_be_continued() {
    let (generator, app) = saying("x");
    let body = json!({"continue_final_message": true, "messages": [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "An"}]});
    let answer = post(&app, PATH, body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    let seen = generator.seen.lock().unwrap();
    assert!(seen[0].prompt.ends_with(&tokens_of("a:An")));
}
