//! Grammars that come with requests: JSON schemas, regular expressions, Lark, and tools that must be
//! called. What is taken is followed, and the answer must be what the request asked for.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use llguidance::ParserFactory;
use llguidance::toktrie::TokenId;
use rand::Rng;
use rand::seq::IndexedRandom;
use serde::de::IgnoredAny;
use serde_json::Value;
use tasuki_flow::{Generation, Grammar};
use tasuki_searches::{Random, corpus, fuzz};
use tower::ServiceExt;

use crate::app::{App, HttpSettings};
use crate::grammar::testing::{factory, written};
use crate::openai::fuzzed::{called, usual_whitespace};
use crate::routes::routes;
use crate::testing::{FakeGenerator, TestModel, settings};

const CORPUS: &str = include_str!("../../fuzz/grammars.txt");
const PATHS: [&str; 4] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/v1/responses",
];
/// What a chat template shows of the ways in which its model writes calls and reasoning.
const MARKS: [&str; 10] = [
    "",
    "<tool_call>",
    "<tool_call> </think>",
    "[TOOL_CALLS]",
    "[TOOL_CALLS][ARGS]",
    "[TOOL_CALLS][CALL_ID][ARGS] </think>",
    "<|python_tag|>",
    "tool▁calls▁begin ```json </think>",
    "tool▁calls▁begin",
    "<|channel|>",
];
/// Of an answer. Free text can be endless.
const MOST_TOKENS: usize = 300;
/// They lead to an end, where they are allowed.
const CLOSING: &[u8] = b"\"]},:e0<|/ ";

/// A model, and the router before it.
struct Served {
    model: TestModel,
    factory: ParserFactory,
    settings: HttpSettings,
    generator: Arc<FakeGenerator>,
    service: Router,
}

impl Served {
    fn new(marks: &str) -> Self {
        let template =
            format!("{{{{ messages[0].content }}}}{{% if tools %}}t{{% endif %}}{{# {marks} #}}");
        let model = TestModel::with_template(Some(&template));
        let generator = Arc::new(FakeGenerator::saying("x"));
        let settings = HttpSettings {
            max_concurrent_requests: 1 << 20,
            max_body_bytes: 1 << 16,
            ..settings()
        };
        let fake = Arc::clone(&generator) as _;
        let app = App::new(fake, model.only(), settings.clone());
        Self {
            factory: factory(&model.text),
            model,
            settings,
            generator,
            service: routes(Arc::new(app)),
        }
    }

    /// Sends a request; `None`: it is refused.
    async fn taken(&self, path: &str, body: &[u8]) -> Option<Generation> {
        let request = Request::post(path).body(Body::from(body.to_vec())).unwrap();
        let response = self.service.clone().oneshot(request).await.unwrap();
        let status = response.status();
        let answer = to_bytes(response.into_body(), 1 << 24).await.unwrap();
        let answer = String::from_utf8_lossy(&answer);
        let is_ok = status == StatusCode::OK;
        assert!(is_ok || status.is_client_error(), "{status}: {answer}");
        self.generator.started.lock().unwrap().clear();
        self.generator.http_errors.lock().unwrap().clear();
        let mut seen = self.generator.seen.lock().unwrap();
        assert!(is_ok || seen.is_empty(), "{answer}");
        seen.drain(..).next_back()
    }

    /// An answer that keeps to the grammar, if one ends soon.
    fn answer(&self, grammar: &Grammar, random: &mut Random) -> Option<Vec<u8>> {
        let bytes = u32::try_from(self.model.text.vocab_size()).expect("few");
        let closing: BTreeSet<TokenId> = CLOSING.iter().map(|b| bytes + u32::from(*b)).collect();
        let ends = self.model.text.eos_token_ids();
        written(
            &self.model.text,
            &self.factory,
            grammar,
            MOST_TOKENS,
            |allowed| {
                let ending = allowed.iter().find(|token| ends.contains(token));
                if let Some(end) = ending.filter(|_| random.random_bool(0.4)) {
                    return *end;
                }
                let closing: Vec<TokenId> = allowed
                    .iter()
                    .copied()
                    .filter(|token| closing.contains(token))
                    .collect();
                let closes = random.random_bool(0.6);
                let chosen = closing.choose(random).filter(|_| closes);
                *chosen.or_else(|| allowed.choose(random)).expect("some")
            },
        )
    }

    /// An answer of calls is read as calls of the request's tools.
    fn check_calls(&self, tools: &[Value], generation: &Generation, answer: &[u8]) {
        let names: Vec<&Value> = tools
            .iter()
            .filter_map(|tool| tool.pointer("/function/name").or(tool.get("name")))
            .collect();
        let prompt = generation.prompt.iter();
        let prompt: Vec<u8> = prompt.filter_map(|id| u8::try_from(*id).ok()).collect();
        let prompt = String::from_utf8_lossy(&prompt).into_owned();
        let text = String::from_utf8(answer.to_vec()).expect("UTF-8");
        let calls = called(&self.settings, &self.model.text, prompt, &text);
        assert!(!calls.is_empty(), "no call is in {text:?}");
        for (name, arguments) in calls {
            assert!(names.iter().any(|known| **known == name), "{text:?}");
            assert!(
                arguments.starts_with('{') && is_json(arguments.as_bytes()),
                "{text:?}"
            );
        }
    }
}

/// `IgnoredAny`: numbers of any size.
fn is_json(text: &[u8]) -> bool {
    serde_json::from_slice::<IgnoredAny>(text).is_ok()
}

/// Whether the first byte of JSON fits the schema's `type`.
fn has_type(schema: &Value, json: &[u8]) -> bool {
    let first = json.trim_ascii_start().first().copied();
    let Some(first) = first else {
        return false;
    };
    match schema["type"].as_str() {
        Some("object") => first == b'{',
        Some("array") => first == b'[',
        Some("string") => first == b'"',
        Some("null") => first == b'n',
        Some("boolean") => first == b't' || first == b'f',
        Some("integer" | "number") => first == b'-' || first.is_ascii_digit(),
        _ => true,
    }
}

/// What the request's own constraint says of the answer.
fn check_constraint(asked: &Value, grammar: &Grammar, answer: &[u8]) {
    let shown = String::from_utf8_lossy(answer);
    match grammar {
        Grammar::JsonSchema(text) => {
            let schema: Value = serde_json::from_str(text).expect("the router wrote it");
            // A client may ask for white space that is none.
            if schema["x-guidance"] == usual_whitespace() {
                assert!(is_json(answer), "{shown:?} by {text}");
                assert!(has_type(&schema, answer), "{shown:?} by {text}");
            }
        }
        Grammar::Regex(pattern) => {
            let whole = regex::bytes::Regex::new(&format!("^(?:{pattern})$"));
            if let Ok(whole) = whole {
                assert!(whole.is_match(answer), "{shown:?} by {pattern}");
            }
        }
        Grammar::Lark(text) => {
            let choices = asked["guided_choice"].as_array();
            if let Some(choices) = choices.filter(|_| text.starts_with("CHOICE:")) {
                let is_one = choices.iter().any(|choice| *choice == *shown);
                assert!(is_one, "{shown:?} of {choices:?}");
            }
        }
    }
}

/// A case is a path, a line's end and a body.
#[test]
fn fuzzed_grammars_are_refused_or_kept_to() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let all = MARKS.map(Served::new);
    fuzz("grammars", &corpus(CORPUS), 2_000, |bytes, random| {
        let end = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(0);
        let (head, body) = bytes.split_at(end);
        let known = PATHS.iter().position(|path| path.as_bytes() == head);
        let path = PATHS[known.unwrap_or(head.len() % PATHS.len())];
        let served = all.choose(random).expect("some");
        let Some(generation) = runtime.block_on(served.taken(path, body)) else {
            return;
        };
        let Some(grammar) = &generation.sampling.grammar else {
            return;
        };
        let Some(answer) = served.answer(grammar, random) else {
            return;
        };
        let asked: Value = serde_json::from_slice(body).expect("it was taken");
        let must_call = match &asked["tool_choice"] {
            Value::String(choice) => choice == "required",
            choice => choice.is_object(),
        };
        let tools = asked["tools"].as_array().filter(|tools| !tools.is_empty());
        match tools {
            Some(tools) if must_call => {
                let own_whitespace = asked.to_string().contains("x-guidance");
                if !own_whitespace {
                    served.check_calls(tools, &generation, &answer);
                }
            }
            Some(_) => {}
            None => check_constraint(&asked, grammar, &answer),
        }
    });
}
