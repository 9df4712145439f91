//! Tools and documents that the chat template does not show to the model.

use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::post;
use crate::app::{App, HttpSettings};
use crate::openai::ToolParser;
use crate::testing::{FakeGenerator, TestModel, settings, tokens_of};

const CHAT: &str = "/v1/chat/completions";
/// It has the words, and no place for either.
const PLAIN: &str = "{# tools documents #}{{ messages[0].content }}";
const SHOWING: &str = "{{ messages[0].content }}{% for t in tools or [] %}{{ t.function.name }}\
    {% endfor %}{% for d in documents or [] %}{{ d.text }}{% endfor %}";

fn app(template: &str, change: impl FnOnce(&mut HttpSettings)) -> (Arc<FakeGenerator>, Arc<App>) {
    let model = TestModel::with_template(Some(template));
    let generator = Arc::new(FakeGenerator::saying("x"));
    let mut settings = settings();
    change(&mut settings);
    let fake = Arc::clone(&generator);
    (generator, Arc::new(App::new(fake, model.only(), settings)))
}

fn with(more: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi f d"}]});
    let more = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(more);
    body
}

fn tools(choice: Value) -> Value {
    json!({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": choice})
}

#[tokio::test]
async fn what_the_model_would_not_see_is_refused_by_name() {
    let (generator, app) = app(PLAIN, |_| {});
    let named = json!({"type": "function", "name": "f"});
    let responses = json!({"input": "hi", "tools": [named]});
    let no_tools = "set tool_choice to \"none\"";
    for (path, body, field, instead) in [
        (CHAT, with(&tools(Value::Null)), "tools", no_tools),
        (CHAT, with(&tools(json!("auto"))), "tools", no_tools),
        ("/tokenize", with(&tools(json!("auto"))), "tools", no_tools),
        ("/v1/responses", responses, "tools", no_tools),
        (
            CHAT,
            with(&json!({"documents": [{"text": "d"}]})),
            "documents",
            "put their text into a message",
        ),
    ] {
        let answer = post(&app, path, body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.text);
        let error = &answer.json()["error"];
        assert_eq!(error["param"], field, "{path}");
        assert_eq!(error["code"], "unsupported_parameter", "{path}");
        let message = error["message"].as_str().unwrap();
        assert!(message.starts_with(field), "{message}");
        assert!(message.contains("chat template"), "{message}");
        assert!(message.contains(instead), "{message}");
    }
    assert!(generator.seen.lock().unwrap().is_empty());
}

/// What one refusal advises, the other must not refuse.
#[tokio::test]
async fn where_no_calls_can_be_made_the_remedies_work() {
    let (_, app) = app(PLAIN, |_| {});
    let refusal = async |choice| {
        let answer = post(&app, CHAT, with(&tools(choice))).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.text);
        answer.json()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let required = refusal(json!("required")).await;
    assert!(!required.contains("\"auto\""), "{required}");
    for message in [required, refusal(json!("auto")).await] {
        assert!(message.contains("tool_choice to \"none\""), "{message}");
        assert!(message.contains("--tool-parser"), "{message}");
    }
}

#[tokio::test]
async fn what_asks_for_nothing_is_taken() {
    let (generator, app) = app(PLAIN, |_| {});
    let bodies = [
        tools(json!("none")),
        json!({"tools": []}),
        json!({"tools": null, "documents": null}),
        json!({"documents": []}),
    ];
    let count = bodies.len();
    for more in bodies {
        let answer = post(&app, CHAT, with(&more)).await;
        assert_eq!(answer.status, StatusCode::OK, "{more}: {}", answer.text);
    }
    assert_eq!(generator.seen.lock().unwrap().len(), count);
}

#[tokio::test]
async fn what_the_template_shows_reaches_the_model() {
    let (generator, app) = app(SHOWING, |_| {});
    let more = [tools(json!("auto")), json!({"documents": [{"text": "d"}]})];
    for more in more {
        let answer = post(&app, CHAT, with(&more)).await;
        assert_eq!(answer.status, StatusCode::OK, "{more}: {}", answer.text);
    }
    let seen = generator.seen.lock().unwrap();
    let prompts: Vec<_> = seen.iter().map(|generation| &*generation.prompt).collect();
    assert_eq!(prompts, [tokens_of("hi f df"), tokens_of("hi f dd")]);
}

/// A grammar makes it, whatever the model sees.
#[tokio::test]
async fn a_call_that_must_be_made_needs_no_place_in_the_template() {
    let (generator, app) = app(PLAIN, |settings| settings.tool_parser = ToolParser::Hermes);
    let answer = post(&app, CHAT, with(&tools(json!("required")))).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    assert!(generator.seen.lock().unwrap()[0].sampling.grammar.is_some());
}

#[tokio::test]
async fn a_clients_own_template_is_held_to_the_same() {
    let (_, app) = app(SHOWING, |settings| settings.allow_chat_template = true);
    let own = |template: &str| {
        let mut more = tools(json!("auto"));
        more["chat_template"] = template.into();
        with(&more)
    };
    let answer = post(&app, CHAT, own("{{ messages[0].content }}")).await;
    assert_eq!(answer.json()["error"]["param"], "tools", "{}", answer.text);
    for (template, says) in [("{% if %}", "invalid at line 1"), ("{{ 1 / 0 }}", "failed")] {
        let answer = post(&app, CHAT, own(template)).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert_eq!(answer.json()["error"]["param"], "chat_template");
        assert!(answer.text.contains(says), "{}", answer.text);
    }
    let answer = post(&app, CHAT, own("{{ tools | length }}")).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
}
