//! The ways in which models write tool calls, as data.
//!
//! A call is an opening mark, a header that may hold the function's name, JSON, and a
//! closing mark. The JSON is the arguments if the header has the name; else it is an object
//! with `name` and `arguments` (or `parameters`), or a list of such objects. In some formats
//! there may be [`Tags`] in place of the JSON.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::scanner::MARK_STARTS;
use super::tags::{self, Tags};
use super::written;

/// How one family of models writes calls.
#[derive(Debug)]
pub struct Format {
    pub open: &'static str,
    /// A call may also begin without `open`, where the answer begins or a call has ended.
    pub bare: bool,
    /// What stands before and after the name in a header; empty where the JSON has the name.
    pub named: &'static [(&'static str, &'static str)],
    /// What may stand in place of the JSON, up to the first mark that closes a call.
    pub tags: Option<&'static Tags>,
    /// Marks any of which closes a call, after white space; empty: the JSON's end does.
    pub close: &'static [&'static str],
    /// Marks around all calls. They are no content.
    pub around: &'static [&'static str],
    /// Tokens of the format that tokenizers may declare as special.
    pub special: &'static [&'static str],
    /// The model's template accepts only ids of nine letters and digits.
    pub short_ids: bool,
    /// How whole answers of calls are written: the first whose text is in the template, else the last.
    pub written: &'static [written::Written],
    /// Any of these in a chat template means this format, if all of one entry are there.
    template: &'static [&'static [&'static str]],
}

/// Hermes, Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
pub static HERMES: Format = MARKED;

const MARKED: Format = Format {
    open: "<tool_call>",
    bare: false,
    named: &[],
    tags: None,
    close: &["</tool_call>"],
    around: &[],
    special: &["<tool_call>", "</tool_call>"],
    short_ids: false,
    written: &written::HERMES,
    template: &[&["<tool_call>"]],
};

/// Qwen3-Coder, Qwen3.5: `<tool_call><function=NAME><parameter=KEY>…`. Where a grammar makes them
/// write calls these are JSON.
pub static QWEN_CODER: Format = Format {
    tags: Some(&tags::QWEN),
    template: &[&["<tool_call>", "<function=", "<parameter="]],
    ..MARKED
};

/// GLM-4.5 and after: `<tool_call>NAME<arg_key>…</arg_key><arg_value>…</arg_value>`, likewise.
pub static GLM: Format = Format {
    tags: Some(&tags::GLM),
    special: &[
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ],
    template: &[&["<tool_call>", "<arg_key>", "<arg_value>"]],
    ..MARKED
};

/// Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, newer `[TOOL_CALLS]name[ARGS]{…}`.
pub static MISTRAL: Format = Format {
    open: "[TOOL_CALLS]",
    bare: false,
    named: &[("", "[ARGS]")],
    tags: None,
    close: &[],
    around: &[],
    special: &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
    short_ids: true,
    written: &written::MISTRAL,
    template: &[&["[TOOL_CALLS]"]],
};

/// DeepSeek V3: marks of their own around all calls, each call and its name. V3.1 leaves
/// out `function` and the code fence.
pub static DEEPSEEK: Format = Format {
    open: "<｜tool▁call▁begin｜>",
    bare: false,
    named: &[
        ("function<｜tool▁sep｜>", "```json"),
        ("", "<｜tool▁sep｜>"),
    ],
    tags: None,
    close: &["```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"],
    around: &["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
    special: &[
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ],
    short_ids: false,
    written: &written::DEEPSEEK,
    template: &[&["tool▁calls▁begin"]],
};

/// Llama 3: an answer that is `{"name": …, "parameters": {…}}`; several are separated by `;`.
pub static LLAMA: Format = Format {
    open: "<|python_tag|>",
    bare: true,
    named: &[],
    tags: None,
    close: &[],
    around: &[],
    special: &["<|python_tag|>"],
    short_ids: false,
    written: &written::LLAMA,
    template: &[
        &["<|python_tag|>"],
        &["<|start_header_id|>", "\"parameters\""],
    ],
};

/// In the order in which templates are searched: formats with tags have the marks of Hermes, and
/// Hermes models of Llama's family keep Llama's header marks.
static ALL: [&Format; 6] = [&QWEN_CODER, &GLM, &HERMES, &MISTRAL, &DEEPSEEK, &LLAMA];

/// Separates a call id from the name in the header of some Mistral models.
const CALL_ID: &str = "[CALL_ID]";

/// A call that a model made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Call {
    pub name: String,
    /// JSON of an object, as the model wrote it.
    pub arguments: String,
}

/// A call whose name is in the JSON.
#[derive(Deserialize)]
struct Written<'a> {
    name: String,
    #[serde(borrow, alias = "parameters")]
    arguments: Option<&'a RawValue>,
}

impl Format {
    /// The format of a chat template; `has` says whether a text is in it.
    pub fn of_template(has: impl Fn(&str) -> bool) -> Option<&'static Self> {
        let all = |marks: &&[&str]| marks.iter().all(|mark| has(mark));
        ALL.into_iter()
            .find(|format| format.template.iter().any(all))
    }

    /// The calls that `json` makes behind `header`, both without the marks around them.
    /// `None`: this is no call.
    pub fn calls(&self, header: &str, json: &str) -> Option<Vec<Call>> {
        let header = header.trim();
        let calls = if !header.is_empty() {
            vec![Call {
                name: self.name(header)?.to_owned(),
                arguments: arguments(serde_json::from_str(json).ok()?)?,
            }]
        } else if json.starts_with('[') {
            let written: Vec<Written<'_>> = serde_json::from_str(json).ok()?;
            let calls = written.into_iter().map(|written| self.call(written));
            calls.collect::<Option<_>>()?
        } else {
            vec![self.call(serde_json::from_str(json).ok()?)?]
        };
        (!calls.is_empty()).then_some(calls)
    }

    fn name<'a>(&self, header: &'a str) -> Option<&'a str> {
        let between =
            |(before, after): &(&str, &str)| header.strip_prefix(*before)?.strip_suffix(*after);
        let name = self.named.iter().find_map(between)?;
        let name = name.split(CALL_ID).next().unwrap_or_default().trim();
        let is_name = |c: char| !c.is_whitespace() && !MARK_STARTS.contains(&c);
        (!name.is_empty() && name.chars().all(is_name)).then_some(name)
    }

    fn call(&self, written: Written<'_>) -> Option<Call> {
        let arguments = match written.arguments {
            Some(given) => arguments(given)?,
            // Behind a mark it is a call nevertheless; without one it may be any object.
            None if self.bare => return None,
            None => "{}".to_owned(),
        };
        (!written.name.is_empty()).then_some(Call {
            name: written.name,
            arguments,
        })
    }
}

fn arguments(json: &RawValue) -> Option<String> {
    json.get().starts_with('{').then(|| json.get().to_owned())
}
