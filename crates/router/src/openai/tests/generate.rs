//! SGLang's `/generate`, for our own workers.

use axum::http::StatusCode;
use serde_json::json;

use super::{get, post, saying};

const PATH: &str = "/generate";

#[tokio::test]
async fn one_prompt_has_one_answer() {
    let (generator, app) = saying("abcdef");
    let body = json!({
        "text": "say", "lora_path": null, "logprob_start_len": -1,
        "sampling_params": {"max_new_tokens": 4, "temperature": 0.5, "sampling_seed": 3,
                            "min_new_tokens": 2, "ignore_eos": true},
    });
    let answer = post(&app, PATH, body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    let body = answer.json();
    assert_eq!(body["text"], "abcd");
    assert_eq!(body["output_ids"], json!([97, 98, 99, 100]));
    let meta = &body["meta_info"];
    assert_eq!(
        meta["finish_reason"],
        json!({"type": "length", "length": 4})
    );
    assert_eq!(meta["prompt_tokens"], 3);
    assert_eq!(meta["completion_tokens"], 4);
    assert_eq!(meta["cached_tokens"], 3);
    assert!(meta["e2e_latency"].as_f64().unwrap() >= 0.0);
    assert!(meta["id"].as_str().unwrap().starts_with("gen-"));
    let sampling = &generator.seen.lock().unwrap()[0].sampling;
    assert_eq!(
        (sampling.max_tokens, sampling.min_tokens, sampling.seed),
        (4, 2, 3)
    );
}

#[tokio::test]
async fn without_parameters_128_tokens_or_what_fits_are_generated() {
    let (generator, app) = saying("ab");
    let body = post(&app, PATH, json!({"input_ids": [1, 2]})).await.json();
    assert_eq!(body["meta_info"]["finish_reason"], json!({"type": "stop"}));
    assert_eq!(generator.seen.lock().unwrap()[0].sampling.max_tokens, 62);
}

#[tokio::test]
async fn a_stream_whose_events_would_become_too_large_is_refused() {
    let (generator, app) = saying("ab");
    for stream in [false, true] {
        let sampling = json!({"max_new_tokens": 60, "n": 20});
        let body = json!({"text": "say", "stream": stream, "return_logprob": true,
                          "top_logprobs_num": 20, "sampling_params": sampling});
        let answer = post(&app, PATH, body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.text);
        let said = answer.text;
        assert!(said.contains("20 choices of up to 60 tokens"), "{said}");
        assert!(!said.contains("for a stream"), "{said}");
    }
    assert!(generator.seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn an_event_has_the_whole_text_so_far() {
    let (_, app) = saying("abc");
    let body = json!({"text": "say", "stream": true, "sampling_params": {"max_new_tokens": 3}});
    let stream = post(&app, PATH, body).await;
    let events = stream.events();
    let seen: Vec<_> = events
        .iter()
        .map(|e| {
            (
                e["text"].as_str().unwrap(),
                &e["meta_info"]["completion_tokens"],
            )
        })
        .collect();
    assert_eq!(
        seen,
        [("a", &json!(1)), ("ab", &json!(2)), ("abc", &json!(3))]
    );
    let reasons: Vec<_> = events
        .iter()
        .map(|e| !e["meta_info"]["finish_reason"].is_null())
        .collect();
    assert_eq!(reasons, [false, false, true]);
    assert_eq!(events[2]["meta_info"]["cached_tokens"], 3);
    assert!(events[0].get("index").is_none());
}

#[tokio::test]
async fn several_prompts_or_choices_are_a_list() {
    let (_, app) = saying("ab");
    let body = json!({"text": ["x", "yz"], "sampling_params": {"n": 2, "max_new_tokens": 2}});
    let answers = post(&app, PATH, body).await.json();
    let prompts: Vec<_> = answers
        .as_array()
        .unwrap()
        .iter()
        .map(|answer| answer["meta_info"]["prompt_tokens"].as_u64().unwrap())
        .collect();
    assert_eq!(prompts, [1, 1, 2, 2]);
    assert!(
        answers[3]["meta_info"]["id"]
            .as_str()
            .unwrap()
            .ends_with("-3")
    );

    let body = json!({"text": ["x"], "stream": true, "sampling_params": {"max_new_tokens": 1}});
    let stream = post(&app, PATH, body).await;
    let first = &stream.events()[0];
    assert_eq!((&first["index"], &first["text"]), (&json!(0), &json!("a")));
}

#[tokio::test]
async fn logprobs_are_triples() {
    let (_, app) = saying("ab");
    let body = json!({
        "text": "x", "return_logprob": true, "top_logprobs_num": 1,
        "return_text_in_logprobs": true, "sampling_params": {"max_new_tokens": 2},
    });
    let meta = post(&app, PATH, body).await.json()["meta_info"].clone();
    assert_eq!(
        meta["output_token_logprobs"],
        json!([[-1.0, 97, "a"], [-1.0, 98, "b"]])
    );
    assert_eq!(meta["output_top_logprobs"].as_array().unwrap().len(), 2);
    let plain =
        json!({"text": "x", "return_logprob": true, "sampling_params": {"max_new_tokens": 1}});
    let meta = post(&app, PATH, plain).await.json()["meta_info"].clone();
    assert_eq!(meta["output_token_logprobs"], json!([[-1.0, 97, null]]));
    assert!(meta.get("output_top_logprobs").is_none());
    let streamed = json!({
        "text": "x", "stream": true, "return_logprob": true, "top_logprobs_num": 1,
        "sampling_params": {"max_new_tokens": 2},
    });
    let stream = post(&app, PATH, streamed).await;
    let counts = stream
        .events()
        .iter()
        .map(|event| {
            let of = |field: &str| event["meta_info"][field].as_array().map(Vec::len);
            (of("output_token_logprobs"), of("output_top_logprobs"))
        })
        .collect::<Vec<_>>();
    assert_eq!(counts.last(), Some(&(Some(2), Some(2))), "{}", stream.text);
}

#[tokio::test]
async fn what_is_not_done_is_refused_by_name() {
    let (_, app) = saying("ab");
    for (body, message) in [
        (json!({}), "text and input_ids are missing."),
        (
            json!({"text": "x", "input_ids": [1]}),
            "text and input_ids are both given; one of them has the prompt.",
        ),
        (
            json!({"input_ids": "x"}),
            "input_ids has text; it is a list of token ids or a list of such lists.",
        ),
        (
            json!({"text": [1, 2]}),
            "text has token ids; it is a string or a list of strings.",
        ),
        (
            json!({"text": ""}),
            "text has 0 tokens; at least 1 is needed.",
        ),
        (
            json!({"text": "x", "sampling_params": [{}]}),
            "sampling_params is a list; one object for all prompts is taken.",
        ),
        (
            json!({"text": "x", "sampling_params": {"ebnf": "root ::= \"a\""}}),
            "ebnf is not supported: write a grammar in Lark, as guided_grammar of \
             /v1/completions.",
        ),
        (
            json!({"text": "x", "sampling_params": {"max_tokens": 5}}),
            "max_tokens is a field of /v1/chat/completions and /v1/completions.",
        ),
        (
            json!({"text": "x", "logprob_start_len": 0}),
            "logprob_start_len is 0, which is not supported: /v1/completions has echo with \
             logprobs.",
        ),
        (
            json!({"text": "x", "top_logprobs_num": 2}),
            "top_logprobs_num is 2, which needs return_logprob to be true.",
        ),
        (
            json!({"text": "x", "stream": true, "return_text_in_logprobs": true}),
            "return_text_in_logprobs is true, which needs return_logprob to be true.",
        ),
        (
            json!({"text": "x", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 2}}),
            "min_new_tokens is 9; max_new_tokens is 2.",
        ),
        (
            json!({"text": "x", "sampling_params": {"max_new_tokens": 0}}),
            "max_new_tokens is 0; it must be at least 1.",
        ),
    ] {
        let answer = post(&app, PATH, body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.text);
        assert_eq!(answer.json()["error"]["message"], message);
    }
}

#[tokio::test]
async fn the_fleet_is_described_and_its_caches_flushed() {
    let (_, app) = saying("ab");
    for path in ["/model_info", "/get_model_info"] {
        assert_eq!(get(&app, path).await.json()["is_generation"], true);
    }
    let info = get(&app, "/server_info").await.json();
    assert_eq!(info["internal_states"], json!([]));
    assert_eq!(info["models"][0]["served_model_name"], "org/bytes");
    let flushed = post(&app, "/flush_cache", json!({})).await;
    assert_eq!(
        (flushed.status, &*flushed.text),
        (StatusCode::OK, "Cache flushed.\n")
    );
}
