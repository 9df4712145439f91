use std::path::Path;
use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Value, json};
use tasuki_text::ModelText;

use super::{post, saying};
use crate::app::App;
use crate::models::Models;
use crate::serve::api::{Event, Finish};
use crate::testing::{EOS, FakeGenerator, settings};

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn a_whole_answer_of_sixteen_tokens() {
    let (generator, app) = saying("0123456789abcdefXYZ");
    let answer = post(&app, PATH, json!({"prompt": "say"})).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    let body = answer.json();
    assert_eq!(body["object"], "text_completion");
    assert_eq!(
        body["choices"],
        json!([{"index": 0, "text": "0123456789abcdef", "logprobs": null,
            "finish_reason": "length"}])
    );
    assert_eq!(generator.seen.lock().unwrap()[0].sampling.max_tokens, 16);
}

#[tokio::test]
async fn batches_number_their_choices_through() {
    let (generator, app) = saying("ab");
    let body = json!({"prompt": [[1, 2], [3]], "n": 2, "return_token_ids": true});
    let body = post(&app, PATH, body).await.json();
    let choices = body["choices"].as_array().unwrap();
    let prompts: Vec<_> = choices
        .iter()
        .map(|c| (c["index"].clone(), c["prompt_token_ids"].clone()))
        .collect();
    assert_eq!(
        prompts,
        [
            (json!(0), json!([1, 2])),
            (json!(1), json!([1, 2])),
            (json!(2), json!([3])),
            (json!(3), json!([3])),
        ]
    );
    assert_eq!(choices[3]["token_ids"], json!([97, 98, EOS]));
    assert_eq!(body["usage"]["prompt_tokens"], 3);
    assert_eq!(body["usage"]["completion_tokens"], 12);
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 6);
    let seen = generator.seen.lock().unwrap();
    assert!(seen[1].request_id.ends_with("-1"));
}

#[tokio::test]
async fn prompts_share_a_seed_only_if_it_was_given() {
    let (generator, app) = saying("ab");
    post(&app, PATH, json!({"prompt": ["x", "x"]})).await;
    post(&app, PATH, json!({"prompt": ["x", "x"], "seed": 7})).await;
    let seen = generator.seen.lock().unwrap();
    let seeds: Vec<u64> = seen.iter().map(|g| g.sampling.seed).collect();
    assert_ne!(seeds[0], seeds[1]);
    assert_eq!(seeds[2..], [7, 7]);
}

#[tokio::test]
async fn echo_gives_prompt_and_logprobs_in_one_run_of_offsets() {
    let (_, app) = saying("cd");
    let body = json!({"prompt": "ab", "echo": true, "logprobs": 1, "max_tokens": 2});
    let choice = post(&app, PATH, body).await.json()["choices"][0].clone();
    assert_eq!(choice["text"], "abcd");
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["a", "b", "c", "d"]));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3]));
    assert_eq!(logprobs["token_logprobs"], json!([null, -1.0, -1.0, -1.0]));
    assert_eq!(logprobs["top_logprobs"][0], Value::Null);
    assert_eq!(logprobs["top_logprobs"][1], json!({"b": -1.0}));
}

#[tokio::test]
async fn echo_alone_needs_no_output() {
    let (generator, app) = saying("cd");
    let body = json!({"prompt": "ab", "echo": true, "max_tokens": 0, "logprobs": 0});
    let body = post(&app, PATH, body).await.json();
    assert_eq!(body["choices"][0]["text"], "ab");
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert_eq!(body["choices"][0]["logprobs"]["tokens"], json!(["a", "b"]));
    assert_eq!(body["usage"]["completion_tokens"], 0);
    assert_eq!(generator.seen.lock().unwrap()[0].sampling.max_tokens, 1);
}

#[tokio::test]
async fn a_stream_of_two_prompts() {
    let (_, app) = saying("é");
    let body = json!({"prompt": ["a", "b"], "stream": true, "echo": true,
        "return_token_ids": true});
    let events = post(&app, PATH, body).await.events();
    for index in 0..2 {
        let choices: Vec<_> = events
            .iter()
            .map(|event| &event["choices"][0])
            .filter(|choice| choice["index"] == index)
            .collect();
        let text: String = choices
            .iter()
            .map(|c| c["text"].as_str().unwrap())
            .collect();
        assert_eq!(text, ["aé", "bé"][index]);
        assert_eq!(choices.last().unwrap()["finish_reason"], "stop");
        let with_prompt: Vec<_> = choices
            .iter()
            .filter_map(|c| c["prompt_token_ids"].as_array())
            .collect();
        assert_eq!(with_prompt.len(), 1);
    }
}

#[tokio::test]
async fn min_tokens_and_stops_are_passed_on() {
    let (generator, app) = saying("aab");
    let body = json!({"prompt": "x", "min_tokens": 2, "stop": "a", "max_tokens": 8,
        "ignore_eos": true, "stop_token_ids": [9], "cache_salt": "t"});
    let body = post(&app, PATH, body).await.json();
    assert_eq!(body["choices"][0]["text"], "aab");
    let seen = generator.seen.lock().unwrap();
    assert_eq!(seen[0].sampling.stop_token_ids, [9]);
    assert_eq!(seen[0].sampling.min_tokens, 2);
    assert_eq!(seen[0].cache_salt, "t");
}

/// An app of a model whose rare characters, line feeds among them, are tokens for each byte.
fn with_byte_tokens(answer: &str) -> Arc<App> {
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/text/models/byte_fallback");
    let text = Arc::new(ModelText::load(&folder).unwrap());
    let tokens = text.encode(answer, false).unwrap();
    let generator = FakeGenerator::new(move |generation| {
        let last = Event::Tokens {
            choice: 0,
            tokens: tokens.clone(),
            logprobs: Vec::new(),
            finish: Some(Finish::Length),
        };
        assert!(generation.prompt.len() > 1, "the prompt is tokens");
        vec![last, Event::Done(Box::default())]
    });
    let models = Models::new(vec![(vec!["m".to_owned()], text)]);
    Arc::new(App::new(Arc::new(generator), models, settings()))
}

#[tokio::test]
async fn the_end_of_a_prompt_is_not_said_again() {
    let app = with_byte_tokens("x y");
    for prompt in ["a:\n", "a 🦀", "🦀🦀", "\n\n\n\n\n\n\n\n\n"] {
        for echo in [false, true] {
            let body = json!({"prompt": prompt, "stop": "\n", "echo": echo});
            let choice = post(&app, PATH, body).await.json()["choices"][0].clone();
            let echoed = if echo { prompt } else { "" };
            assert_eq!(choice["text"], format!("{echoed} x y"), "{prompt:?}");
            assert_eq!(choice["finish_reason"], "length", "{prompt:?}");
        }
    }
}
