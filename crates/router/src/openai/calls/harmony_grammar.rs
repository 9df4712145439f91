//! The grammar of an answer of messages: thoughts, then one message, which is a call or the answer.

use tasuki_flow::Grammar;
use tasuki_text::ModelText;

use super::grammar::{Asked, mark_of};
use super::harmony::{CHANNEL, CONSTRAIN, END, Harmony, MESSAGE, START};
use crate::grammar::lark;
use crate::openai::request::constraint::{Form, json_form, usual_whitespace};

/// `None`: the answer is free. An answer ends behind a call, so that it has one.
pub fn grammar(text: &ModelText, looked_for: Harmony, asked: Asked<'_>) -> Option<Grammar> {
    let calls = asked.calls.filter(|_| looked_for.calls);
    if asked.constraint.is_none() && calls.is_none() {
        return None;
    }
    let [start, channel, message, constrain] =
        [START, CHANNEL, MESSAGE, CONSTRAIN].map(|mark| mark_of(text, mark).lark());
    let mut rules = String::new();
    lark::rule(&mut rules, "TEXT", &lark::without(END));
    let mut thought = "";
    if looked_for.reasoning {
        let end = mark_of(text, END);
        match end.token {
            Some(_) => lark::rule(&mut rules, "thinking", &format!("TEXT {}", end.lark())),
            None => {
                let body = format!("{} {}", lark::ANY, end.lark());
                lark::rule(&mut rules, "thinking[lazy]", &body);
            }
        }
        let body = format!("{channel} \"analysis\" {message} thinking {start} \"assistant\"");
        lark::rule(&mut rules, "thought", &body);
        thought = "thought? ";
    }
    let mut messages = Vec::new();
    if let Some(constraint) = asked.constraint {
        constraint.form.rule(&mut rules, "answer");
        messages.push(format!("{channel} \"final\" {message} answer"));
    } else if !calls.is_some_and(|calls| calls.must_call) {
        messages.push(format!("{channel} \"final\" {message} TEXT"));
    }
    for (at, tool) in calls.iter().flat_map(|calls| &calls.tools).enumerate() {
        let Form::Json(schema) = json_form(tool.parameters.clone(), &usual_whitespace()) else {
            continue;
        };
        let to = lark::literal(&format!("commentary to=functions.{} ", tool.name));
        let schema = lark::json(&schema);
        let call = format!("{channel} {to} {constrain} \"json\" {message} {schema}");
        lark::rule(&mut rules, &format!("call{at}"), &call);
        messages.push(format!("call{at}"));
    }
    let messages = messages.join(" | ");
    lark::rule(&mut rules, "start", &format!("{thought}({messages})"));
    Some(Grammar::Lark(rules))
}
