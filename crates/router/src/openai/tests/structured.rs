//! Fields that bind the form of an answer, from the body to what the worker gets.

use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Value, json};
use tasuki_flow::Grammar;

use super::post;
use crate::app::{App, HttpSettings};
use crate::grammar::testing::{accepts, tokens};
use crate::testing::{FakeGenerator, TestModel, settings};

pub const CHAT: &str = "/v1/chat/completions";
pub const COMPLETIONS: &str = "/v1/completions";
const GENERATE: &str = "/generate";
pub const TEMPLATE: &str = "{{ messages[0].content }}{% if tools %}t{% endif %}{# <tool_call> #}";

pub struct Served {
    model: TestModel,
    generator: Arc<FakeGenerator>,
    app: Arc<App>,
}

impl Served {
    pub fn new(template: &str, change: impl Fn(&mut HttpSettings)) -> Self {
        let model = TestModel::with_template(Some(template));
        let generator = Arc::new(FakeGenerator::saying("x"));
        let mut settings = HttpSettings {
            max_body_bytes: 1 << 20,
            ..settings()
        };
        change(&mut settings);
        let fake = Arc::clone(&generator);
        let app = Arc::new(App::new(fake, model.only(), settings));
        Self {
            model,
            generator,
            app,
        }
    }

    /// The grammar that a worker gets.
    pub async fn grammar(&self, path: &str, body: Value) -> Option<Grammar> {
        let answer = post(&self.app, path, body).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
        let mut seen = self.generator.seen.lock().unwrap();
        let generation = seen.drain(..).next_back().unwrap();
        generation.sampling.grammar
    }

    pub async fn refusal(&self, path: &str, body: Value) -> (String, Value) {
        let answer = post(&self.app, path, body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.text);
        assert!(self.generator.seen.lock().unwrap().is_empty());
        let error = &answer.json()["error"];
        let message = error["message"].as_str().unwrap().to_owned();
        (message, error["param"].clone())
    }

    #[track_caller]
    pub fn check(&self, grammar: &Grammar, taken: &[&str], refused: &[&str]) {
        let takes = |answer: &&str| {
            let tokens = tokens(&self.model.text, answer, &[]);
            accepts(&self.model.text, grammar, &tokens)
        };
        for answer in taken {
            assert!(takes(answer), "{answer:?} by {grammar:?}");
        }
        for answer in refused {
            assert!(!takes(answer), "{answer:?} by {grammar:?}");
        }
    }
}

pub fn served() -> Served {
    Served::new(TEMPLATE, |_| {})
}

pub fn with(mut body: Value, more: &Value) -> Value {
    let more = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(more);
    body
}

pub fn chat(more: &Value) -> Value {
    with(
        json!({"messages": [{"role": "user", "content": "hi"}]}),
        more,
    )
}

pub fn completion(more: &Value) -> Value {
    with(json!({"prompt": "hi"}), more)
}

/// Fields of chats and completions, with an answer that is taken and one that is not.
fn fields() -> Vec<(Value, &'static str, &'static str)> {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}},
        "required": ["a"], "additionalProperties": false});
    let text = schema.to_string();
    let named = json!({"type": "json_schema",
        "json_schema": {"name": "n", "strict": true, "description": "d", "schema": schema}});
    vec![
        (json!({"response_format": named}), "{\"a\": 1}", "{}"),
        (
            json!({"response_format": {"type": "json_object"}}),
            "{\"b\": [1]}",
            "[1]",
        ),
        (
            json!({"guided_json": schema}),
            "{ \"a\":1\n}",
            "{\"a\": \"1\"}",
        ),
        (json!({"guided_json": text}), "{\"a\": 1}", "{\"b\": 1}"),
        (json!({"guided_json": true}), "[null]", "nope"),
        (json!({"guided_json_object": true}), "{}", "1"),
        (
            json!({"guided_json": schema, "guided_whitespace_pattern": "_"}),
            "{\"a\":_1}",
            "{\"a\": 1}",
        ),
        (json!({"guided_regex": "^a+/b$"}), "aa/b", "aa/bb"),
        (
            json!({"guided_choice": ["yes", "yes, \"sir\"\u{7f}"]}),
            "yes, \"sir\"\u{7f}",
            "yes,",
        ),
        (
            json!({"guided_grammar": "start: \"(\" start \")\" | \"x\""}),
            "((x))",
            "((x)",
        ),
        (
            json!({"structured_outputs": {"json": schema}}),
            "{\"a\": 1}",
            "{}",
        ),
        (
            json!({"structured_outputs": {"json": text, "disable_any_whitespace": true}}),
            "{\"a\":1}",
            "{\"a\": 1}",
        ),
        (
            json!({"structured_outputs": {"json_object": true, "whitespace_pattern": "_",
                "disable_fallback": true}}),
            "{\"a\":_1}",
            "{\"a\": 1}",
        ),
        (
            json!({"structured_outputs": {"regex": "[0-9]{2}"}}),
            "42",
            "4",
        ),
        (
            json!({"structured_outputs": {"choice": ["a", "b"]}}),
            "b",
            "c",
        ),
        (
            json!({"structured_outputs": {"grammar": "start: \"g\""}}),
            "g",
            "gg",
        ),
        (json!({"json_schema": text}), "{\"a\": 1}", "{}"),
        (json!({"regex": "a|bc"}), "bc", "abc"),
    ]
}

#[tokio::test]
async fn every_field_becomes_a_grammar() {
    let served = served();
    for (more, taken, refused) in fields() {
        for (path, body) in [(CHAT, chat(&more)), (COMPLETIONS, completion(&more))] {
            let grammar = served.grammar(path, body).await.expect("a grammar");
            served.check(&grammar, &[taken], &[refused, ""]);
        }
    }
    for more in [
        json!({"json_schema": "{\"type\": \"null\"}"}),
        json!({"json_schema": {"type": "null"}}),
        json!({"regex": "nu[l]{2}"}),
    ] {
        let body = json!({"text": "hi", "sampling_params": more});
        let grammar = served.grammar(GENERATE, body).await.expect("a grammar");
        served.check(&grammar, &["null"], &["nul", "{}"]);
    }
}

#[tokio::test]
async fn fields_that_ask_for_nothing_bind_nothing() {
    let served = served();
    for more in [
        json!({}),
        json!({"response_format": {"type": "text"}, "guided_json_object": false}),
        json!({"guided_json": null, "structured_outputs": null, "guided_decoding_backend": "auto"}),
    ] {
        assert_eq!(served.grammar(CHAT, chat(&more)).await, None);
    }
}

#[tokio::test]
async fn json_has_no_white_space_without_end() {
    let served = served();
    let more = json!({"response_format": {"type": "json_object"}});
    let grammar = served.grammar(CHAT, chat(&more)).await.unwrap();
    let answer = |spaces: usize| format!("{{{}\"a\": 1}}", " ".repeat(spaces));
    served.check(&grammar, &[&answer(32)], &[&answer(33)]);
}

#[tokio::test]
async fn refusals_name_the_field_and_the_reason() {
    let served = served();
    let deep = "{\"items\":".repeat(70) + "true" + &"}".repeat(70);
    for (more, param, says) in [
        (
            json!({"guided_json": true, "regex": "a"}),
            "regex",
            "guided_json and regex are both given",
        ),
        (
            json!({"response_format": {"type": "json_object"},
                "structured_outputs": {"choice": ["a"]}}),
            "structured_outputs.choice",
            "response_format and structured_outputs.choice are both given",
        ),
        (
            json!({"response_format": {"type": "json_schema"}}),
            "response_format",
            "json_schema.schema is missing",
        ),
        (
            json!({"response_format": {"type": "json_object", "schema": {}}}),
            "response_format.schema",
            "unknown field `schema`, expected `type` or `json_schema`",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n",
                "strict": true, "description": null, "scheme": {}}}}),
            "response_format.json_schema.scheme",
            "unknown field `scheme`",
        ),
        (
            json!({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}),
            "response_format.json_schema.schema",
            "json_schema.schema is given, which needs response_format.type to be",
        ),
        (
            json!({"stream": true, "stream_options": {"include_use": true}}),
            "stream_options.include_use",
            "unknown field `include_use`",
        ),
        (
            json!({"response_format": {"type": "structural_tag"}}),
            "response_format",
            "is \"structural_tag\"; it must be",
        ),
        (
            json!({"guided_json": {"not": {"type": "null"}}}),
            "guided_json",
            "guided_json is not supported: it has the keywords not, which",
        ),
        (
            json!({"guided_json": "{"}),
            "guided_json",
            "a string that is no JSON",
        ),
        (
            json!({"guided_json": [1]}),
            "guided_json",
            "is no JSON schema",
        ),
        (
            json!({"json_schema": deep}),
            "json_schema",
            "nested 70 levels deep; the limit is 64",
        ),
        (
            json!({"guided_regex": "(?=a)"}),
            "guided_regex",
            "look-around",
        ),
        (json!({"guided_regex": ""}), "guided_regex", "has 0 bytes"),
        (
            json!({"regex": "a".repeat(20_000)}),
            "regex",
            "20000 bytes; the limit is 16384",
        ),
        (
            json!({"guided_choice": []}),
            "guided_choice",
            "at least 1 item",
        ),
        (
            json!({"guided_choice": ["a", ""]}),
            "guided_choice",
            "none may be empty",
        ),
        (
            json!({"guided_choice": vec!["a"; 1025]}),
            "guided_choice",
            "1025 items; the limit is 1024",
        ),
        (
            json!({"guided_grammar": "root ::= \"a\""}),
            "guided_grammar",
            "Expected token",
        ),
        (
            json!({"guided_grammar": "a:b\n".repeat(3000)}),
            "guided_grammar",
            "3000 rules (colons); the limit is 2048",
        ),
        (
            json!({"structured_outputs": {}}),
            "structured_outputs",
            "none of json, regex",
        ),
        (
            json!({"structured_outputs": {"json": {}, "structural_tag": {}}}),
            "structured_outputs.structural_tag",
            "is not supported",
        ),
        (
            json!({"structured_outputs": {"jsn": {}}}),
            "structured_outputs.jsn",
            "unknown field `jsn`",
        ),
        (
            json!({"guided_whitespace_pattern": " ", "regex": "a"}),
            "guided_whitespace_pattern",
            "no field asks for JSON",
        ),
        (
            json!({"structured_outputs": {"json": {}, "whitespace_pattern": "("}}),
            "structured_outputs.whitespace_pattern",
            "unclosed group",
        ),
        (
            json!({"guided_whitespace_pattern": " ",
                "structured_outputs": {"json": {}, "disable_any_whitespace": true}}),
            "guided_whitespace_pattern",
            "structured_outputs has white space of its own",
        ),
        (
            json!({"guided_whitespace_pattern": " ",
                "guided_json": {"x-guidance": {"lenient": true}}}),
            "guided_whitespace_pattern",
            "the schema of guided_json has x-guidance: put it there",
        ),
        (
            json!({"guided_whitespace_pattern": "(", "guided_json": {}}),
            "guided_whitespace_pattern",
            "regular expression",
        ),
    ] {
        for (path, body) in [(CHAT, chat(&more)), (COMPLETIONS, completion(&more))] {
            let (message, field) = served.refusal(path, body).await;
            assert!(message.contains(says), "{says:?} is not in {message:?}");
            assert_eq!(field, param, "{message}");
        }
    }
}
