//! Chats as templates render them.

use serde_json::{Value, json};
use tasuki_text::{ChatInput, TextError};

use super::{Folder, hello, now};

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
fn templates_are_searched() {
    let template = "{# <tool_call> #}{{ messages[0].content }}";
    let model = Folder::new("search", &[("chat_template.jinja", template)]).load();
    assert!(model.template_contains("<tool_call>"));
    assert!(!model.template_contains("</think>"));
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
