//! Renders and token ids against `tests/text/golden/*.json`, which Python's
//! transformers wrote (`tests/text/make_golden.py`).

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use chrono::{NaiveDate, NaiveDateTime};
use serde_json::{Map, Value};
use tasuki_text::{ChatInput, Detokenizer, ModelText, TextError};

/// Lines of `expressions.txt` that are known to differ, and why.
const DEVIATIONS: &[(&str, &str)] = &[
    (
        "{% for k, v in user | dictsort(by='value', reverse=true) %}{{ k }};{% endfor %}",
        LENIENT,
    ),
    ("{{ 1 in 'abc' }}", LENIENT),
    ("{{ none[1:] }}", LENIENT),
    ("{{ missing[1:] | list }}", LENIENT),
    ("{% for x in none %}{% endfor %}", LENIENT),
    ("{{ users | sum(attribute='age') }}", LENIENT),
    (
        "{% macro f(a, b=2) %}{{ a }}-{{ b }}-{{ varargs }}-{{ kwargs }}{% endmacro %}\
         {{ f(1, 3, 4, x=5) }}",
        "macros take their named arguments only",
    ),
    (
        "{% macro f(a) %}{% endmacro %}{{ f is callable }}",
        "macros are not told from mappings",
    ),
    (
        "{{ self is defined }} {{ lipsum is defined }}",
        "template inheritance and filler text have no place in chats",
    ),
    ("{{ +3 }}", "no unary plus"),
    ("{{ 'a b c d' | truncate(5) }}", "no such filter"),
    (
        "{% for x in [1, 2] %}{% continue %}{% else %}all skipped{% endfor %}",
        "Jinja2 takes a loop that was continued every time for an empty one",
    ),
    (
        "{% set a = 1 %}{% with a = 2, b = a %}{{ b }}{% endwith %}",
        "the names of one `with` see each other",
    ),
];
const LENIENT: &str = "Python fails here, minijinja goes on";

/// `NOW` of `golden_cases.py`.
fn now() -> NaiveDateTime {
    NaiveDate::from_ymd_opt(2024, 7, 6)
        .and_then(|date| date.and_hms_micro_opt(9, 5, 3, 12_345))
        .expect("a date")
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/text")
}

fn golden(name: &str) -> Value {
    let path = folder().join("golden").join(format!("{name}.json"));
    let text = fs::read_to_string(&path).expect("the golden file is there");
    serde_json::from_str(&text).expect("the golden file is JSON")
}

fn model(name: &str) -> ModelText {
    ModelText::load(&folder().join("models").join(name)).expect("the model loads")
}

/// The default model's folder. `TASUKI_TEST_WITHOUT_MODEL=1` does without it.
///
/// # Panics
/// It has not been fetched: a test that compares nothing must not pass.
fn default_model() -> Option<ModelText> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty());
    let cache = match (variable("TASUKI_CACHE"), variable("XDG_CACHE_HOME")) {
        (Some(own), _) => PathBuf::from(own),
        (None, Some(xdg)) => PathBuf::from(xdg).join("tasuki"),
        (None, None) => PathBuf::from(variable("HOME")?).join(".cache/tasuki"),
    };
    let path = cache.join("models/smollm2-135m-instruct");
    if !path.join("tokenizer.json").is_file() {
        assert!(
            variable("TASUKI_TEST_WITHOUT_MODEL").is_some(),
            "{} is not there: run `make model`, or set TASUKI_TEST_WITHOUT_MODEL=1 to leave this \
             comparison out",
            path.display()
        );
        return None;
    }
    Some(ModelText::load(&path).expect("the default model loads"))
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key]
        .as_str()
        .unwrap_or_else(|| panic!("{key} in {value}"))
}

fn ids(value: &Value) -> Vec<u32> {
    let list = value.as_array().expect("a list of ids");
    list.iter()
        .map(|id| id.as_u64().expect("an id") as u32)
        .collect()
}

/// The arguments of `apply_chat_template`.
fn input<'a>(messages: &Value, arguments: &Value, template: Option<&'a str>) -> ChatInput<'a> {
    let mut kwargs: Map<String, Value> = arguments.as_object().expect("an object").clone();
    let mut flag = |name: &str| kwargs.remove(name).is_some_and(|value| value == true);
    let add_generation_prompt = flag("add_generation_prompt");
    let continue_final_message = flag("continue_final_message");
    let mut list = |name: &str| kwargs.remove(name).filter(|value| !value.is_null());
    ChatInput {
        messages: messages.clone(),
        tools: list("tools"),
        documents: list("documents"),
        add_generation_prompt,
        continue_final_message,
        template_kwargs: kwargs,
        chat_template_override: template,
        now: now(),
    }
}

/// What a golden file has about a render, from ours.
fn outcome(result: &Result<String, TextError>) -> Value {
    let error = |kind: &str| serde_json::json!({"error": kind});
    match result {
        Ok(text) => serde_json::json!({"text": text}),
        Err(TextError::Raised(message)) => {
            serde_json::json!({"error": "raised", "message": message})
        }
        Err(TextError::BadTemplate { .. }) => error("syntax"),
        Err(TextError::Render(_) | TextError::BadChat { .. }) => error("render"),
        Err(other) => panic!("{other}"),
    }
}

fn expected(case: &Value) -> Value {
    let keys = ["text", "error", "message"];
    let kept = keys
        .iter()
        .filter_map(|key| Some((*key, case.get(*key)?.clone())));
    kept.map(|(key, value)| (key.to_owned(), value)).collect()
}

/// Renders, compares, and compares the ids; the differences as text.
fn compare(model: &ModelText, case: &Value, name: &str, input: ChatInput<'_>) -> Option<String> {
    let result = model.render_chat(input);
    let (ours, theirs) = (outcome(&result), expected(case));
    if ours != theirs {
        return Some(format!("{name}\n  ours   {result:?}\n  theirs {theirs}"));
    }
    if let Ok(text) = result {
        let encoded = model.encode(&text, false).expect("the render encodes");
        assert_eq!(encoded, ids(&case["ids"]), "ids of {name}");
    }
    None
}

#[test]
fn templates_render_as_transformers_does() {
    let model = model("byte_level");
    let mut differing = Vec::new();
    for case in golden("templates").as_array().expect("a list") {
        let name = text(case, "template");
        let source = fs::read_to_string(folder().join(format!("templates/{name}.jinja")));
        let source = source.expect("the template is there");
        let input = input(&case["messages"], &case["arguments"], Some(&source));
        differing.extend(compare(&model, case, name, input));
    }
    assert!(differing.is_empty(), "{}", differing.join("\n"));
}

#[test]
fn expressions_render_as_transformers_does() {
    let model = model("byte_level");
    let golden = golden("expressions");
    let mut differing = Vec::new();
    for case in golden["cases"].as_array().expect("a list") {
        let source = text(case, "source");
        let input = input(&golden["messages"], &golden["variables"], Some(source));
        let difference = compare(&model, case, source, input);
        match (
            difference,
            DEVIATIONS.iter().any(|(line, _)| *line == source),
        ) {
            (Some(difference), false) => differing.push(difference),
            (None, true) => differing.push(format!("{source}\n  no longer differs")),
            _ => {}
        }
    }
    let count = differing.len();
    assert!(
        differing.is_empty(),
        "{count} differ\n{}",
        differing.join("\n")
    );
}

#[test]
fn tokens_are_those_of_transformers() {
    for (name, golden) in golden("tokens").as_object().expect("an object") {
        check_tokens(name, &model(name), golden);
    }
}

#[test]
fn the_default_model_is_as_in_transformers() {
    let Some(model) = default_model() else {
        return;
    };
    let golden = golden("default_model");
    check_tokens("the default model", &model, &golden["tokens"]);
    for case in golden["chats"].as_array().expect("a list") {
        let input = input(&case["messages"], &case["arguments"], None);
        let difference = compare(&model, case, "the default model", input);
        assert_eq!(difference, None);
    }
    assert_eq!(model.eos_token_ids(), [2]);
    assert_eq!(model.max_context(), Some(8192));
}

fn check_tokens(name: &str, model: &ModelText, golden: &Value) {
    assert_eq!(model.vocab_size() as u64, golden["length"], "{name}");
    for case in golden["encoded"].as_array().expect("a list") {
        let text = text(case, "text");
        let plain = model.encode(text, false).expect("encodes");
        assert_eq!(plain, ids(&case["ids"]), "{name}: {text:?}");
        let special = model.encode(text, true).expect("encodes");
        assert_eq!(special, ids(&case["ids_with_special"]), "{name}: {text:?}");
        check_text(
            name,
            model,
            &special,
            false,
            case["decoded"].as_str().expect("text"),
        );
    }
    for case in golden["decoded"].as_array().expect("a list") {
        let tokens = ids(&case["ids"]);
        check_text(name, model, &tokens, false, text(case, "text"));
        check_text(
            name,
            model,
            &tokens,
            true,
            text(case, "text_without_special"),
        );
    }
}

/// Decoded at once and decoded piece by piece.
fn check_text(name: &str, model: &ModelText, tokens: &[u32], skip_special: bool, expected: &str) {
    let whole = model.decode(tokens, skip_special).expect("decodes");
    assert_eq!(whole, expected, "{name}: {tokens:?}");
    for size in [1, 2, 7] {
        let mut detokenizer = Detokenizer::new(model, skip_special);
        let mut text: String = tokens
            .chunks(size)
            .map(|chunk| detokenizer.push(chunk))
            .collect();
        text.push_str(&detokenizer.finish());
        assert_eq!(text, expected, "{name}: {tokens:?} by {size}");
    }
}
