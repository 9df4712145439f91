//! Grammars of answers, compiled and followed: they take what the scanner reads as calls, and no more.

use serde_json::{Value, json};
use tasuki_flow::Grammar;

use super::format::{DEEPSEEK, Format, HERMES, LLAMA, MISTRAL};
use super::grammar::Asked;
use super::scanner::Reasoning;
use super::tests::{marks, scan};
use super::{Parsers, THINK};
use crate::grammar::Grammars;
use crate::grammar::testing::{accepts, tokens};
use crate::openai::chat::tools::BoundCalls;
use crate::openai::request::constraint::{Constraint, Form, json_form, usual_whitespace};
use crate::openai::request::types::TemplateFields;
use crate::testing::TestModel;

/// How a model writes calls of `f` (an integer `x`), of `fg` (a string `y`), and of `h` (nothing).
struct Way {
    format: &'static Format,
    template: &'static str,
    one: &'static str,
    two: &'static str,
    no_arguments: &'static str,
    broken: &'static [&'static str],
}

const WAYS: [Way; 7] = [
    Way {
        format: &HERMES,
        template: "<tool_call>",
        one: "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>",
        two: "<tool_call>{\"name\": \"fg\", \"arguments\": {\"y\":\"ü\"}}</tool_call>\n\
              <tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": -2}}\n</tool_call>",
        no_arguments: "<tool_call>\n{\"name\": \"h\", \"arguments\": {}}\n</tool_call>",
        broken: &[
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"1\"}}\n</tool_call>",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>",
            "<tool_call>\n{\"name\": \"nope\", \"arguments\": {}}\n</tool_call>",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call> Done.",
            "I look: <tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>",
        ],
    },
    Way {
        format: &MISTRAL,
        template: "[TOOL_CALLS]",
        one: "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"x\": 1}}]",
        two: "[TOOL_CALLS][{\"name\": \"fg\", \"arguments\": {\"y\": \"]\"}}, \
              {\"name\": \"f\", \"arguments\": {\"x\": -2}}]",
        no_arguments: "[TOOL_CALLS][{\"name\": \"h\", \"arguments\": {}}]",
        broken: &[
            "[TOOL_CALLS][]",
            "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"x\": null}}]",
            "[TOOL_CALLS]f[ARGS]{\"x\": 1}",
        ],
    },
    Way {
        format: &MISTRAL,
        template: "[TOOL_CALLS][ARGS]",
        one: "[TOOL_CALLS]f[ARGS]{\"x\": 1}",
        two: "[TOOL_CALLS]fg[ARGS]{\"y\": \"\"}[TOOL_CALLS]f[ARGS]{\"x\": -2}",
        no_arguments: "[TOOL_CALLS]h[ARGS]{}",
        broken: &["[TOOL_CALLS]fx[ARGS]{}", "[TOOL_CALLS]f[ARGS]{\"y\": \"\"}"],
    },
    Way {
        format: &MISTRAL,
        template: "[TOOL_CALLS][CALL_ID][ARGS]",
        one: "[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{\"x\": 1}",
        two: "[TOOL_CALLS]fg[CALL_ID]123456789[ARGS]{\"y\": \"\"}\
              [TOOL_CALLS]f[CALL_ID]123456780[ARGS]{\"x\": -2}",
        no_arguments: "[TOOL_CALLS]h[CALL_ID]123456789[ARGS]{}",
        broken: &["[TOOL_CALLS]f[CALL_ID]1[ARGS]{\"x\": 1}"],
    },
    Way {
        format: &LLAMA,
        template: "<|python_tag|>",
        one: "{\"name\": \"f\", \"parameters\": {\"x\": 1}}",
        two: "{\"name\": \"fg\", \"parameters\": {\"y\": \"a\"}}; \
              {\"name\": \"f\", \"parameters\": {\"x\": -2}}",
        no_arguments: "{\"name\": \"h\", \"parameters\": {}}",
        broken: &[
            "{\"name\": \"f\", \"parameters\": {\"x\": 1, \"z\": 1}}",
            "{\"answer\": 42}",
        ],
    },
    Way {
        format: &DEEPSEEK,
        template: "tool▁calls▁begin ```json",
        one: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n\
              {\"x\": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        two: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>fg\n```json\n\
              {\"y\": \"`\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n\
              ```json\n{\"x\": -2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        no_arguments: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>h\n```json\n\
                       {}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        broken: &["<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"],
    },
    Way {
        format: &DEEPSEEK,
        template: "tool▁calls▁begin",
        one: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"x\": 1}\
              <｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        two: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>fg<｜tool▁sep｜>{\"y\": \"a\"}\
              <｜tool▁call▁end｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"x\": -2}<｜tool▁call▁end｜>\
              <｜tool▁calls▁end｜>",
        no_arguments: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>h<｜tool▁sep｜>{}\
                       <｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        broken: &["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}"],
    },
];

/// One grammar and the model whose answers it is of.
struct Followed {
    model: TestModel,
    marks: Vec<&'static str>,
    parsers: Parsers,
    grammar: Option<Grammar>,
}

impl Followed {
    fn new(
        (format, template): (Option<&'static Format>, &str),
        reasoning: Reasoning,
        marks_are_tokens: bool,
        constraint: Option<&Constraint>,
        tools: &Value,
    ) -> Self {
        let all = format.map_or(&[][..], |format| format.special).iter();
        let all = all.chain(&THINK).filter(|_| marks_are_tokens);
        let marks: Vec<&str> = all.copied().collect();
        let model = TestModel::with_special_tokens(Some(template), &marks);
        let parsers = Parsers {
            format,
            schemas: Default::default(),
            reasoning,
            harmony: None,
        };
        let fields: TemplateFields = serde_json::from_value(tools.clone()).unwrap();
        let parallel = tools["parallel_tool_calls"].as_bool();
        let calls = BoundCalls::of(&fields, parallel, constraint.is_some()).unwrap();
        let asked = Asked {
            constraint,
            calls: calls.as_ref(),
        };
        let grammar = parsers.grammar(&model.text, asked);
        if let Some(grammar) = &grammar {
            let checked = Grammars::new(std::sync::Arc::clone(&model.text)).check(grammar);
            assert_eq!(checked, Ok(()), "{grammar:?}");
        }
        Self {
            model,
            marks,
            parsers,
            grammar,
        }
    }

    fn of_tools(way: &Way, marks_are_tokens: bool, tools: &Value) -> Self {
        let format = (Some(way.format), way.template);
        Self::new(format, Reasoning::Ignored, marks_are_tokens, None, tools)
    }

    fn takes(&self, answer: &str) -> bool {
        let tokens = tokens(&self.model.text, answer, &self.marks);
        accepts(&self.model.text, self.grammar.as_ref().unwrap(), &tokens)
    }

    #[track_caller]
    fn check(&self, taken: &[&str], refused: &[&str]) {
        for answer in taken {
            assert!(self.takes(answer), "{answer:?} by {:?}", self.grammar);
        }
        for answer in refused {
            assert!(!self.takes(answer), "{answer:?} by {:?}", self.grammar);
        }
    }

    /// The names of the calls that a reader finds.
    fn read(&self, answer: &str) -> Vec<String> {
        let reader = marks(self.parsers.format, self.parsers.reasoning);
        let calls = scan(&reader, [answer]).calls;
        calls.into_iter().map(|(name, _)| name).collect()
    }
}

fn tools(choice: Value) -> Value {
    let function = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    let x = json!({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
        "additionalProperties": false});
    let y = json!({"properties": {"y": {"$ref": "#/$defs/text"}}, "required": ["y"],
        "$defs": {"text": {"type": "string"}}});
    json!({"tools": [function("f", x), function("fg", y), function("h", Value::Null)],
        "tool_choice": choice})
}

fn strict(tools: &Value) -> Value {
    let mut tools = tools.clone();
    for tool in tools["tools"].as_array_mut().unwrap() {
        tool["function"]["strict"] = true.into();
    }
    tools
}

const BOTH: [bool; 2] = [true, false];

#[test]
fn a_required_call_is_all_of_the_answer() {
    for way in &WAYS {
        for marks_are_tokens in BOTH {
            let followed = Followed::of_tools(way, marks_are_tokens, &tools("required".into()));
            followed.check(&[way.one, way.two, way.no_arguments], way.broken);
            followed.check(&[], &["", "I cannot.", " ", "{}"]);
            assert_eq!(followed.read(way.one), ["f"]);
            assert_eq!(followed.read(way.two), ["fg", "f"]);
            assert_eq!(followed.read(way.no_arguments), ["h"]);
        }
    }
}

#[test]
fn a_named_function_is_called_once() {
    let named = json!({"type": "function", "function": {"name": "f"}});
    for way in &WAYS {
        for marks_are_tokens in BOTH {
            let followed = Followed::of_tools(way, marks_are_tokens, &tools(named.clone()));
            followed.check(&[way.one], &[way.two, way.no_arguments, ""]);
        }
    }
}

#[test]
fn strict_tools_bind_calls_among_text() {
    for way in &WAYS {
        for marks_are_tokens in BOTH {
            let auto = strict(&tools("auto".into()));
            let followed = Followed::of_tools(way, marks_are_tokens, &auto);
            followed.check(&[way.one, way.two, way.no_arguments], &way.broken[..1]);
            followed.check(&["", "No call [1], <b> 2 < 3.\n", " x {\"a\": 1}"], &[]);
            let behind_text = format!("I look.\n{}", way.two);
            let is_bare = way.format.bare;
            assert_eq!(
                followed.takes(&behind_text),
                !is_bare || followed.read(&behind_text).is_empty()
            );
            // What the reader takes for a call is a call of the grammar.
            for answer in way.broken {
                if followed.takes(answer) {
                    assert!(
                        followed.read(answer).iter().all(|name| name == "f"),
                        "{answer}"
                    );
                }
            }
        }
    }
}

#[test]
fn not_in_parallel_is_once_at_most() {
    for way in &WAYS {
        for choice in ["auto", "required"] {
            let mut once = strict(&tools(choice.into()));
            once["parallel_tool_calls"] = false.into();
            let followed = Followed::of_tools(way, true, &once);
            followed.check(&[way.one], &[way.two]);
        }
    }
}

fn constraint(form: Form) -> Constraint {
    Constraint {
        field: "field".to_owned(),
        form,
        whitespace: None,
    }
}

fn answer_schema() -> Constraint {
    let schema = json!({"type": "object", "properties": {"a": {"type": "boolean"}},
        "required": ["a"], "additionalProperties": false});
    constraint(json_form(schema, &usual_whitespace()))
}

#[test]
fn an_answer_is_calls_or_what_is_asked_for() {
    let constraint = answer_schema();
    // Llama's calls are JSON, too: such requests are refused.
    for way in WAYS.iter().filter(|way| !way.format.bare) {
        for marks_are_tokens in BOTH {
            let format = (Some(way.format), way.template);
            let auto = tools("auto".into());
            let followed = Followed::new(
                format,
                Reasoning::Ignored,
                marks_are_tokens,
                Some(&constraint),
                &auto,
            );
            followed.check(
                &[way.one, way.two, "{\"a\": true}"],
                &["", "yes", "{\"a\": 1}"],
            );
        }
    }
}

#[test]
fn what_is_asked_for_stands_behind_the_reasoning() {
    for marks_are_tokens in BOTH {
        let follow = |reasoning, constraint: &Constraint| {
            let none = json!({});
            Followed::new(
                (None, "x"),
                reasoning,
                marks_are_tokens,
                Some(constraint),
                &none,
            )
        };
        let marked = follow(Reasoning::Marked, &answer_schema());
        marked.check(
            &[
                "{\"a\": true}",
                "<think>\nhm, {\"a\": 1} </thin\n</think>\n\n{\"a\": false}",
                "<think></think>{\"a\": true}",
            ],
            &[
                "",
                "hm</think>{\"a\": true}",
                "<think>hm</think>",
                "<think>{\"a\": true}",
                "<think>hm</think>yes",
                "<think>hm</think>no</think>{\"a\": true}",
            ],
        );
        let begun = follow(Reasoning::Begun, &answer_schema());
        begun.check(
            &["hm</think>{\"a\": true}", "\nhm\n</think>\n\n{\"a\": true}"],
            &["{\"a\": true}", "hm</think>yes"],
        );
        let choice = constraint(Form::Choice(vec!["yes".into(), "yes, sir".into()]));
        let choice = follow(Reasoning::Begun, &choice);
        choice.check(
            &["hm</think>\n\nyes", "hm</think>yes, sir"],
            &["hm</think>yes,", "yes"],
        );
        let regex = constraint(Form::Regex("^[0-9]+/[0-9]+$".into()));
        follow(Reasoning::Begun, &regex).check(&["hm</think>1/2"], &["hm</think>1"]);
        let lark = "start: pair // of braces }\npair: \"(\" pair \")\" | \"{}\"\n%ignore / +/";
        let lark = follow(Reasoning::Marked, &constraint(Form::Lark(lark.into())));
        lark.check(
            &["<think>hm</think>( {} )", "({})"],
            &["<think>hm</think>(", "({}"],
        );
    }
    // The characters of a mark that is a token would end the reasoning for a reader only.
    let none = json!({});
    let followed = Followed::new(
        (None, "x"),
        Reasoning::Marked,
        true,
        Some(&answer_schema()),
        &none,
    );
    let mut spelled = tokens(&followed.model.text, "<think>", &followed.marks);
    spelled.extend(tokens(&followed.model.text, "hm</think>", &[]));
    spelled.extend(tokens(
        &followed.model.text,
        "</think>{\"a\": true}",
        &followed.marks,
    ));
    let grammar = followed.grammar.as_ref().unwrap();
    assert!(!accepts(&followed.model.text, grammar, &spelled));
}

#[test]
fn calls_stand_behind_the_reasoning_too() {
    for way in &WAYS {
        let format = (Some(way.format), way.template);
        let required = tools("required".into());
        let followed = Followed::new(format, Reasoning::Begun, true, None, &required);
        let answer = format!("hm</think>\n\n{}", way.two);
        followed.check(&[&answer], &[way.two, "hm</think>No."]);
        assert_eq!(followed.read(&answer), ["fg", "f"]);
    }
}

#[test]
fn nothing_is_bound_where_nothing_asks_for_it() {
    let auto = tools("auto".into());
    let free = Followed::of_tools(&WAYS[0], true, &auto);
    assert_eq!(free.grammar, None);
    // No form of calls is known, and the constraint has a grammar of its own.
    let none = json!({});
    let ignored = Reasoning::Ignored;
    let own = Followed::new((None, "x"), ignored, true, Some(&answer_schema()), &none);
    assert_eq!(own.grammar, None);
}
