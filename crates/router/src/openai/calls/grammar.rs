//! The grammar of an answer: reasoning, then calls, text, or what a constraint asks for.

use tasuki_flow::Grammar;
use tasuki_text::ModelText;

use super::Parsers;
use super::harmony_grammar;
use super::scanner::{Reasoning, THINK};
use super::written::{Fragment, Written};
use crate::grammar::lark::{self, Mark};
use crate::openai::chat::tools::{BoundCalls, Tool};
use crate::openai::request::constraint::{Constraint, Form, json_form, usual_whitespace};

/// What may stand behind the reasoning, where it is not free text.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    pub constraint: Option<&'a Constraint>,
    pub calls: Option<&'a BoundCalls>,
}

impl Parsers {
    /// Calls can be written by a grammar.
    pub fn knows_calls(&self) -> bool {
        self.format.is_some() || self.harmony.is_some_and(|found| found.calls)
    }

    /// Calls begin like an answer in JSON, so that a grammar cannot have both.
    pub fn calls_look_like_json(&self) -> bool {
        self.format.is_some_and(|format| format.bare)
    }

    /// The grammar of a whole answer. `None`: the constraint's own, or none at all.
    pub fn grammar(&self, text: &ModelText, asked: Asked<'_>) -> Option<Grammar> {
        if let Some(harmony) = self.harmony {
            return harmony_grammar::grammar(text, harmony, asked);
        }
        let mut rules = String::from(lark::GAP_RULE);
        let calls = self.format.zip(asked.calls).map(|(format, bound)| {
            let shown = |way: &&Written| text.template_contains(way.shown_by);
            let last = format.written.len() - 1;
            let way = format.written[..last].iter().find(shown);
            let way = way.unwrap_or(&format.written[last]);
            (Opened::write(&mut rules, text, way, bound), bound, format)
        });
        let answer = match (calls, asked.constraint) {
            (None, None) => return None,
            (None, Some(constraint)) => {
                if self.reasoning == Reasoning::Ignored {
                    return None;
                }
                constraint.form.rule(&mut rules, "answer");
                "GAP? answer".to_owned()
            }
            (Some((opened, bound, _)), None) if bound.must_call => {
                format!("GAP? {}", opened.whole())
            }
            (Some((opened, _, _)), Some(constraint)) => {
                constraint.form.rule(&mut rules, "answer");
                format!("GAP? (answer | {})", opened.whole())
            }
            (Some((opened, _, format)), None) => opened.behind_text(&mut rules, format.open),
        };
        let thought = thought(&mut rules, text, self.reasoning);
        lark::rule(&mut rules, "start", &format!("{thought} {answer}"));
        Some(Grammar::Lark(rules))
    }
}

/// Writes the rule of reasoning; returns how an answer begins with it.
fn thought(rules: &mut String, text: &ModelText, reasoning: Reasoning) -> &'static str {
    let [open, close] = THINK.map(|mark| mark_of(text, mark));
    let begin = match reasoning {
        Reasoning::Ignored => return "",
        Reasoning::Begun => "thought",
        Reasoning::Marked => {
            lark::rule(
                rules,
                "opened_thought",
                &format!("GAP? {} thought", open.lark()),
            );
            "opened_thought?"
        }
    };
    if close.token.is_some() {
        // Its characters would end the reasoning for a reader, but not for the grammar.
        lark::rule(rules, "THOUGHT", &lark::without(close.text));
        lark::rule(rules, "thought", &format!("THOUGHT {}", close.lark()));
    } else {
        let body = format!("{} {}", lark::ANY, close.lark());
        lark::rule(rules, "thought[lazy]", &body);
    }
    begin
}

/// Calls whose first mark, if there is one, is apart: the rule `calls` has what follows it.
struct Opened(Option<Mark>);

impl Opened {
    fn write(rules: &mut String, text: &ModelText, way: &Written, bound: &BoundCalls) -> Self {
        let first = way.begin.iter().chain(way.call).next();
        let open = match first {
            Some(Fragment::Mark(mark)) => Some(mark_of(text, mark)),
            _ => None,
        };
        // Each call has the mark, or only the first one.
        let (mut begin, mut call, mut between) = (way.begin, way.call, String::new());
        pieces(&mut between, text, way.between, None);
        if let Some(open) = &open {
            if begin.is_empty() {
                call = &call[1..];
                between = format!("{between} {}", open.lark());
            } else {
                begin = &begin[1..];
            }
        }
        for (at, tool) in bound.tools.iter().enumerate() {
            let mut body = String::new();
            pieces(&mut body, text, call, Some(tool));
            lark::rule(rules, &format!("call{at}"), &body);
        }
        let all = (0..bound.tools.len()).map(|at| format!("call{at}"));
        lark::rule(rules, "call", &all.collect::<Vec<_>>().join(" | "));
        let mut calls = String::new();
        pieces(&mut calls, text, begin, None);
        calls += " call";
        if bound.parallel {
            calls += &format!(" ({between} call)*");
        }
        pieces(&mut calls, text, way.end, None);
        lark::rule(rules, "calls", &calls);
        Self(open)
    }

    fn whole(&self) -> String {
        let open = self.0.as_ref().map(Mark::lark).unwrap_or_default();
        format!("{open} calls")
    }

    /// Text and then calls, each of which may be left out. `open`: what begins a call in text.
    fn behind_text(&self, rules: &mut String, open: &'static str) -> String {
        match &self.0 {
            Some(mark) => {
                lark::rule(rules, "TEXT", &lark::without(mark.text));
                if mark.token.is_some() {
                    return format!("TEXT ({})?", self.whole());
                }
                let lead = format!("{} {}", lark::ANY, mark.lark());
                lark::rule(rules, "lead[lazy]", &lead);
                "(TEXT | lead calls)".to_owned()
            }
            None => {
                // An answer that begins with a brace is a call.
                let text = format!("/[^{{ \\t\\r\\n]/ {} & {}", lark::ANY, lark::without(open));
                lark::rule(rules, "TEXT", &text);
                "GAP? (TEXT | calls)?".to_owned()
            }
        }
    }
}

/// Adds pieces. Text and names that are neighbours are one literal: where a name begins with
/// another, what follows tells them apart.
fn pieces(body: &mut String, text: &ModelText, pieces: &[Fragment], tool: Option<&Tool>) {
    let mut literal = String::new();
    let flush = |body: &mut String, literal: &mut String| {
        if !literal.is_empty() {
            *body += &format!(" {}", lark::literal(literal));
            literal.clear();
        }
    };
    for piece in pieces {
        match piece {
            Fragment::Text(text) => literal += text,
            Fragment::Name => literal += tool.map_or("", |tool| &tool.name),
            Fragment::Mark(mark) => {
                flush(body, &mut literal);
                *body += &format!(" {}", mark_of(text, mark).lark());
            }
            Fragment::Arguments => {
                flush(body, &mut literal);
                let schema = tool.map(|tool| tool.parameters.clone()).unwrap_or_default();
                if let Form::Json(schema) = json_form(schema, &usual_whitespace()) {
                    *body += &format!(" {}", lark::json(&schema));
                }
            }
            Fragment::Id => {
                flush(body, &mut literal);
                *body += " /[a-zA-Z0-9]{9}/";
            }
            Fragment::Gap => {
                flush(body, &mut literal);
                *body += " GAP?";
            }
        }
    }
    flush(body, &mut literal);
}

pub fn mark_of(text: &ModelText, mark: &'static str) -> Mark {
    Mark {
        text: mark,
        token: text.token_id(mark),
    }
}
