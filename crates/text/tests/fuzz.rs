//! Chat templates, as clients may send them. `make fuzz` runs this for long.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use chrono::{NaiveDate, NaiveDateTime};
use serde_json::json;
use tasuki_searches::fuzz;
use tasuki_text::{ChatInput, ModelText};

fn now() -> NaiveDateTime {
    NaiveDate::from_ymd_opt(2024, 7, 6)
        .and_then(|date| date.and_hms_micro_opt(9, 5, 3, 12_345))
        .expect("a date")
}
const MOST: Duration = Duration::from_secs(10);

/// The golden tests' templates and expressions.
fn corpus(folder: &Path) -> Vec<Vec<u8>> {
    let expressions = fs::read_to_string(folder.join("expressions.txt")).expect("expressions");
    let lines = expressions.lines().map(|line| line.as_bytes().to_vec());
    let files = fs::read_dir(folder.join("templates")).expect("templates");
    let mut paths: Vec<_> = files.map(|file| file.expect("a file").path()).collect();
    paths.sort();
    let templates = paths.iter().map(|path| fs::read(path).expect("a template"));
    templates.chain(lines).collect()
}

#[test]
fn fuzzed_templates_render_or_are_refused() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/text");
    let model = ModelText::load(&folder.join("models/byte_level")).expect("the model loads");
    let messages = json!([
        {"role": "system", "content": "Be «brief»."},
        {"role": "user", "content": "  What is 2 + 2?\n"},
        {"role": "assistant", "content": "4", "tool_calls": [
            {"type": "function", "id": "a", "function": {"name": "f", "arguments": {"a": [1, 2.5]}}}
        ]},
        {"role": "user", "content": "Why?"},
    ]);
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    fuzz("templates", &corpus(&folder), 5_000, |bytes, _| {
        let source = String::from_utf8_lossy(bytes);
        let input = ChatInput {
            tools: Some(tools.clone()),
            chat_template_override: Some(&source),
            ..ChatInput::new(messages.clone(), now())
        };
        let started = Instant::now();
        let rendered = model.render_chat(input);
        let took = started.elapsed();
        assert!(took < MOST, "{took:?}, the limit is {MOST:?}");
        if let Ok(text) = rendered {
            assert!(text.len() < 1 << 26, "{} bytes", text.len());
        }
    });
}
