use axum::http::StatusCode;
use serde_json::json;

use super::{get, post, saying};
use crate::testing::{MAX_MODEL_LEN, MODEL};

#[tokio::test]
async fn text_and_back() {
    let (_, app) = saying("");
    let body = json!({"prompt": "é", "return_token_strs": true});
    let answer = post(&app, "/tokenize", body).await.json();
    assert_eq!(
        answer,
        json!({"count": 2, "max_model_len": MAX_MODEL_LEN, "tokens": [195, 169],
            "token_strs": ["Ã", "©"]})
    );
    let answer = post(&app, "/detokenize", json!({"tokens": [195, 169]})).await;
    assert_eq!(answer.json(), json!({"prompt": "é"}));
}

#[tokio::test]
async fn a_conversation_is_rendered() {
    let (_, app) = saying("");
    let messages = json!([{"role": "user", "content": "h"}]);
    let body = json!({"messages": messages, "add_generation_prompt": false});
    let answer = post(&app, "/tokenize", body).await.json();
    assert_eq!(answer["tokens"], json!([257, 117, 58, 104]));
    assert_eq!(answer["token_strs"], json!(null));
}

#[tokio::test]
async fn ids_outside_the_vocabulary_and_nothing_at_all_are_refused() {
    let (_, app) = saying("");
    let answer = post(&app, "/detokenize", json!({"tokens": [-1]})).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    assert!(answer.text.contains("-1"), "{}", answer.text);
    let answer = post(&app, "/tokenize", json!({})).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn what_would_be_ignored_is_refused_by_name() {
    let (_, app) = saying("");
    let tokens = json!([195, 169]);
    for (path, body, says) in [
        (
            "/tokenize",
            json!({"prompt": "x", "add_special_token": false}),
            "add_special_token is not a field; did you mean add_special_tokens?",
        ),
        (
            "/tokenize",
            json!({"prompt": "x", "tokens": tokens}),
            "tokens is a field of /detokenize.",
        ),
        (
            "/tokenize",
            json!({"prompt": "x", "tools": [], "continue_final_message": null}),
            "tools is for messages; leave it out beside prompt.",
        ),
        (
            "/detokenize",
            json!({"tokens": tokens, "skip_special_tokens": true}),
            "skip_special_tokens is true, which is not supported",
        ),
    ] {
        let answer = post(&app, path, body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.text);
        assert!(answer.text.contains(says), "{}", answer.text);
    }
    let body = json!({"tokens": tokens, "skip_special_tokens": false, "model": null});
    assert_eq!(post(&app, "/detokenize", body).await.status, StatusCode::OK);
}

#[tokio::test]
async fn texts_that_no_prompt_could_have_are_refused() {
    let (_, app) = saying("");
    let long = "y".repeat(3000);
    let chat = json!([{"role": "user", "content": long}]);
    for (path, body) in [
        ("/tokenize", json!({"prompt": long})),
        ("/tokenize", json!({"messages": chat})),
        (
            "/detokenize",
            json!({"tokens": vec![65; MAX_MODEL_LEN as usize + 1]}),
        ),
    ] {
        let answer = post(&app, path, body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.text);
        assert!(answer.text.contains("64"), "{}", answer.text);
    }
    app.gate.close();
    let answer = post(&app, "/tokenize", json!({"prompt": "x"})).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn models_are_listed_by_name() {
    let (_, app) = saying("");
    let list = get(&app, "/v1/models").await.json();
    assert_eq!(list["data"][0]["id"], MODEL);
    assert_eq!(list["data"][0]["max_model_len"], MAX_MODEL_LEN);
    let one = get(&app, "/v1/models/org/bytes").await;
    assert_eq!(one.json()["id"], MODEL);
    let encoded = get(&app, "/v1/models/org%2Fbytes").await;
    assert_eq!(encoded.json()["id"], MODEL);
    for path in ["/v1/models/other", "/v1/models/%ff"] {
        let none = get(&app, path).await;
        assert_eq!(none.status, StatusCode::NOT_FOUND);
        assert_eq!(none.json()["error"]["code"], "model_not_found");
    }
}
