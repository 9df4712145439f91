//! Several models behind one router.

use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::json;
use tasuki_core::ModelId;

use super::{get, post};
use crate::app::App;
use crate::models::Models;
use crate::testing::{FakeGenerator, TestModel, settings, tokens_of};

/// Two models, of which the second is also `alias`; one of them has no worker.
fn two(down: Vec<ModelId>) -> (Arc<FakeGenerator>, Arc<App>) {
    let mut generator = FakeGenerator::saying("yes");
    generator.down = down;
    let generator = Arc::new(generator);
    let plain = TestModel::new().text;
    let shouting = TestModel::with_template(Some("{{ messages[0].content | upper }}")).text;
    let models = Models::new(vec![
        (vec!["plain".to_owned()], plain),
        (vec!["loud".to_owned(), "alias".to_owned()], shouting),
    ]);
    let app = App::new(Arc::clone(&generator) as _, models, settings());
    (generator, Arc::new(app))
}

fn chat(model: &str) -> serde_json::Value {
    json!({"model": model, "messages": [{"role": "user", "content": "hi"}]})
}

#[tokio::test]
async fn the_model_of_a_request_has_its_own_text_and_workers() {
    let (generator, app) = two(Vec::new());
    for name in ["plain", "loud", "alias"] {
        let answer = post(&app, "/v1/chat/completions", chat(name)).await;
        assert_eq!(answer.json()["model"], name, "{}", answer.text);
    }
    let seen = std::mem::take(&mut *generator.seen.lock().unwrap());
    let asked = |at: usize| (seen[at].model, seen[at].prompt.to_vec());
    assert_eq!(asked(0).0, ModelId(0));
    assert_eq!(asked(1), (ModelId(1), tokens_of("HI")));
    assert_eq!(asked(2), asked(1));
    let list = get(&app, "/v1/models").await.json();
    let names = list["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| &model["id"]);
    assert_eq!(names.collect::<Vec<_>>(), ["plain", "loud", "alias"]);
}

#[tokio::test]
async fn unknown_and_missing_names_list_what_is_served() {
    let (_, app) = two(Vec::new());
    let unknown = post(&app, "/v1/chat/completions", chat("other")).await;
    assert_eq!(unknown.status, StatusCode::NOT_FOUND);
    assert!(
        unknown
            .text
            .contains("`other` does not exist. Served here: plain, loud, alias.")
    );
    for path in ["/v1/completions", "/tokenize"] {
        let missing = post(&app, path, json!({"prompt": "x"})).await;
        assert_eq!(missing.status, StatusCode::BAD_REQUEST);
        assert_eq!(missing.json()["error"]["param"], "model");
        assert!(missing.text.contains("Served here: plain, loud, alias."));
    }
}

#[tokio::test]
async fn a_model_without_workers_is_unavailable_and_the_other_one_serves() {
    let (_, app) = two(vec![ModelId(1)]);
    let dead = post(&app, "/v1/chat/completions", chat("loud")).await;
    assert_eq!(
        dead.status,
        StatusCode::SERVICE_UNAVAILABLE,
        "{}",
        dead.text
    );
    assert!(dead.headers.contains_key("retry-after"));
    let alive = post(&app, "/v1/chat/completions", chat("plain")).await;
    assert_eq!(alive.status, StatusCode::OK);
    assert_eq!(get(&app, "/ready").await.status, StatusCode::OK);
    let list = get(&app, "/v1/models").await.json();
    assert_eq!(list["data"][1]["max_model_len"], json!(null));
}
