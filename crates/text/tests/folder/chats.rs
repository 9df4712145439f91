//! Chats as templates render them.

use serde_json::{Value, json};
use tasuki_text::{ChatInput, Extra, TextError};

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
    let wrong = |field: &str, says: &str, change: fn(&mut ChatInput<'_>)| {
        let mut input = hello();
        change(&mut input);
        let error = model.render_chat(input).expect_err("refused");
        assert!(matches!(error, TextError::BadChat { .. }), "{error}");
        assert_eq!(error.field(), Some(field), "{error}");
        assert!(error.is_client_fault());
        assert!(error.to_string().contains(says), "{error}");
    };
    fn nested() -> Value {
        (0..1000).fold(json!(1), |inner, _| json!([inner]))
    }
    wrong("messages", "messages must be a list", |i| {
        i.messages = json!({})
    });
    wrong("messages", "messages is empty", |i| i.messages = json!([]));
    wrong("messages", "messages[1]", |i| {
        i.messages = json!([{"role": "user"}, 1]);
    });
    wrong("tools", "tools", |i| i.tools = Some(json!("x")));
    wrong("documents", "documents must be a list", |i| {
        i.documents = Some(json!(["x"]));
    });
    wrong("documents", "documents nests deeper than 128", |i| {
        i.documents = Some(json!([{"x": nested()}]));
    });
    wrong("continue_final_message", "exclude", |i| {
        i.continue_final_message = true;
    });
    wrong("continue_final_message", "does not use \"content\"", |i| {
        i.messages = json!([{"role": "user"}]);
        i.add_generation_prompt = false;
        i.continue_final_message = true;
    });
    wrong("chat_template_kwargs", "\"messages\"", |i| {
        i.template_kwargs.insert("messages".into(), json!([]));
    });
    wrong("chat_template_kwargs", "nests deeper than 128", |i| {
        i.template_kwargs.insert("x".into(), nested());
    });
}

#[test]
fn what_a_template_has_no_place_for_is_known() {
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let documents = json!([{"title": "t", "text": "d"}]);
    let shown = |name: &str, files: &[(&str, &str)], change: fn(&mut ChatInput<'_>)| {
        let model = Folder::new(name, files).load();
        let mut input = hello();
        input.tools = Some(tools.clone());
        input.documents = Some(documents.clone());
        change(&mut input);
        let rendered = model.render_chat(input.clone()).expect("renders");
        [Extra::Tools, Extra::Documents].map(|extra| model.shows(extra, input.clone(), &rendered))
    };
    let by = |template: &str, change: fn(&mut ChatInput<'_>)| {
        shown("extras", &[("chat_template.jinja", template)], change)
    };
    let none = |_: &mut ChatInput<'_>| {};
    // The names alone say nothing: "f" and "tools" are in this prompt too.
    assert_eq!(by("of tools {{ messages }}", none), [false, false]);
    assert_eq!(
        by("{% set x = tools %}{{ messages }}", none),
        [false, false]
    );
    assert_eq!(by("{{ tools | tojson }}", none), [true, false]);
    assert_eq!(
        by("{% for d in documents %}{{ d.text }}{% endfor %}", none),
        [false, true]
    );
    // It fails without them.
    assert_eq!(by("{{ tools[0].type }}", none), [true, false]);
    let only_after_a_system_message =
        "{% if messages[0].role == 'system' %}{{ tools }}{% endif %}{{ messages[0].content }}";
    assert_eq!(by(only_after_a_system_message, none), [false, false]);
    let with_system = |i: &mut ChatInput<'_>| {
        i.messages = json!([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]);
    };
    assert_eq!(by(only_after_a_system_message, with_system), [true, false]);
    // A client's own template, and the model's template for tools.
    let own = |i: &mut ChatInput<'_>| i.chat_template_override = Some("{{ documents }}");
    assert_eq!(by("{{ tools }}", own), [false, true]);
    let named = r#"{"chat_template": [{"name": "default", "template": "{{ messages }}"},
                                      {"name": "tool_use", "template": "one {{ messages }}"}]}"#;
    let named = [("tokenizer_config.json", named)];
    assert_eq!(shown("extras-named", &named, none), [false, false]);
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

#[test]
fn a_template_that_asks_for_content_of_none_gets_it() {
    let called = json!([
        {"role": "assistant", "content": null, "tool_calls": [{"x": 1}]},
        {"role": "assistant", "tool_calls": [{"x": 2}]},
        {"role": "assistant", "content": "c"},
    ]);
    for (template, expected) in [
        (
            "{% for m in messages %}{% if m['content'] is none %}{{ m['tool_calls'][0]['x'] }}\
             {% endif %}{% if m['content'] is not none %}{{ '+' + m['content'] }}{% endif %}\
             {% endfor %}",
            "12+c",
        ),
        (
            "{% for m in messages %}{% set content = m.content %}\
             {{ '-' if content is not none else 'no' }}{% endfor %}",
            "nono-",
        ),
        // One that does not ask would write it.
        (
            "{% for m in messages %}[{{ m.content }}]{% endfor %}",
            "[][][c]",
        ),
    ] {
        let model = Folder::new("none", &[("chat_template.jinja", template)]).load();
        let rendered = model.render_chat(ChatInput::new(called.clone(), now()));
        assert_eq!(rendered.expect(template), expected);
    }
}

#[test]
fn a_template_that_fails_without_content_gets_an_empty_one() {
    let called = json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": null, "tool_calls": [{"x": 1}]},
        {"role": "assistant", "tool_calls": [{"x": 2}]},
    ]);
    for (template, expected) in [
        (
            "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}",
            Ok("user:a;assistant:;assistant:;"),
        ),
        (
            "{% for m in messages %}{{ m['content'].strip() }};{% endfor %}",
            Ok("a;;;"),
        ),
        (
            "{% for m in messages %}{% if m.content is not none and m.role == 'user' %}u\
             {% else %}{{ '-' + m.content }}{% endif %}{% endfor %}",
            Ok("u--"),
        ),
        // What it refuses by itself stays refused, with its own words.
        ("{{ raise_exception('no calls') }}", Err("no calls")),
        ("{{ messages[1].content + none }}", Err("undefined")),
    ] {
        let model = Folder::new("empty", &[("chat_template.jinja", template)]).load();
        let rendered = model.render_chat(ChatInput::new(called.clone(), now()));
        match expected {
            Ok(expected) => assert_eq!(rendered.expect(template), expected),
            Err(says) => {
                let error = rendered.expect_err(template).to_string();
                assert!(error.contains(says), "{error}");
            }
        }
    }
}
