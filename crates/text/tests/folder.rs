//! What `ModelText::load` makes of folders, and of chats that mean harm.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use serde_json::{Value, json};
use tasuki_text::{ChatInput, CivilTime, Detokenizer, GenerationDefaults, ModelText, TextError};

fn small_model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/text/models")
        .join(name)
}

/// A folder of its own that goes when the test ends.
struct Folder(PathBuf);

impl Folder {
    /// The byte-level model's tokenizer and these files.
    fn new(name: &str, files: &[(&str, &str)]) -> Self {
        let path = std::env::temp_dir().join(format!("tasuki-text-{}-{name}", std::process::id()));
        let folder = Self(path);
        fs::create_dir_all(&folder.0).expect("a folder");
        let tokenizer = small_model("byte_level").join("tokenizer.json");
        fs::copy(tokenizer, folder.0.join("tokenizer.json")).expect("a tokenizer");
        for (file, content) in files {
            let file = folder.0.join(file);
            fs::create_dir_all(file.parent().expect("a parent")).expect("a folder");
            fs::write(file, content).expect("a file");
        }
        folder
    }

    fn load(&self) -> ModelText {
        ModelText::load(&self.0).expect("the model loads")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn now() -> CivilTime {
    CivilTime::from_unix(1_700_000_000, 0)
}

fn hello() -> ChatInput<'static> {
    ChatInput::new(json!([{"role": "user", "content": "hi"}]), now())
}

fn with_template(template: &str) -> Result<String, TextError> {
    let model = ModelText::load(&small_model("byte_level")).expect("the model loads");
    let mut input = hello();
    input.chat_template_override = Some(template);
    model.render_chat(input)
}

#[test]
fn a_folder_without_tokenizer_is_refused_by_name() {
    let folder = Folder::new("no-tokenizer", &[]);
    fs::remove_file(folder.0.join("tokenizer.json")).expect("removed");
    let error = ModelText::load(&folder.0).expect_err("refused");
    assert!(matches!(error, TextError::NoTokenizer(_)));
    assert!(
        error
            .to_string()
            .contains("no-tokenizer has no tokenizer.json"),
        "{error}"
    );
    assert!(!error.is_client_fault());
}

#[test]
fn a_broken_file_is_named() {
    for (file, content) in [
        ("tokenizer.json", "{}"),
        ("config.json", "[1]"),
        ("generation_config.json", "{"),
        ("tokenizer_config.json", r#"{"chat_template": 7}"#),
        (
            "tokenizer_config.json",
            r#"{"chat_template": [{"name": "default"}]}"#,
        ),
    ] {
        let folder = Folder::new("broken", &[(file, content)]);
        let error = ModelText::load(&folder.0).expect_err("refused");
        assert!(error.to_string().contains(file), "{error}");
    }
}

#[test]
fn settings_come_from_the_config_files() {
    let folder = Folder::new(
        "settings",
        &[
            (
                "config.json",
                r#"{"eos_token_id": 2, "max_position_embeddings": 4096}"#,
            ),
            (
                "generation_config.json",
                r#"{"eos_token_id": [2, 5], "temperature": 0.25, "top_k": 40, "min_p": 0.5}"#,
            ),
        ],
    );
    let model = folder.load();
    assert_eq!(model.eos_token_ids(), [2, 5]);
    assert_eq!(model.max_context(), Some(4096));
    let expected = GenerationDefaults {
        temperature: Some(0.25),
        top_k: Some(40),
        min_p: Some(0.5),
        ..GenerationDefaults::default()
    };
    assert_eq!(model.generation_defaults(), &expected);
}

#[test]
fn without_eos_ids_the_tokenizers_own_counts() {
    let config = r#"{"eos_token": "<|im_end|>"}"#;
    let folder = Folder::new("own-eos", &[("tokenizer_config.json", config)]);
    assert_eq!(folder.load().eos_token_ids(), [2]);
}

#[test]
fn special_tokens_come_from_the_old_files_too() {
    let map = r#"{"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|new|>"}"#;
    let template = "{{ bos_token }}{{ eos_token }}";
    let folder = Folder::new(
        "old-files",
        &[
            ("special_tokens_map.json", map),
            ("chat_template.jinja", template),
        ],
    );
    let model = folder.load();
    let rendered = model.render_chat(hello()).expect("renders");
    assert_eq!(rendered, "<|im_start|><|new|>");
    let ids = model.encode(&rendered, false).expect("encodes");
    assert_eq!(ids.len(), 2);
    assert_eq!(model.eos_token_ids(), &ids[1..]);
    assert_eq!(model.decode(&ids, true).expect("decodes"), "");
}

#[test]
fn templates_are_found_where_transformers_looks() {
    let config = r#"{"chat_template": "configured"}"#;
    let configured = Folder::new("configured", &[("tokenizer_config.json", config)]);
    assert_eq!(
        configured.load().render_chat(hello()).expect("renders"),
        "configured"
    );

    let file = [
        ("tokenizer_config.json", config),
        ("chat_template.jinja", "file"),
    ];
    let folder = Folder::new("file", &file);
    assert_eq!(folder.load().render_chat(hello()).expect("renders"), "file");

    let named = r#"{"chat_template": [{"name": "default", "template": "one"},
                                      {"name": "tool_use", "template": "two"},
                                      {"name": "rag", "template": "three"}]}"#;
    let model = Folder::new("named", &[("tokenizer_config.json", named)]);
    let model = model.load();
    assert_eq!(model.render_chat(hello()).expect("renders"), "one");
    let mut input = hello();
    input.tools = Some(json!([]));
    assert_eq!(model.render_chat(input.clone()).expect("renders"), "two");
    input.chat_template_override = Some("rag");
    assert_eq!(model.render_chat(input.clone()).expect("renders"), "three");
    input.chat_template_override = Some("a template");
    assert_eq!(model.render_chat(input).expect("renders"), "a template");

    let extra = [("additional_chat_templates/rag.jinja", "three")];
    let model = Folder::new("additional", &extra).load();
    let error = model.render_chat(hello()).expect_err("no default");
    assert!(error.to_string().ends_with("only: rag"), "{error}");
}

#[test]
fn no_template_and_a_bad_template_are_errors_of_their_own() {
    let none = Folder::new("none", &[]).load();
    assert!(!none.has_chat_template());
    let error = none.render_chat(hello()).expect_err("no template");
    assert!(matches!(error, TextError::NoTemplate(_)), "{error}");

    let template = [("chat_template.jinja", "line one\n{% if %}")];
    let bad = Folder::new("bad", &template).load();
    let error = bad.render_chat(hello()).expect_err("a bad template");
    assert!(
        matches!(error, TextError::BadTemplate { line: 2, .. }),
        "{error}"
    );
}

#[test]
fn content_parts_are_joined_only_where_the_template_prints_them() {
    let parts = json!([
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": "c"},
    ]);
    let joined = json!([
        {"role": "user", "content": "a\nb"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": "c"},
    ]);
    let plain = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let strict = "{% for m in messages %}{{ 'x' + m.content }}{% endfor %}";
    let reading = "{% for m in messages %}{% if m.content is string %}{{ m.content }}\
                   {% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}";
    for (template, expected) in [(plain, &joined), (strict, &joined), (reading, &parts)] {
        let folder = Folder::new("parts", &[("chat_template.jinja", template)]);
        assert_eq!(
            &folder.load().fit_content(parts.clone()),
            expected,
            "{template}"
        );
    }
}

#[test]
fn a_developer_is_the_system_where_the_template_does_not_know_the_name() {
    let roles = "{% for m in messages %}{{ m.role }} {% endfor %}";
    let knows = format!("{roles}{{# developer #}}");
    for (template, expected) in [(roles, "system user "), (&knows, "developer user ")] {
        let model = Folder::new("developer", &[("chat_template.jinja", template)]).load();
        let messages = json!([
            {"role": "developer", "content": "a"},
            {"role": "user", "content": "b"},
        ]);
        let rendered = model.render_chat(ChatInput::new(messages, now()));
        assert_eq!(rendered.expect("rendered"), expected);
    }
}

#[test]
fn chats_of_the_wrong_shape_are_the_clients_fault() {
    let model = Folder::new("shape", &[("chat_template.jinja", "{{ messages }}")]).load();
    let wrong = |change: fn(&mut ChatInput<'_>)| {
        let mut input = hello();
        change(&mut input);
        let error = model.render_chat(input).expect_err("refused");
        assert!(matches!(error, TextError::BadChat(_)), "{error}");
        assert!(error.is_client_fault());
        error.to_string()
    };
    assert!(wrong(|i| i.messages = json!({})).contains("messages must be a list"));
    assert!(wrong(|i| i.messages = json!([])).contains("messages is empty"));
    assert!(wrong(|i| i.messages = json!([{"role": "user"}, 1])).contains("messages[1]"));
    assert!(wrong(|i| i.tools = Some(json!("x"))).contains("tools"));
    assert!(wrong(|i| i.documents = Some(json!(["x"]))).contains("documents"));
    assert!(wrong(|i| i.continue_final_message = true).contains("exclude"));
    let reserved = wrong(|i| {
        i.template_kwargs.insert("messages".into(), json!([]));
    });
    assert!(reserved.contains("\"messages\""));
    let deep = wrong(|i| {
        let nested = (0..1000).fold(json!(1), |inner, _| json!([inner]));
        i.template_kwargs.insert("x".into(), nested);
    });
    assert!(deep.contains("nests deeper than 128"));
}

#[test]
fn a_template_cannot_run_forever() {
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}";
    let error = with_template(endless).expect_err("stopped");
    assert!(error.to_string().contains("steps"), "{error}");
}

#[test]
fn recursion_and_nesting_end_in_errors() {
    let macros = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}";
    assert!(with_template(macros).is_err());
    let nested = "{% set ns = namespace(x=[]) %}{% for _ in range(2000) %}\
                  {% set ns.x = [ns.x] %}{% endfor %}";
    for print in ["{{ ns.x }}", "{{ ns.x | tojson }}", "{{ ns.x | string }}"] {
        assert!(
            with_template(&format!("{nested}{print}")).is_err(),
            "{print}"
        );
    }
    let deep = nested.replace("2000", "90000");
    for rest in ["", "{{ ns.x == 1 }}", "{{ ns.x == [ns.x] }}"] {
        let _ = with_template(&format!("{deep}{rest}"));
    }
    let parens = format!("{{{{ {}1{} }}}}", "(".repeat(5000), ")".repeat(5000));
    assert!(matches!(
        with_template(&parens),
        Err(TextError::BadTemplate { .. })
    ));
}

#[test]
fn wild_arguments_end_in_errors_not_in_panics() {
    for expression in [
        "'x' * 99999999999",
        "'x'.center(99999999999)",
        "[] | tojson(indent=99999999999)",
        "range(99999999999)",
        "9 is divisibleby(0)",
        "(-9223372036854775808) // -1 ~ 1 % 0",
        "'x'.zfill(-1) ~ 'é'.find('é', -9223372036854775807) ~ none.x.y",
        "'é'[0:9223372036854775807:9223372036854775807] ~ missing.x",
        "'abc'[1:2:-1] ~ missing.x",
        "'{:>99999999999}'.format('x')",
        "'%99999999999d' | format(1)",
        "'%*d' | format(99999999999, 1)",
        "'a\\nb' | indent(99999999999)",
        "[1] | batch(99999999999, 0) | list",
        "[1] | slice(count=99999999999) | list",
        "strftime_now(5)",
    ] {
        let result = with_template(&format!("{{{{ {expression} }}}}"));
        assert!(
            matches!(result, Err(TextError::Render(_))),
            "{expression}: {result:?}"
        );
    }
}

#[test]
fn one_model_serves_many_threads() {
    let template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}";
    let model = Folder::new("threads", &[("chat_template.jinja", template)]).load();
    let model = Arc::new(model);
    let threads: Vec<_> = (0..4)
        .map(|index| {
            let model = Arc::clone(&model);
            thread::spawn(move || {
                let content = format!("世界 {index} 🙂").repeat(20);
                let chat = ChatInput::new(json!([{"role": "user", "content": content}]), now());
                let text = model.render_chat(chat).expect("renders");
                let ids = model.encode(&text, false).expect("encodes");
                let mut detokenizer = Detokenizer::new(&model, true);
                let mut back: String = ids.iter().map(|id| detokenizer.push(&[*id])).collect();
                back.push_str(&detokenizer.finish());
                assert_eq!(back, content);
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("no panic");
    }
}

#[test]
fn tokens_have_bytes_and_text() {
    for name in ["byte_level", "byte_fallback"] {
        let model = ModelText::load(&small_model(name)).expect("the model loads");
        let text = "x 界🙂\n";
        let ids = model.encode(text, false).expect("encodes");
        let bytes: Vec<u8> = ids.iter().flat_map(|id| model.token_bytes(*id)).collect();
        let bytes = String::from_utf8(bytes).expect("UTF-8");
        assert_eq!(bytes.trim_start(), text, "{name}");
        let half = ids
            .iter()
            .find(|id| model.token_text(**id).contains('\u{fffd}'));
        assert!(half.is_some(), "{name}: some token is part of a character");
    }
    let model = ModelText::load(&small_model("byte_level")).expect("the model loads");
    assert_eq!(model.token_text(2), "<|im_end|>");
    assert_eq!(model.token_piece(2).as_deref(), Some("<|im_end|>"));
    assert!(model.is_token(0) && !model.is_token(100_000));
    assert_eq!(model.token_bytes(100_000), Vec::<u8>::new());
}

#[test]
fn characters_are_never_split() {
    for name in ["byte_level", "byte_fallback", "metaspace", "wordpiece"] {
        let model = ModelText::load(&small_model(name)).expect("the model loads");
        let ids = model.encode("a 👩\u{200d}👧 界 z", false).expect("encodes");
        let mut detokenizer = Detokenizer::new(&model, false);
        let pieces: Vec<String> = ids.iter().map(|id| detokenizer.push(&[*id])).collect();
        let lost = pieces.iter().find(|piece| piece.contains('\u{fffd}'));
        assert_eq!(lost, None, "{name}: {pieces:?}");
    }
}

#[test]
fn special_tokens_can_be_kept() {
    let model = ModelText::load(&small_model("byte_level")).expect("the model loads");
    let ids = model
        .encode("<|im_start|>x<|im_end|>", false)
        .expect("encodes");
    let kept = model.token_id("<|im_end|>").expect("a token");
    assert_eq!(
        (ids.len(), ids[2], model.is_special(ids[0])),
        (3, kept, true)
    );
    let mut detokenizer = Detokenizer::new(&model, true).keeping(Arc::new([kept]));
    assert_eq!(detokenizer.push(&ids), "x<|im_end|>");
    assert_eq!(model.token_id("no token"), None);
}

#[test]
fn templates_are_searched() {
    let template = "{# <tool_call> #}{{ messages[0].content }}";
    let model = Folder::new("search", &[("chat_template.jinja", template)]).load();
    assert!(model.template_contains("<tool_call>"));
    assert!(!model.template_contains("</think>"));
}

#[test]
fn unfinished_characters_come_out_as_replacements_at_the_end() {
    for name in ["byte_level", "byte_fallback"] {
        let model = ModelText::load(&small_model(name)).expect("the model loads");
        let mut ids = model.encode("界", false).expect("encodes");
        ids.pop();
        let mut detokenizer = Detokenizer::new(&model, false);
        assert_eq!(detokenizer.push(&ids).trim(), "", "{name}");
        let whole = model.decode(&ids, false).expect("decodes");
        assert_eq!(detokenizer.finish(), whole.trim_start(), "{name}");
    }
}

#[test]
fn overrides_are_compiled_once_and_do_not_pile_up() {
    let model = Folder::new("overrides", &[]).load();
    for index in 0..100 {
        let template = format!("{index}: {{{{ messages[0].content }}}}");
        for _ in 0..2 {
            let mut input = hello();
            input.chat_template_override = Some(&template);
            let rendered = model.render_chat(input).expect("renders");
            assert_eq!(rendered, format!("{index}: hi"));
        }
    }
    let kept = format!("{model:?}").matches("Template {").count();
    assert!(kept <= 16, "{kept} are kept");
}

#[test]
fn null_messages_fields_are_absent() {
    let value: Value = json!([{"role": "user", "content": "x", "tool_calls": null}]);
    let template = "{{ messages[0].tool_calls is defined }} {{ tools is none }}";
    let model = Folder::new("null", &[("chat_template.jinja", template)]).load();
    let rendered = model.render_chat(ChatInput::new(value, now()));
    assert_eq!(rendered.expect("renders"), "False True");
}
