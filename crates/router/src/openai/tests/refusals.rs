use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use serde_json::{Value, json};
use tasuki_policy::NoPlacement;

use super::{get, post, post_bytes, saying, send};
use crate::app::{App, HttpSettings};
use crate::models::Models;
use crate::testing::{FakeGenerator, MODEL, TestModel, app, settings};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// The message of a refusal with this status.
async fn refusal(app: &Arc<App>, path: &str, body: Value, status: StatusCode) -> String {
    let answer = post(app, path, body).await;
    assert_eq!(answer.status, status, "{}", answer.text);
    let message = answer.json()["error"]["message"].clone();
    message.as_str().unwrap().to_owned()
}

#[tokio::test]
async fn values_and_limits_are_named() {
    let (generator, app) = saying("x");
    let chat = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
        let more = more.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(more);
        (CHAT, body)
    };
    let completion = |more: Value| {
        let mut body = json!({"prompt": "hi"});
        let more = more.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(more);
        (COMPLETIONS, body)
    };
    let long = "x".repeat(70);
    for ((path, body), parts) in [
        (
            chat(json!({"max_tokens": -5})),
            vec!["max_tokens is -5", "at least 1"],
        ),
        (
            chat(json!({"max_tokens": 60})),
            vec!["8 tokens", "max_tokens is 60", "64"],
        ),
        (chat(json!({"n": 200})), vec!["n is 200", "128"]),
        (
            chat(json!({"temperature": "hot"})),
            vec!["temperature", "hot"],
        ),
        (chat(json!({"messages": "hi"})), vec!["messages", "\"hi\""]),
        (chat(json!({"messages": []})), vec!["messages has 0 items"]),
        (
            chat(json!({"top_logprobs": 3})),
            vec!["top_logprobs is 3", "logprobs"],
        ),
        (
            chat(json!({"top_logprobs": 21, "logprobs": true})),
            vec!["21", "20"],
        ),
        (chat(json!({"chat_template": "x"})), vec!["chat_template"]),
        (
            chat(json!({"min_tokens": 9, "max_tokens": 8})),
            vec!["min_tokens is 9", "8"],
        ),
        (
            chat(json!({"tool_choice": "required"})),
            vec!["tool_choice", "tools has 0 items"],
        ),
        (
            chat(json!({"tools": [{"type": "custom", "custom": {"name": "f"}}]})),
            vec!["tools[0].type is \"custom\"", "function"],
        ),
        (
            chat(json!({"ebnf": "root ::= x"})),
            vec!["ebnf is not supported", "in Lark"],
        ),
        (
            completion(json!({"max_token": 3})),
            vec!["max_token is not a field", "max_tokens"],
        ),
        (
            completion(json!({"prompt": "y".repeat(2000)})),
            vec!["2000 bytes", "64"],
        ),
        (completion(json!({"prompt": long})), vec!["70 tokens", "64"]),
        (
            completion(json!({"prompt": ""})),
            vec!["prompt has 0 tokens"],
        ),
        (completion(json!({"prompt": [300]})), vec!["300", "258"]),
        (
            completion(json!({"prompt": {"a": 1}})),
            vec!["prompt", "a string"],
        ),
        (
            completion(json!({"max_tokens": 0})),
            vec!["max_tokens is 0"],
        ),
        (
            completion(json!({"suffix": "end"})),
            vec!["suffix", "not supported"],
        ),
        (
            completion(json!({"user": "y".repeat(300)})),
            vec!["user has 300 bytes", "256"],
        ),
        (
            completion(json!({"priority": 5000})),
            vec!["priority is 5000", "1000"],
        ),
        (completion(json!({"best_of": 4})), vec!["best_of is 4"]),
        (completion(json!({"logprobs": 99})), vec!["99", "20"]),
    ] {
        let message = refusal(&app, path, body, StatusCode::BAD_REQUEST).await;
        for part in parts {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }
    assert!(generator.seen.lock().unwrap().is_empty());
}

/// An app that allows 10,000 bytes an answer and 128 sequences.
fn narrow() -> (Arc<FakeGenerator>, Arc<App>) {
    let generator = Arc::new(FakeGenerator::saying("x"));
    let settings = HttpSettings {
        max_answer_bytes: 10_000,
        max_concurrent_requests: 128,
        ..settings()
    };
    let model = TestModel::new();
    let fake = Arc::clone(&generator);
    let app = App::new(fake, model.only(), settings);
    (generator, Arc::new(app))
}

#[tokio::test]
async fn an_answer_that_would_be_too_large_is_refused() {
    let (generator, app) = narrow();
    let prompt = "y".repeat(20);
    for (body, size) in [
        // 128 x 20 x 8 of text.
        (json!({"prompt": "y", "n": 128, "max_tokens": 20}), 20_480),
        // 20 x (8 + 21 x 32).
        (
            json!({"prompt": "y", "max_tokens": 20, "logprobs": 20}),
            13_600,
        ),
        // 20 bytes and 20 x 21 x 32 of prompt, in a stream too.
        (
            json!({"prompt": prompt, "max_tokens": 1, "logprobs": 20, "echo": true, "stream": true}),
            13_460,
        ),
    ] {
        let message = refusal(&app, COMPLETIONS, body, StatusCode::BAD_REQUEST).await;
        let size = format!("{size} bytes");
        for part in [
            size.as_str(),
            "10000",
            "--max-answer-bytes",
            "fewer choices",
        ] {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }
    assert!(generator.seen.lock().unwrap().is_empty());
    let streamed = json!({"prompt": "y", "n": 128, "max_tokens": 20, "stream": true});
    assert_eq!(
        post(&app, COMPLETIONS, streamed).await.status,
        StatusCode::OK
    );
}

#[tokio::test]
async fn a_chat_without_max_tokens_gets_as_many_as_fit_an_answer() {
    let (generator, app) = narrow();
    let body = json!({"messages": [{"role": "user", "content": "y"}], "logprobs": true,
        "top_logprobs": 20});
    let answer = post(&app, CHAT, body.clone()).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    let mut streamed = body;
    streamed["stream"] = true.into();
    assert_eq!(post(&app, CHAT, streamed).await.status, StatusCode::OK);
    let seen = generator.seen.lock().unwrap();
    // 10,000 / (8 + 21 x 80), and the rest of the context.
    assert_eq!(seen[0].sampling.max_tokens, 5);
    assert_eq!(seen[1].sampling.max_tokens, 57);
}

#[tokio::test]
async fn bodies_that_are_no_json_object() {
    let (_, app) = saying("x");
    for (body, part) in [
        (b"{\"prompt\": ".to_vec(), "not valid JSON"),
        (b"".to_vec(), "not a JSON object"),
        (b"{\"prompt\": \"\xff\"}".to_vec(), "not valid UTF-8"),
    ] {
        let answer = post_bytes(&app, COMPLETIONS, body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert!(answer.text.contains(part), "{}", answer.text);
    }
    let answer = post_bytes(&app, COMPLETIONS, vec![b' '; 5000]).await;
    assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE);
    let message = answer.json()["error"]["message"].clone();
    assert!(
        message.as_str().unwrap().contains("5000 bytes"),
        "{message}"
    );
    assert!(
        message.as_str().unwrap().contains("4096 bytes"),
        "{message}"
    );
}

#[tokio::test]
async fn an_unknown_model_is_404() {
    let (_, app) = saying("x");
    let body = json!({"model": "gpt-9", "prompt": "x"});
    let message = refusal(&app, COMPLETIONS, body, StatusCode::NOT_FOUND).await;
    assert!(
        message.contains("gpt-9") && message.contains(MODEL),
        "{message}"
    );
}

#[tokio::test]
async fn paths_and_methods_that_are_not_there() {
    let (_, app) = saying("x");
    for (path, says) in [
        ("/v1/embeddings", "The workers generate text alone"),
        ("/v1/responses/resp_1", "Nothing is stored here"),
    ] {
        let said = refusal(&app, path, json!({}), StatusCode::NOT_FOUND).await;
        assert!(said.contains(path) && said.contains(says), "{said}");
    }
    let tunnel = Request::connect("models.test:443").body(Body::empty());
    let said = send(&app, tunnel.unwrap()).await.json()["error"]["message"].to_string();
    assert!(
        said.contains("no models.test:443 here. CONNECT asks for a proxy"),
        "{said}"
    );
    let answer = get(&app, "/v1/nothing").await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    assert!(answer.json()["error"]["message"].is_string());
    let answer = get(&app, CHAT).await;
    assert_eq!(answer.status, StatusCode::METHOD_NOT_ALLOWED);
    assert!(answer.headers.contains_key("allow"));
    assert!(answer.json()["error"]["message"].is_string());
}

#[tokio::test]
async fn no_worker_is_503_with_the_reason() {
    let app = app(Arc::new(FakeGenerator::down(NoPlacement::NoWorker)));
    let body = json!({"prompt": "x"});
    let answer = post(&app, COMPLETIONS, body).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.headers.contains_key("retry-after"));
    assert!(answer.text.contains("request: no worker is up"));

    let model = TestModel::new();
    let named = |name: &str| (vec![name.to_owned()], Arc::clone(&model.text));
    let two = Models::new(vec![named("a"), named("b")]);
    let generator = Arc::new(FakeGenerator::down(NoPlacement::NoWorker));
    let app = Arc::new(App::new(generator, two, settings()));
    let answer = post(&app, COMPLETIONS, json!({"prompt": "x", "model": "b"})).await;
    let says = "request: for model b, no worker is up";
    assert!(answer.text.contains(says), "{}", answer.text);
}

#[tokio::test]
async fn a_model_without_chat_template_refuses_chats() {
    let model = TestModel::with_template(None);
    let generator = Arc::new(FakeGenerator::saying("x"));
    let app = Arc::new(App::new(generator, model.only(), settings()));
    let body = json!({"messages": [{"role": "user", "content": "hi"}]});
    let message = refusal(&app, CHAT, body, StatusCode::BAD_REQUEST).await;
    assert!(message.contains("chat template"), "{message}");
}

#[tokio::test]
async fn what_the_template_raises_is_the_clients_fault() {
    let template = "{{ raise_exception('roles must alternate') }}";
    let model = TestModel::with_template(Some(template));
    let generator = Arc::new(FakeGenerator::saying("x"));
    let app = Arc::new(App::new(generator, model.only(), settings()));
    let body = json!({"messages": [{"role": "user", "content": "hi"}]});
    let message = refusal(&app, CHAT, body, StatusCode::BAD_REQUEST).await;
    assert!(message.contains("roles must alternate"), "{message}");
}

#[tokio::test]
async fn a_request_may_bring_a_template_where_that_is_allowed() {
    let model = TestModel::new();
    let generator = Arc::new(FakeGenerator::saying("x"));
    let settings = HttpSettings {
        allow_chat_template: true,
        ..settings()
    };
    let fake = Arc::clone(&generator);
    let app = Arc::new(App::new(fake, model.only(), settings));
    let body = json!({"chat_template": "own", "messages": [{"role": "user", "content": "hi"}]});
    let answer = post(&app, CHAT, body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    let seen = generator.seen.lock().unwrap();
    assert_eq!(*seen[0].prompt, crate::testing::tokens_of("own"));
}
