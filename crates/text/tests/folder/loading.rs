//! What `ModelText::load` reads from a folder, and which file it blames.

use std::fs;

use serde_json::json;
use tasuki_text::{GenerationDefaults, ModelText, TextError};

use super::{Folder, hello};

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
fn a_folder_that_is_not_there_is_refused_as_such() {
    let folder = Folder::new("not-there", &[]);
    let path = folder.0.join("model");
    let error = ModelText::load(&path).expect_err("refused").to_string();
    assert!(error.contains("there is no folder"), "{error}");
    assert!(error.contains("not-there/model"), "{error}");
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
fn the_tokenizers_own_end_token_counts_beside_those_of_the_config() {
    let config = r#"{"eos_token": "<|im_end|>"}"#;
    let tokenizer = ("tokenizer_config.json", config);
    let folder = Folder::new("own-eos", &[tokenizer]);
    assert_eq!(folder.load().eos_token_ids(), [2]);
    let base = ("config.json", r#"{"eos_token_id": 0}"#);
    let folder = Folder::new("fine-tuned", &[tokenizer, base]);
    assert_eq!(folder.load().eos_token_ids(), [0, 2]);
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
fn named_and_additional_special_tokens_both_count() {
    let config = r#"{"extra_special_tokens": {"image_token": "<image>"},
                     "additional_special_tokens": ["<|late|>"]}"#;
    let folder = Folder::new("both", &[("tokenizer_config.json", config)]);
    let model = folder.load();
    let ids = model.encode("<image><|late|>", false).expect("encodes");
    assert_eq!(ids.len(), 2);
    assert_eq!(model.decode(&ids, true).expect("decodes"), "");
}

#[test]
fn new_special_tokens_have_ids_in_the_order_of_transformers() {
    let config = r#"{"cls_token": "<cls>", "image_token": "<image>", "mask_token": "<mask>",
                     "unk_token": "<unk>"}"#;
    let model = Folder::new("order", &[("tokenizer_config.json", config)]).load();
    let ids = model.encode("<unk><cls><mask><image>", false);
    assert_eq!(ids.expect("encodes"), [701, 702, 703, 704]);
}

#[test]
fn a_named_token_is_special_also_where_the_tokenizer_has_it_as_text() {
    let config = r#"{"eos_token": "<tool_call>"}"#;
    let folder = Folder::new("named-text", &[("tokenizer_config.json", config)]);
    let model = folder.load();
    let ids = model.encode("a<tool_call>", false).expect("encodes");
    assert_eq!(model.decode(&ids, true).expect("decodes"), "a");
    assert!(model.is_special(ids[1]) && !Folder::new("text", &[]).load().is_special(ids[1]));
}

#[test]
fn added_tokens_come_from_the_old_file_too() {
    let added = r#"{"<second>": 702, "<first>": 701, "<tool_call>": 700}"#;
    let config = r#"{"eos_token": "<second>"}"#;
    let files = [
        ("added_tokens.json", added),
        ("tokenizer_config.json", config),
    ];
    let model = Folder::new("added", &files).load();
    let ids = model.encode("<first><second><tool_call>", false);
    let ids = ids.expect("encodes");
    assert_eq!(ids, [701, 702, 700]);
    assert_eq!(model.eos_token_ids(), [702]);
    let text = model.decode(&ids, true).expect("decodes");
    assert_eq!(text, "<first><tool_call>");
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
