//! Answers that must be calls, and those with reasoning or calls beside what is asked for.

use serde_json::{Value, json};

use super::structured::{CHAT, COMPLETIONS, Served, TEMPLATE, chat, completion, served, with};
use crate::openai::{ReasoningParser, ToolParser};

fn tools(more: &Value) -> Value {
    let parameters = json!({"type": "object", "properties": {"x": {"type": "integer"}},
        "required": ["x"], "additionalProperties": false});
    let body = chat(&json!({"tools": [{"type": "function",
        "function": {"name": "f", "parameters": parameters}}]}));
    with(body, more)
}

#[tokio::test]
async fn tool_choice_binds_the_answer_to_calls() {
    let served = served();
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";
    let two = format!("{call}\n{call}");
    let required = json!({"tool_choice": "required"});
    let grammar = served.grammar(CHAT, tools(&required)).await.unwrap();
    served.check(
        &grammar,
        &[call, &two],
        &["", "No.", "<tool_call>{}</tool_call>"],
    );
    let named = json!({"tool_choice": {"type": "function", "function": {"name": "f"}}});
    let grammar = served.grammar(CHAT, tools(&named)).await.unwrap();
    served.check(&grammar, &[call], &[&two, "No."]);
    let once = json!({"parallel_tool_calls": false});
    let grammar = served.grammar(CHAT, tools(&once)).await.unwrap();
    served.check(&grammar, &[call, "No.", ""], &[&two]);
    for free in [
        json!({}),
        json!({"tool_choice": "none", "parallel_tool_calls": false}),
    ] {
        assert_eq!(served.grammar(CHAT, tools(&free)).await, None);
    }
}

#[tokio::test]
async fn calls_that_no_grammar_can_make_are_refused() {
    let hermes = served();
    let unknown = Served::new("{{ messages[0].content }}", |_| {});
    let llama = Served::new(TEMPLATE, |s| s.tool_parser = ToolParser::Llama3);
    let unread = Served::new(TEMPLATE, |s| s.tool_parser = ToolParser::None);
    let once = json!({"parallel_tool_calls": false});
    let strict = json!({"tools": [{"type": "function", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "g", "strict": true}}]});
    let required = json!({"tool_choice": "required"});
    let json_object = json!({"response_format": {"type": "json_object"}});
    let not = json!({"tools": [{"type": "function", "function": {"name": "f",
        "parameters": {"type": "object", "not": {}}}}]});
    let nope = json!({"tool_choice": {"type": "function", "function": {"name": "nope"}}});
    for (served, body, param, says) in [
        (&unknown, tools(&required), "tool_choice", "--tool-parser"),
        (&unread, tools(&once), "parallel_tool_calls", "leave it out"),
        (
            &unread,
            chat(&strict),
            "tools[1].function.strict",
            "--tool-parser",
        ),
        (
            &hermes,
            tools(&with(required.clone(), &json_object)),
            "response_format",
            "response_format and tool_choice are both given",
        ),
        (
            &llama,
            tools(&json_object),
            "response_format",
            "response_format and tools are both given",
        ),
        (
            &hermes,
            chat(&with(required.clone(), &not)),
            "tools[0].function.parameters",
            "the keywords not",
        ),
        (
            &hermes,
            tools(&nope),
            "tool_choice",
            "\"nope\", which is not in tools",
        ),
        (&hermes, chat(&required), "tool_choice", "tools has 0 items"),
    ] {
        let (message, field) = served.refusal(CHAT, body).await;
        assert!(message.contains(says), "{says:?} is not in {message:?}");
        assert_eq!(field, param, "{message}");
    }
}

#[tokio::test]
async fn reasoning_stays_free() {
    let served = Served::new(TEMPLATE, |s| s.reasoning_parser = ReasoningParser::Think);
    let more = json!({"guided_choice": ["yes", "no"]});
    let grammar = served.grammar(CHAT, chat(&more)).await.unwrap();
    served.check(
        &grammar,
        &["<think>hm</think>\n\nyes", "no"],
        &["<think>hm</think>", "hm"],
    );
    // Completions have no reasoning.
    let grammar = served
        .grammar(COMPLETIONS, completion(&more))
        .await
        .unwrap();
    served.check(&grammar, &["no"], &["<think>hm</think>yes"]);
}
