//! Answers as models write them, whole and cut everywhere.

use std::cell::Cell;

use super::format::{Call, DEEPSEEK, Format, HERMES, LLAMA, MISTRAL};
use super::reader::Reader;
use super::scanner::{Part, Reasoning, Scanner};
use super::schemas::Schemas;

thread_local! {
    static LOOKED_AT: Cell<usize> = const { Cell::new(0) };
}

/// Counts bytes of answers that this thread looks at.
pub fn looked_at(bytes: usize) {
    LOOKED_AT.set(LOOKED_AT.get() + bytes);
}

/// What came out, with text of one kind joined.
#[derive(Debug, Default, PartialEq)]
pub struct Outcome {
    pub content: String,
    reasoning: String,
    /// Name and arguments.
    pub calls: Vec<(String, String)>,
}

impl Outcome {
    fn take(&mut self, parts: Vec<Part>) {
        for part in parts {
            match part {
                Part::Content(text) => self.content += &text,
                Part::Reasoning(text) => self.reasoning += &text,
                Part::Call(at, Call { name, arguments }) => {
                    assert_eq!(at, self.calls.len());
                    self.calls.push((name, arguments));
                }
            }
        }
    }
}

pub fn marks(format: Option<&'static Format>, reasoning: Reasoning) -> Reader {
    Reader::Marks(Scanner::new(format, Schemas::default(), reasoning))
}

pub fn scan<'a>(reader: &Reader, pieces: impl IntoIterator<Item = &'a str>) -> Outcome {
    let (mut reader, mut outcome) = (reader.clone(), Outcome::default());
    for piece in pieces {
        outcome.take(reader.read(piece.to_owned(), false));
    }
    outcome.take(reader.read(String::new(), true));
    assert_eq!(reader.calls(), outcome.calls.len());
    outcome
}

/// Scans `answer` whole, by characters, and cut at every pair of positions.
#[track_caller]
pub fn check(
    reader: &Reader,
    answer: &str,
    content: &str,
    reasoning: &str,
    calls: &[(&str, &str)],
) {
    let own = |(name, arguments): &(&str, &str)| ((*name).to_owned(), (*arguments).to_owned());
    let expected = Outcome {
        content: content.to_owned(),
        reasoning: reasoning.to_owned(),
        calls: calls.iter().map(own).collect(),
    };
    assert_eq!(scan(reader, [answer]), expected, "{answer:?}");
    let ends = answer
        .char_indices()
        .map(|(at, c)| &answer[at..at + c.len_utf8()]);
    assert_eq!(scan(reader, ends), expected, "{answer:?} by characters");
    let cuts: Vec<usize> = answer.char_indices().map(|(at, _)| at).collect();
    for (first, &a) in cuts.iter().enumerate() {
        for &b in &cuts[first..] {
            let pieces = [&answer[..a], &answer[a..b], &answer[b..]];
            assert_eq!(scan(reader, pieces), expected, "{pieces:?}");
        }
    }
}

/// Answers with calls only, without reasoning: text, content, calls.
type Answers<'a> = &'a [(&'a str, &'a str, &'a [(&'a str, &'a str)])];

#[track_caller]
fn check_calls(format: &'static Format, answers: Answers<'_>) {
    for (answer, content, calls) in answers {
        let reader = marks(Some(format), Reasoning::Ignored);
        check(&reader, answer, content, "", calls);
    }
}

#[track_caller]
fn check_content(format: &'static Format, answers: &[&str]) {
    for answer in answers {
        check_calls(format, &[(answer, answer, &[])]);
    }
}

#[test]
fn hermes_calls() {
    check_calls(
        &HERMES,
        &[
            (
                "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Köln\"}}\n</tool_call>",
                "",
                &[("weather", "{\"city\": \"Köln\"}")],
            ),
            (
                "\n\n<tool_call>{\"name\":\"a\",\"arguments\":{}}</tool_call>\n\
                 <tool_call>{\"arguments\":{\"x\" : [1,{}]},\"name\":\"b\"}</tool_call>\n",
                "",
                &[("a", "{}"), ("b", "{\"x\" : [1,{}]}")],
            ),
            (
                "Let me see: <tool_call>{\"name\":\"a\"}</tool_call>\nDone <now>.",
                "Let me see: \nDone <now>.",
                &[("a", "{}")],
            ),
            // Braces, quotes and marks in strings.
            (
                r#"<tool_call>{"name":"a","arguments":{"s":"}\"</tool_call>{[\\"}}</tool_call>"#,
                "",
                &[("a", r#"{"s":"}\"</tool_call>{[\\"}"#)],
            ),
            // The token limit came in the closing mark, or a stop string before it.
            (
                "<tool_call>{\"name\":\"a\",\"arguments\":{}}\n</tool",
                "",
                &[("a", "{}")],
            ),
            // The first is broken.
            (
                "<tool_call>{\"name\":<tool_call>{\"name\":\"b\"}</tool_call>",
                "<tool_call>{\"name\":",
                &[("b", "{}")],
            ),
        ],
    );
}

#[test]
fn mistral_calls() {
    check_calls(
        &MISTRAL,
        &[
            (
                "[TOOL_CALLS] [{\"name\": \"a\", \"arguments\": {\"x\": \"]\"}}, \
                 {\"name\": \"b\", \"arguments\": {}, \"id\": \"1\"}]",
                "",
                &[("a", "{\"x\": \"]\"}"), ("b", "{}")],
            ),
            (
                "[TOOL_CALLS]a[ARGS]{\"x\": 1}[TOOL_CALLS]b[CALL_ID]123456789[ARGS]{}",
                "",
                &[("a", "{\"x\": 1}"), ("b", "{}")],
            ),
            (
                "See [1].[TOOL_CALLS]{\"name\":\"a\",\"arguments\":{}}",
                "See [1].",
                &[("a", "{}")],
            ),
        ],
    );
}

#[test]
fn llama_calls() {
    check_calls(
        &LLAMA,
        &[
            (
                "{\"name\": \"a\", \"parameters\": {\"x\": \"1\"}}",
                "",
                &[("a", "{\"x\": \"1\"}")],
            ),
            (
                "<|python_tag|>{\"name\": \"a\", \"parameters\": {}}; {\"name\": \"b\", \"arguments\": {}};",
                "",
                &[("a", "{}"), ("b", "{}")],
            ),
            (
                "\n{\"name\":\"a\",\"parameters\":{}} {\"x\": 1} {\"name\":\"b\",\"parameters\":{}}",
                " {\"x\": 1} {\"name\":\"b\",\"parameters\":{}}",
                &[("a", "{}")],
            ),
        ],
    );
}

#[test]
fn deepseek_calls() {
    check_calls(
        &DEEPSEEK,
        &[
            (
                "I look.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n\
                 {\"x\": \"ü\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>b\n\
                 ```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                "I look.\n",
                &[("a", "{\"x\": \"ü\"}"), ("b", "{}")],
            ),
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                "",
                &[("a", "{}")],
            ),
        ],
    );
    check_content(
        &DEEPSEEK,
        &[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁begin｜> or not",
            "<｜tool▁call▁begin｜>a{}<｜tool▁call▁end｜>",
        ],
    );
}

#[test]
fn what_is_no_call_is_content_as_it_was_written() {
    check_content(
        &HERMES,
        &[
            "",
            " \n",
            "  plain {text}, a < b, a[0] <tool> <tool_cal",
            "<tool_call>{\"name\":\"a\",\"arguments\":{\"x\":",
            "<tool_call>{\"name\":\"a\",\"arguments\":{\"x\":1}</tool_call> so",
            "<tool_call>{\"name\":\"\",\"arguments\":{}}</tool_call>",
            "<tool_call>{\"arguments\":{}}</tool_call>",
            "<tool_call>{\"name\":\"a\",\"arguments\":[1]}</tool_call>",
            "<tool_call>{\"name\":\"a\",\"arguments\":{}} then </tool_call>",
            "<tool_call>{\"name\":\"a\",}</tool_call>",
            "<tool_call>\n<function=a></function>\n</tool_call>",
            "<tool_call>[]</tool_call>",
        ],
    );
    check_content(
        &MISTRAL,
        &[
            "[TOOL_CALLS",
            "[TOOL_CALLS]",
            "[TOOL_CALLS][ARGS]{}",
            "[TOOL_CALLS]a {}",
            "[TOOL_CALLS]a b[ARGS]{}",
            "[TOOL_CALLS]x[TOOL_CALLS]a[ARGS]{}",
            "[TOOL_CALLS]a[ARGS]{\"x\": é}",
            "[1, 2] and {}",
        ],
    );
    check_content(
        &LLAMA,
        &[
            "{\"answer\": 42}",
            "{\"name\": \"Ada\"}",
            "{curly} and ; more",
            ";{\"name\":\"a\",\"parameters\":{}}",
            "x {\"name\":\"a\",\"parameters\":{}}",
            "<|python_tag|>print({})",
        ],
    );
}

#[test]
fn a_long_header_begins_no_call() {
    for (length, calls) in [(250, 1), (300, 0)] {
        let name = "n".repeat(length - "[ARGS]".len());
        let answer = format!("[TOOL_CALLS]{name}[ARGS]{{}}");
        let reader = marks(Some(&MISTRAL), Reasoning::Ignored);
        let outcome = scan(&reader, answer.split_inclusive('n'));
        assert_eq!(outcome, scan(&reader, [answer.as_str()]));
        assert_eq!(outcome.calls.len(), calls);
        assert_eq!(outcome.content.is_empty(), calls > 0);
    }
}

#[test]
fn reasoning_is_told_from_content_and_calls() {
    let call = "<tool_call>{\"name\":\"a\"}</tool_call>";
    for (answer, content, reasoning) in [
        (
            "<think>\na < b\n\nso </think>\n\nYes. <think>",
            "Yes. <think>",
            "a < b\n\nso",
        ),
        ("\n<think>\n\n</think>\n\nYes", "Yes", ""),
        ("<think>hm", "", "hm"),
        ("<think>hm</think>", "", "hm"),
        (" <thin", " <thin", ""),
        ("Yes <think>hm</think>", "Yes <think>hm</think>", ""),
    ] {
        let reader = marks(None, Reasoning::Marked);
        check(&reader, answer, content, reasoning, &[]);
    }
    let reader = marks(Some(&HERMES), Reasoning::Begun);
    let answer = format!("I {call}\n</think>\n\n{call}");
    check(&reader, &answer, "", &format!("I {call}"), &[("a", "{}")]);
    let answer = format!("hm</think>\n{call}\nYes");
    check(&reader, &answer, "\nYes", "hm", &[("a", "{}")]);
    let reader = marks(None, Reasoning::Begun);
    check(&reader, "<think>\nhm\n</think> x", "x", "hm", &[]);
    check(&reader, "hm </thin", "", "hm </thin", &[]);
}

#[test]
fn text_goes_out_as_soon_as_it_cannot_be_a_mark() {
    let mut scanner = Scanner::new(Some(&HERMES), Schemas::default(), Reasoning::Marked);
    let mut push = |text: &str| scanner.push(text);
    assert_eq!(push("a "), [Part::Content("a ".to_owned())]);
    assert_eq!(push("<tool_"), []);
    assert_eq!(push("x <"), [Part::Content("<tool_x ".to_owned())]);
    assert_eq!(push("tool_call>{}"), []);
    let broken = push("é");
    assert_eq!(broken, [Part::Content("<tool_call>{}é".to_owned())]);
}

#[test]
fn each_byte_is_looked_at_a_few_times_at_most() {
    let megabyte = 1 << 20;
    let long = "[{\\\"".repeat(megabyte / 5);
    let answers = [
        format!("<tool_call>{{\"name\":\"a\",\"arguments\":{{\"x\":\"{long}\"}}}}</tool_call>"),
        "<tool_call>{\"name\":\"a\"}</tool_call> ".repeat(megabyte / 38),
        "<tool_call>{".repeat(megabyte / 12),
        "<tool_call>".repeat(megabyte / 11),
        "<".repeat(megabyte),
        " ".repeat(megabyte),
        format!("<tool_call>{{}}{}", " ".repeat(megabyte)),
    ];
    for answer in answers {
        let times = times_looked_at(&marks(Some(&HERMES), Reasoning::Marked), &answer);
        assert!(times < 3.0, "{times} times: {:?}", &answer[..20]);
    }
    // A mark may be in the header of the one before: each header is looked at, to its limit.
    let answer = "[TOOL_CALLS]x".repeat(megabyte / 13);
    let times = times_looked_at(&marks(Some(&MISTRAL), Reasoning::Marked), &answer);
    assert!((2.0..40.0).contains(&times), "{times}");
}

/// How often each byte is looked at, on average: the more of short and of long pieces.
pub fn times_looked_at(reader: &Reader, answer: &str) -> f64 {
    let times = [4, answer.len()].map(|piece| {
        LOOKED_AT.set(0);
        let mut reader = reader.clone();
        for piece in answer.as_bytes().chunks(piece) {
            reader.read(std::str::from_utf8(piece).unwrap().to_owned(), false);
        }
        reader.read(String::new(), true);
        LOOKED_AT.take() as f64 / answer.len() as f64
    });
    times[0].max(times[1])
}

#[test]
fn templates_show_the_format() {
    let format = |template: &str| {
        Format::of_template(|mark| template.contains(mark)).map(|format| format.open)
    };
    assert_eq!(format("{{ message.content }}"), None);
    assert_eq!(format("<|start_header_id|>"), None);
    assert_eq!(
        format("<|start_header_id|> <tool_call> \"parameters\""),
        Some(HERMES.open)
    );
    assert_eq!(format("[TOOL_CALLS]"), Some(MISTRAL.open));
    assert_eq!(format("'<｜tool▁calls▁begin｜>'"), Some(DEEPSEEK.open));
    assert_eq!(
        format("<|start_header_id|> \"parameters\""),
        Some(LLAMA.open)
    );
    assert_eq!(format("<|python_tag|>"), Some(LLAMA.open));
    let tags = |template: &str| {
        let format = Format::of_template(|mark| template.contains(mark));
        format.and_then(|format| Some(format.tags?.name.0))
    };
    assert_eq!(tags("<tool_call> {\"name\": <function-name>"), None);
    assert_eq!(
        tags("<tool_call>\n<function=f>\n<parameter=x>"),
        Some("<function=")
    );
    assert_eq!(tags("<tool_call>{name}\n<arg_key> <arg_value>"), Some(""));
}
