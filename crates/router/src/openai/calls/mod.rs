//! Tool calls and reasoning in the text of chat answers.
//!
//! [`format`] has the ways in which models write calls, as data; [`scanner`] finds them and
//! reasoning in a text that comes in pieces, [`block`] reads one call, with [`tags`] and the
//! [`schemas`] of tools where its arguments are no JSON. [`grammar`] makes answers that
//! must be calls, written as [`written`] has it. [`harmony`] has the format of gpt-oss, whose answers are
//! messages. Which format a model has shows in its chat template. The rest of the router sees text only.

mod block;
mod format;
mod grammar;
#[cfg(test)]
mod grammar_tests;
mod harmony;
mod harmony_grammar;
#[cfg(test)]
mod harmony_tests;
mod json;
#[cfg(test)]
mod random_tests;
mod reader;
mod scanner;
mod schemas;
mod tags;
#[cfg(test)]
mod tags_tests;
#[cfg(test)]
mod tests;
mod written;

use std::sync::Arc;

use clap::ValueEnum;
use serde_json::Value;
use tasuki_text::ModelText;

pub use self::format::Call;
use self::format::{DEEPSEEK, Format, GLM, HERMES, LLAMA, MISTRAL, QWEN_CODER};
pub use self::grammar::Asked;
use self::harmony::{Channels, Harmony};
pub use self::reader::Reader;
pub use self::scanner::Part;
use self::scanner::{Reasoning, Scanner, THINK};
use self::schemas::Schemas;
use crate::app::HttpSettings;
use crate::openai::chat::conversation::Conversation;

/// How tool calls are found in answers to requests with `tools`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ToolParser {
    /// As the model's chat template writes them; none if it shows no known format.
    Auto,
    /// Not at all: answers are text.
    None,
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`, as Hermes and Qwen write.
    Hermes,
    /// `<function=…>` and `<parameter=…>` within `<tool_call>`, as Qwen3-Coder writes.
    Qwen3Coder,
    /// `<arg_key>` and `<arg_value>` within `<tool_call>`, as GLM-4.5 writes.
    Glm45,
    /// `[TOOL_CALLS]` before a list of calls, or before each name.
    Mistral,
    /// `{"name": …, "parameters": …}` as the whole answer.
    Llama3,
    /// The marks of DeepSeek V3 and R1.
    DeepseekV3,
    /// Messages to functions, as gpt-oss writes them.
    Harmony,
}

/// How reasoning is separated from the rest of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReasoningParser {
    /// By `<think>` and `</think>`, or by channels, if the model's chat template knows them.
    Auto,
    /// Not at all.
    None,
    /// By `<think>` and `</think>`.
    Think,
    /// By channels, as gpt-oss does.
    Harmony,
}

/// What is looked for in the answers to one request.
#[derive(Debug, Clone)]
pub struct Parsers {
    format: Option<&'static Format>,
    /// Of the tools, for formats with tags.
    schemas: Schemas,
    reasoning: Reasoning,
    /// Then it has no format, and no marks around reasoning.
    harmony: Option<Harmony>,
}

impl Parsers {
    /// What the format of calls has to know of a chat's tools.
    pub fn schemas(settings: &HttpSettings, text: &ModelText, tools: Option<&[Value]>) -> Schemas {
        let tools = tools.filter(|tools| !tools.is_empty());
        let tools = tools.filter(|_| {
            let format = Self::format(settings, text);
            format.is_some_and(|format| format.tags.is_some())
        });
        tools.map_or_else(Schemas::default, Schemas::new)
    }

    /// Chooses by the settings, the model's chat template and the request.
    pub fn choose(
        settings: &HttpSettings,
        text: &ModelText,
        chat: &Conversation,
        schemas: Schemas,
    ) -> Self {
        let harmony = Self::harmony(settings, text, chat.has_tools);
        if harmony.is_some() {
            return Self {
                format: None,
                schemas,
                reasoning: Reasoning::Ignored,
                harmony,
            };
        }
        let format = Self::format(settings, text).filter(|_| chat.has_tools);
        let [open, close] = THINK;
        let has_reasoning = match settings.reasoning_parser {
            ReasoningParser::Auto => text.template_contains(close),
            ReasoningParser::None | ReasoningParser::Harmony => false,
            ReasoningParser::Think => true,
        };
        let reasoning = match has_reasoning {
            false => Reasoning::Ignored,
            true if chat.text.trim_end().ends_with(open) => Reasoning::Begun,
            true => Reasoning::Marked,
        };
        Self {
            format,
            schemas,
            reasoning,
            harmony: None,
        }
    }

    /// Of calls, where there are tools.
    fn format(settings: &HttpSettings, text: &ModelText) -> Option<&'static Format> {
        match settings.tool_parser {
            ToolParser::Auto => Format::of_template(|mark| text.template_contains(mark)),
            ToolParser::None | ToolParser::Harmony => None,
            ToolParser::Hermes => Some(&HERMES),
            ToolParser::Qwen3Coder => Some(&QWEN_CODER),
            ToolParser::Glm45 => Some(&GLM),
            ToolParser::Mistral => Some(&MISTRAL),
            ToolParser::Llama3 => Some(&LLAMA),
            ToolParser::DeepseekV3 => Some(&DEEPSEEK),
        }
    }

    /// Whether answers are messages, and what is told apart in them.
    fn harmony(settings: &HttpSettings, text: &ModelText, has_tools: bool) -> Option<Harmony> {
        let shown = || text.template_contains(harmony::CHANNEL);
        let found = Harmony {
            calls: match settings.tool_parser {
                ToolParser::Auto => has_tools && shown(),
                parser => has_tools && parser == ToolParser::Harmony,
            },
            reasoning: match settings.reasoning_parser {
                ReasoningParser::Auto => shown(),
                parser => parser == ReasoningParser::Harmony,
            },
        };
        (found.calls || found.reasoning).then_some(found)
    }

    /// One for each choice.
    pub fn reader(&self) -> Reader {
        match (self.harmony, self.format, self.reasoning) {
            (Some(harmony), ..) => Reader::Channels(Channels::new(harmony)),
            (None, None, Reasoning::Ignored) => Reader::Plain,
            (None, format, reasoning) => {
                Reader::Marks(Scanner::new(format, self.schemas.clone(), reasoning))
            }
        }
    }

    /// What ends reasoning in the text of an answer; `None`: reasoning is not looked for.
    pub fn reasoning_end(&self) -> Option<&'static str> {
        match self.harmony {
            Some(harmony) => harmony.reasoning.then_some(harmony::END),
            None => (self.reasoning != Reasoning::Ignored).then_some(THINK[1]),
        }
    }

    /// Special tokens that the scanner has to see in the text.
    pub fn special_tokens(&self, text: &ModelText) -> Arc<[u32]> {
        let of_calls = self.format.map_or(&[][..], |format| format.special);
        let of_reasoning = match self.reasoning {
            Reasoning::Ignored => &[],
            Reasoning::Marked | Reasoning::Begun => &THINK[..],
        };
        let of_messages = self.harmony.map_or(&[][..], |_| &harmony::SPECIAL);
        let marks = of_calls.iter().chain(of_reasoning).chain(of_messages);
        let ids = marks.filter_map(|mark| text.token_id(mark));
        ids.collect()
    }

    /// A new call's id, as the model's template accepts it back.
    pub fn call_id(&self) -> String {
        if self.format.is_some_and(|format| format.short_ids) {
            format!("{:09x}", rand::random::<u64>() >> 28)
        } else {
            format!("call_{:032x}", rand::random::<u128>())
        }
    }
}

#[cfg(test)]
pub mod fuzzed {
    use super::{Channels, Harmony, Reader, Reasoning, Scanner, Schemas};
    use super::{Conversation, HttpSettings, ModelText, Parsers};
    use super::{DEEPSEEK, GLM, HERMES, LLAMA, MISTRAL, QWEN_CODER};

    pub use super::tests::scan;

    /// Names and arguments of the calls in an answer to a chat with tools.
    pub fn called(
        settings: &HttpSettings,
        model: &ModelText,
        prompt: String,
        answer: &str,
    ) -> Vec<(String, String)> {
        let chat = Conversation {
            text: prompt,
            tokens: Vec::new(),
            has_tools: true,
        };
        let parsers = Parsers::choose(settings, model, &chat, Schemas::default());
        scan(&parsers.reader(), [answer]).calls
    }

    /// One for each way to write calls and reasoning.
    pub fn readers() -> Vec<Reader> {
        let formats = [
            Some(&HERMES),
            Some(&QWEN_CODER),
            Some(&GLM),
            Some(&MISTRAL),
            Some(&LLAMA),
            Some(&DEEPSEEK),
            None,
        ];
        let reasonings = [Reasoning::Ignored, Reasoning::Marked, Reasoning::Begun];
        let all = formats.into_iter().flat_map(|format| {
            let scanner = |reasoning| Scanner::new(format, Schemas::default(), reasoning);
            reasonings.map(|reasoning| Reader::Marks(scanner(reasoning)))
        });
        let channels = [(true, true), (true, false), (false, true)];
        let channels = channels.map(|(calls, reasoning)| {
            Reader::Channels(Channels::new(Harmony { calls, reasoning }))
        });
        all.chain(channels).collect()
    }
}
