//! A chat that is to be answered, whichever API it came by: both have the same fields under their own
//! names.

use super::conversation;
use super::tools::BoundCalls;
use crate::app::App;
use crate::error::ApiError;
use crate::grammar::{GrammarError, size};
use crate::openai::answer;
use crate::openai::answer::outputs::Job;
use crate::openai::answer::wording::Wording;
use crate::openai::calls::{Asked, Parsers};
use crate::openai::request::intake::{Common, Prepared};
use crate::openai::request::types::{CommonFields, TemplateFields};
use crate::openai::request::validate::{DefaultOutput, output_tokens};

/// The names that an API of chats gives its fields, for errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChatNames {
    /// The conversation.
    pub messages: &'static str,
    /// The most output tokens.
    pub max_tokens: &'static str,
    /// The form of the answer, and the JSON schema in it.
    pub format: &'static str,
    pub schema: &'static str,
    /// What an item of `tools` has its function in, with a dot before.
    pub function: &'static str,
}

/// Those of `/v1/chat/completions`.
pub const CHAT: ChatNames = ChatNames {
    messages: "messages",
    max_tokens: "max_tokens",
    format: "response_format",
    schema: "response_format.json_schema.schema",
    function: ".function",
};

/// Those of `/v1/responses`.
pub const RESPONSES: ChatNames = ChatNames {
    messages: "input",
    max_tokens: "max_output_tokens",
    format: "text.format",
    schema: "text.format.schema",
    function: "",
};

impl Default for ChatNames {
    fn default() -> Self {
        CHAT
    }
}

/// The fields of a chat, parsed.
pub struct ChatRequest {
    pub fields: CommonFields,
    /// Its names are those of all errors.
    pub template: TemplateFields,
    /// Alternatives of each token; `None`: no logprobs.
    pub logprobs: Option<u32>,
    /// Of the output; `None`: what fits.
    pub max_tokens: Option<u32>,
    pub parallel_tool_calls: Option<bool>,
}

impl ChatRequest {
    /// Makes it ready to run. `wording` makes the words of its answer.
    ///
    /// # Errors
    /// An unknown model, bad values, what workers cannot do, a prompt that is too long.
    pub fn prepare<W: Wording>(
        self,
        app: &App,
        wording: impl FnOnce(&Common, Parsers) -> W,
    ) -> Result<Prepared<W>, ApiError> {
        let names = self.template.names;
        let mut common = Common::new::<W>(app, &self.fields)?;
        common.sampling.logprobs = self.logprobs;
        common.bind()?;
        let has_constraint = common.constraint.is_some();
        let calls = BoundCalls::of(&self.template, self.parallel_tool_calls, has_constraint)?;
        let continues_prompt = self.template.continue_final_message.unwrap_or(false);

        let longest = common.limits.max_model_len;
        let text = &common.model.text;
        let schemas = Parsers::schemas(&app.settings, text, self.template.tools.as_deref());
        let conversation = conversation::render(app, &common.model, self.template, Some(longest))?;
        let parsers = Parsers::choose(&app.settings, text, &conversation, schemas);
        if let Some(calls) = &calls {
            check_calls(&common, &parsers, calls)?;
        }
        bind(&mut common, &parsers, calls.as_ref())?;
        common.delivery.kept_special_tokens = parsers.special_tokens(&common.model.text);
        let mut max_tokens = output_tokens(
            names.max_tokens,
            conversation.tokens.len(),
            self.max_tokens,
            DefaultOutput::Fill {
                common_len: common.limits.common_len,
            },
            longest,
        )?;
        if self.max_tokens.is_none() {
            max_tokens = max_tokens.min(answer::size::tokens_that_fit::<W>(
                &common.delivery,
                common.sampling.logprobs,
                app.settings.max_answer_bytes,
            ));
        }
        let generation =
            common.generation(None, names.messages, conversation.tokens, max_tokens)?;
        Ok(Prepared {
            wording: wording(&common, parsers),
            info: common.info,
            delivery: common.delivery,
            jobs: vec![Job {
                generation,
                echo: None,
                muted: false,
                continues_prompt,
            }],
            max_tokens_field: names.max_tokens,
            model: common.model,
        })
    }
}

/// Refuses calls that no grammar can make.
fn check_calls(common: &Common, parsers: &Parsers, calls: &BoundCalls) -> Result<(), ApiError> {
    if let (Some(field), false) = (&calls.asked_by, parsers.knows_calls()) {
        let remedy = match calls.must_call {
            true => "set tool_choice to \"none\"",
            false => "leave it out",
        };
        return Err(ApiError::unsupported(
            field,
            format!(
                "{field} asks something of calls, but the router does not know how the model writes \
                 them: {remedy}, or start the router with the model's --tool-parser."
            ),
        ));
    }
    if let (true, Some(constraint)) = (calls.must_call, &common.constraint) {
        let field = &constraint.field;
        return Err(ApiError::invalid(
            field,
            format!("{field} and tool_choice are both given; an answer can follow only one."),
        ));
    }
    if let (true, Some(constraint)) = (parsers.calls_look_like_json(), &common.constraint) {
        let field = &constraint.field;
        return Err(ApiError::invalid(
            field,
            format!(
                "{field} and tools are both given, but the model writes calls as plain JSON, which \
                 cannot be told from such an answer. Set tool_choice to \"none\" or leave out {field}."
            ),
        ));
    }
    for tool in &calls.tools {
        let checked = size::check(&tool.schema());
        checked.map_err(|error| GrammarError::from(error).answer(&tool.field))?;
    }
    Ok(())
}

/// Sets the grammar of an answer that has reasoning or calls around what is constrained.
fn bind(
    common: &mut Common,
    parsers: &Parsers,
    calls: Option<&BoundCalls>,
) -> Result<(), ApiError> {
    let asked = Asked {
        constraint: common.constraint.as_ref(),
        calls,
    };
    let Some(grammar) = parsers.grammar(&common.model.text, asked) else {
        return Ok(());
    };
    let grammars = &common.model.grammars;
    if let Err(error) = grammars.check(&grammar) {
        // Mostly it is one tool's schema.
        for tool in calls.map_or(&[][..], |calls| &calls.tools) {
            let checked = grammars.check(&tool.schema());
            checked.map_err(|error| error.answer(&tool.field))?;
        }
        let field = common.constraint.as_ref().map_or("tools", |c| &c.field);
        return Err(error.answer(field));
    }
    common.sampling.grammar = Some(grammar);
    Ok(())
}
