//! Answers in the harmony format: read, and bound by grammars.

use serde_json::json;

use super::Parsers;
use super::grammar::Asked;
use super::harmony::{CHANNEL, Channels, Harmony, SPECIAL};
use super::reader::Reader;
use super::scanner::Reasoning;
use super::tests::{check, scan, times_looked_at};
use crate::grammar::Grammars;
use crate::grammar::testing::{accepts, tokens};
use crate::openai::chat::tools::BoundCalls;
use crate::openai::request::constraint::{Constraint, json_form, usual_whitespace};
use crate::testing::TestModel;

const ALL: Harmony = Harmony {
    calls: true,
    reasoning: true,
};
const THOUGHT: &str = "<|channel|>analysis<|message|>a < b,\n\nso<|end|><|start|>assistant";
const CALL: &str =
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"x\": \"ü</s>\"}";

fn reader(looked_for: Harmony) -> Reader {
    Reader::Channels(Channels::new(looked_for))
}

#[test]
fn messages_are_reasoning_content_and_calls() {
    let called = [("f", "{\"x\": \"ü</s>\"}")];
    let whole = format!("{THOUGHT}<|channel|>final<|message|>Yes.<|return|>");
    check(&reader(ALL), &whole, "Yes.", "a < b,\n\nso", &[]);
    for end in ["", "<|call|>", "<|end|>"] {
        let answer = format!("{THOUGHT}{CALL}{end}");
        check(&reader(ALL), &answer, "", "a < b,\n\nso", &called);
    }
    let preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant";
    let answer = format!("{preamble}{CALL}<|call|>{CALL}");
    check(&reader(ALL), &answer, "I look.", "", &[called[0]; 2]);
    // The recipient may stand before the channel, and the prompt may have it.
    for start in ["", "<|start|>assistant"] {
        let answer = format!("{start} to=functions.g<|channel|>commentary json<|message|> {{}} ");
        check(&reader(ALL), &answer, "", "", &[("g", "{}")]);
    }
    // Of one kind.
    let answer = format!("{THOUGHT}{THOUGHT}{preamble}<|channel|>final<|message|>No.");
    let (content, reasoning) = ("I look.\n\nNo.", "a < b,\n\nso\n\na < b,\n\nso");
    check(&reader(ALL), &answer, content, reasoning, &[]);
}

#[test]
fn what_is_no_message_is_content_as_it_was_written() {
    for answer in [
        "",
        "Yes, a < b <|x to=functions.f",
        " to be",
        "{\"x\": 1}",
        "<|channel|>other<|message|>x",
        "<|channel|>analysis to=python code<|message|>print(1)",
        "<|channel|>commentary to=functions.f json<|message|>{\"x\": ",
        "<|channel|>commentary to=functions.f json<|message|>[1]",
        "<|channel|>commentary to=functions. json<|message|>{}",
        "<|channel|>commentary to=functions.f",
        "<|channel|>fin\nal<|message|>x",
    ] {
        check(&reader(ALL), answer, answer, "", &[]);
    }
    let long = format!("<|channel|>{}<|message|>x", "n".repeat(300));
    assert_eq!(scan(&reader(ALL), [&*long]).content, long);
    // The limit of tokens came in a header.
    for cut in ["<|start|>assis", "<|start|>assistant<|channel|>fi"] {
        let answer = format!("<|channel|>analysis<|message|>hm<|end|>{cut}");
        check(&reader(ALL), &answer, "", "hm", &[]);
    }
}

#[test]
fn what_is_not_looked_for_is_content() {
    let answer = format!("<|channel|>analysis<|message|>hm<|end|><|start|>assistant{CALL}");
    let calls = Harmony {
        reasoning: false,
        ..ALL
    };
    check(
        &reader(calls),
        &answer,
        "hm",
        "",
        &[("f", "{\"x\": \"ü</s>\"}")],
    );
    let reasoning = Harmony {
        calls: false,
        ..ALL
    };
    let written = format!("<|start|>assistant{CALL}");
    check(&reader(reasoning), &answer, &written, "hm", &[]);
}

#[test]
fn each_byte_is_looked_at_a_few_times_at_most() {
    let long = "<|channel|>analysis<|message|>".to_owned() + &"a < b ".repeat(1 << 17);
    let call = CALL.replace('ü', &"x".repeat(1 << 20));
    let short = "<|end|>".repeat(1 << 17);
    for answer in [&long, &call, &short] {
        let times = times_looked_at(&reader(ALL), answer);
        assert!(times < 3.0, "{times} times: {:?}", &answer[..20]);
    }
    // A header may have the marks of others: each is looked at, to its limit.
    for piece in ["<|start|>", " to=", CHANNEL] {
        let times = times_looked_at(&reader(ALL), &piece.repeat(1 << 16));
        assert!(times < 200.0, "{times} times: {piece:?}");
    }
}

#[test]
fn a_grammar_takes_thoughts_and_one_message() {
    let schema = json!({"type": "object", "properties": {"x": {"type": "integer"}},
        "required": ["x"], "additionalProperties": false});
    let constraint = Constraint {
        field: "response_format".to_owned(),
        form: json_form(schema.clone(), &usual_whitespace()),
        whitespace: None,
    };
    let tools = |choice: &str| {
        let function = json!({"name": "f", "parameters": schema, "strict": true});
        json!({"tools": [{"type": "function", "function": function}], "tool_choice": choice})
    };
    let call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"x\": 1}";
    let text = "<|channel|>final<|message|>Yes.";
    let json = "<|channel|>final<|message|>{\"x\": 1}";
    let wrong = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"x\": \"1\"}";
    for (marks, constraint, choice, taken, refused) in [
        (
            &SPECIAL[..],
            None,
            "required",
            &[call][..],
            &[text, json][..],
        ),
        (&SPECIAL, None, "auto", &[call, text, json], &["Yes.", "{}"]),
        (&SPECIAL, Some(&constraint), "auto", &[call, json], &[text]),
        (&SPECIAL, Some(&constraint), "none", &[json], &[call, text]),
        (&[], None, "required", &[call], &[text, json]),
    ] {
        let model = TestModel::with_special_tokens(Some("<|channel|>"), marks);
        let parsers = Parsers {
            format: None,
            schemas: Default::default(),
            reasoning: Reasoning::Ignored,
            harmony: Some(ALL),
        };
        let fields = serde_json::from_value(tools(choice)).unwrap();
        let calls = BoundCalls::of(&fields, None, constraint.is_some()).unwrap();
        let asked = Asked {
            constraint,
            calls: calls.as_ref(),
        };
        let grammar = parsers.grammar(&model.text, asked).expect("a grammar");
        let checked = Grammars::new(std::sync::Arc::clone(&model.text)).check(&grammar);
        assert_eq!(checked, Ok(()), "{grammar:?}");
        let takes = |answer: &str| {
            let with_thought = format!("{THOUGHT}{answer}");
            let taken = [answer, &with_thought]
                .map(|answer| accepts(&model.text, &grammar, &tokens(&model.text, answer, marks)));
            assert_eq!(taken[0], taken[1], "{answer} behind a thought");
            taken[0]
        };
        taken
            .iter()
            .for_each(|answer| assert!(takes(answer), "{answer} by {grammar:?}"));
        let wrong = [wrong];
        let refused = refused.iter().chain(&wrong);
        refused.for_each(|answer| assert!(!takes(answer), "{answer} by {grammar:?}"));
    }
}
