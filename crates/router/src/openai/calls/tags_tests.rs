//! Calls in tags, whole and cut everywhere; with JSON in their place; and what is none.

use serde_json::json;

use super::format::{Format, GLM, HERMES, QWEN_CODER};
use super::reader::Reader;
use super::scanner::{Reasoning, Scanner};
use super::schemas::Schemas;
use super::tests::{check, marks, scan, times_looked_at};

fn reader(format: &'static Format) -> Reader {
    let properties = json!({"city": {"type": "string"}, "days": {"type": "integer"},
        "metric": {"type": "boolean"}, "tags": {"type": "array"}, "share": {"type": "number"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "any": {}});
    let tool = json!({"type": "function", "function": {"name": "weather",
        "parameters": {"type": "object", "properties": properties}}});
    let schemas = Schemas::new(&[tool]);
    Reader::Marks(Scanner::new(Some(format), schemas, Reasoning::Ignored))
}

/// One call of `weather` with one argument.
fn one(format: &'static Format, key: &str, value: &str) -> String {
    let inside = match format.tags.is_some_and(|tags| tags.line_feeds) {
        true => {
            format!("\n<function=weather>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n")
        }
        false => {
            format!("weather\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n")
        }
    };
    format!("<tool_call>{inside}</tool_call>")
}

#[test]
fn values_have_the_kind_that_their_schema_has() {
    for format in [&QWEN_CODER, &GLM] {
        for (key, value, json) in [
            ("city", "Köln", r#""Köln""#),
            ("city", "12", r#""12""#),
            ("city", "\"quoted\"", r#""\"quoted\"""#),
            ("city", " <b>\n{\n", r#"" <b>\n{\n""#),
            ("city", "null", r#""null""#),
            ("city", "", r#""""#),
            ("days", "3", "3"),
            ("days", "three", r#""three""#),
            ("days", "1.5", "1.5"),
            ("share", "2", "2"),
            ("share", "-1e3", "-1e3"),
            ("metric", "true", "true"),
            ("metric", "False", "false"),
            ("tags", "[\"a\", {\"b\": 1.50}]", "[\"a\", {\"b\": 1.50}]"),
            ("tags", "[1", r#""[1""#),
            ("note", "None", "null"),
            ("note", "5", r#""5""#),
            ("any", "5", "5"),
            ("any", "True", r#""True""#),
            ("unknown", "{\"a\": 1}", "{\"a\": 1}"),
            ("unknown", "\"a\"", r#""\"a\"""#),
        ] {
            let answer = one(format, key, value);
            let arguments = format!("{{\"{key}\": {json}}}");
            let outcome = scan(&reader(format), answer.split_inclusive(' '));
            assert_eq!(outcome.calls, [("weather".to_owned(), arguments)]);
            assert_eq!(outcome.content, "");
        }
    }
}

#[test]
fn answers_have_text_and_several_calls() {
    let qwen = "I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n\
        <parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call><function=now>\
        </function></tool_call>\n";
    let glm = "I look.\n\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n\
        <arg_key>days</arg_key><arg_value>3</arg_value></tool_call>\n<tool_call>now\n</tool_call>";
    let arguments = "{\"city\": \"Köln\", \"days\": 3}";
    let calls = [("weather", arguments), ("now", "{}")];
    for (format, answer) in [(&QWEN_CODER, qwen), (&GLM, glm)] {
        check(&reader(format), answer, "I look.\n\n", "", &calls);
    }
    // Where a grammar makes them call they write JSON.
    let json = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"days\": 3}}\n</tool_call>";
    for format in [&QWEN_CODER, &GLM] {
        check(
            &reader(format),
            json,
            "",
            "",
            &[("weather", "{\"days\": 3}")],
        );
    }
}

#[test]
fn marks_of_calls_may_be_in_a_value() {
    for format in [&QWEN_CODER, &GLM] {
        let answer = one(format, "city", "<tool_call> </tool_call> <parameter=x>");
        let arguments = "{\"city\": \"<tool_call> </tool_call> <parameter=x>\"}";
        check(&reader(format), &answer, "", "", &[("weather", arguments)]);
    }
}

#[test]
fn values_may_lack_their_closing_mark() {
    let reader = reader(&QWEN_CODER);
    let both = "{\"city\": \"Köln\", \"days\": 3}";
    for (inside, arguments) in [
        (
            "<parameter=city>\nKöln\n<parameter=days>\n3\n</parameter>\n",
            both,
        ),
        (
            "<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n",
            both,
        ),
        ("<parameter=city>\nKöln\n<parameter=days>\n3\n", both),
        // As long as the call does not end there, it is text of the value.
        (
            "<parameter=city>\na\n</function>\nb </function>\n</tool_call>\n</parameter>\n",
            r#"{"city": "a\n</function>\nb </function>\n</tool_call>"}"#,
        ),
    ] {
        let answer = format!("<tool_call>\n<function=weather>\n{inside}</function>\n</tool_call>");
        check(&reader, &answer, "", "", &[("weather", arguments)]);
    }
    let cut = "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</function>\n</tool";
    check(&reader, cut, "", "", &[("weather", "{\"days\": 3}")]);
}

#[test]
fn a_broken_call_is_content_and_a_later_one_is_a_call() {
    for (format, answers) in [
        (
            &QWEN_CODER,
            &[
                "<tool_call>\n<function=a",
                "<tool_call>\n<function=a>\n<parameter=x>\n1\n</tool_call>",
                "<tool_call>\n<function=a>\n<parameter=x>\n1\n</parameter>\n</tool_call>",
                "<tool_call><function=></function></tool_call>",
                "<tool_call><function=a>text</function></tool_call>",
                "<tool_call>now</tool_call>",
                "The mark <tool_call> begins a call.",
            ][..],
        ),
        (
            &GLM,
            &[
                "<tool_call>now",
                "<tool_call>now</tool_cal",
                "<tool_call>a\n<arg_key>x</arg_key>\n</tool_call>",
                "<tool_call>a\n<arg_key>x</arg_key>\n<arg_value>1</tool_call>",
                "<tool_call>a b</tool_call>",
                "<tool_call></tool_call>",
                "The mark <tool_call> begins a call.",
            ],
        ),
    ] {
        for answer in answers {
            check(&reader(format), answer, answer, "", &[]);
        }
        let call = one(format, "days", "3");
        let answer = format!("<tool_call>oh no {call}");
        let calls = [("weather", "{\"days\": 3}")];
        check(&reader(format), &answer, "<tool_call>oh no ", "", &calls);
    }
    // Cut in the closing mark it has all its arguments.
    let cut = "<tool_call><function=now></function>\n</tool_";
    check(&reader(&QWEN_CODER), cut, "", "", &[("now", "{}")]);
    let hermes = marks(Some(&HERMES), Reasoning::Ignored);
    let tags = one(&QWEN_CODER, "days", "3");
    check(&hermes, &tags, &tags, "", &[]);
}

#[test]
fn text_between_values_has_a_limit() {
    // With the tags around it 256 bytes, and one more.
    for (length, calls) in [(231, 1), (232, 0)] {
        let blank = " ".repeat(length);
        let answer = format!("<tool_call><function=now>{blank}</function></tool_call>");
        let reader = reader(&QWEN_CODER);
        let outcome = scan(&reader, answer.split_inclusive(' '));
        assert_eq!(outcome, scan(&reader, [answer.as_str()]));
        assert_eq!(outcome.calls.len(), calls);
        assert_eq!(outcome.content.is_empty(), calls > 0);
    }
}

#[test]
fn each_byte_is_looked_at_a_few_times_at_most() {
    let many = 1 << 14;
    for format in [&QWEN_CODER, &GLM] {
        let answers = [
            one(format, "city", &"<x".repeat(many)),
            one(format, "city", "a").repeat(many / 64),
            one(format, "city", "a")[..20].repeat(many / 8),
            "<tool_call>a".repeat(many),
            format!("<tool_call>{}", "a".repeat(many)),
            one(format, "city", &"<tool_call>a".repeat(many)).replace("</tool_call>", "<x"),
            one(
                format,
                "city",
                &"\n</function>\n<x\n<parameter=x>".repeat(many / 16),
            ),
        ];
        for answer in answers {
            let times = times_looked_at(&reader(format), &answer);
            assert!(times < 6.0, "{times} times: {:?}", &answer[..40]);
        }
    }
}
