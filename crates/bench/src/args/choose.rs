//! From the options to a workload that makes sense.

use std::path::Path;

use clap::ValueEnum;
use tasuki_text::ModelText;

use super::workload::{Answers, WorkloadArgs, WorkloadKind};
use crate::error::PlanError;
use crate::plan::{Api, PromptForm};
use crate::tokens::PromptMaker;
use crate::workload::lengths::Lengths;
use crate::workload::multi_turn::MultiTurnSettings;
use crate::workload::prompts::PromptsSettings;
use crate::workload::random::SharedPrefix;
use crate::workload::trace::{TraceFormat, TraceSettings};
use crate::workload::{Shape, WorkloadPlan};

impl WorkloadArgs {
    /// The workload that these options ask for; loads the tokenizer.
    ///
    /// # Errors
    /// Options that do not belong together, and what [`PromptMaker`] refuses.
    pub fn plan(&self, api: Api) -> Result<WorkloadPlan, PlanError> {
        self.refuse_foreign()?;
        let natural = self.workload == WorkloadKind::Prompts;
        let answers = self.answers.unwrap_or(if natural {
            Answers::Natural
        } else {
            Answers::Exact
        });
        Ok(WorkloadPlan {
            shape: self.shape()?,
            num_requests: self.num_requests.map(|n| n as usize),
            seed: self.seed,
            exact_output: answers == Answers::Exact,
            maker: self.maker(api)?,
        })
    }

    /// The same for a simulation: requests have lengths and no content.
    ///
    /// # Errors
    /// Options that do not belong together.
    pub fn plan_lengths(&self) -> Result<WorkloadPlan, PlanError> {
        let without_content = Self {
            tokenizer: None,
            prompt_as: None,
            ..self.clone()
        };
        let plan = without_content.plan(Api::Completions)?;
        let maker = PromptMaker::lengths(self.seed);
        Ok(WorkloadPlan { maker, ..plan })
    }

    fn shape(&self) -> Result<Shape, PlanError> {
        Ok(match self.workload {
            WorkloadKind::Random => Shape::Random(self.token_lengths()),
            WorkloadKind::Fixed => Shape::Fixed(self.token_lengths()),
            WorkloadKind::PrefillOnly => Shape::PrefillOnly(Lengths {
                output_tokens: 1,
                ..self.token_lengths()
            }),
            WorkloadKind::DecodeOnly => Shape::DecodeOnly {
                lengths: self.token_lengths(),
                distinct_prompts: self.distinct_prompts.map(|n| n as usize),
            },
            WorkloadKind::SharedPrefix => Shape::SharedPrefix {
                prefix: SharedPrefix {
                    prefix_groups: self.prefix_groups.unwrap_or(8) as usize,
                    prefix_tokens: self.prefix_tokens.unwrap_or(1024),
                },
                lengths: self.token_lengths(),
            },
            WorkloadKind::MultiTurn => Shape::MultiTurn(MultiTurnSettings {
                turns: self.turns.unwrap_or(4) as usize,
                turn_input_tokens: self.turn_input_tokens.unwrap_or(64),
                think_time_s: self.think_time_s.unwrap_or_default(),
                lengths: self.token_lengths(),
            }),
            WorkloadKind::Trace => Shape::Trace(self.trace()?),
            WorkloadKind::Prompts => Shape::Prompts(PromptsSettings {
                file: (self.prompts_file.clone())
                    .ok_or_else(|| self.needs("prompts-file", "prompts.jsonl"))?,
                output_tokens: self.output_tokens.unwrap_or(128),
            }),
        })
    }

    fn token_lengths(&self) -> Lengths {
        let given = self.lengths;
        Lengths {
            input_tokens: given.map(|l| l.0).or(self.input_tokens).unwrap_or(1024),
            output_tokens: given.map(|l| l.1).or(self.output_tokens).unwrap_or(128),
            range_ratio: self.range_ratio,
            range_convention: self.range_ratio.map(|_| self.range_convention),
        }
    }

    fn trace(&self) -> Result<TraceSettings, PlanError> {
        let file = (self.trace_file.clone())
            .ok_or_else(|| self.needs("trace-file", "conversation_trace.jsonl"))?;
        let is_csv = file
            .extension()
            .is_some_and(|end| end.eq_ignore_ascii_case("csv"));
        let format = self.trace_format.unwrap_or(if is_csv {
            TraceFormat::Azure
        } else {
            TraceFormat::Mooncake
        });
        let from_s = self.trace_from_s.unwrap_or_default();
        if let Some(until_s) = self.trace_until_s.filter(|until_s| *until_s <= from_s) {
            return Err(PlanError::OutOfRange {
                option: "trace-until-s",
                value: until_s.to_string(),
                limit: format!("the replay begins at {from_s} s"),
                remedy: "give a later end or an earlier --trace-from-s".to_owned(),
            });
        }
        Ok(TraceSettings {
            file,
            format,
            block_tokens: self.trace_block_tokens.unwrap_or(512),
            speed_up: self.trace_speed_up.unwrap_or(1.0),
            from_s,
            until_s: self.trace_until_s,
            max_input_tokens: self.trace_max_input_tokens,
            max_output_tokens: self.trace_max_output_tokens,
        })
    }

    fn maker(&self, api: Api) -> Result<PromptMaker, PlanError> {
        let form = self.prompt_as.unwrap_or(match (&self.tokenizer, api) {
            (None, _) => PromptForm::Words,
            (Some(_), Api::Completions) => PromptForm::Tokens,
            (Some(_), Api::Chat) => PromptForm::Text,
        });
        let load = |needed_by: &str| -> Result<(ModelText, &Path), PlanError> {
            let path = self
                .tokenizer
                .as_deref()
                .ok_or_else(|| PlanError::Missing {
                    option: "tokenizer",
                    needed_by: needed_by.to_owned(),
                    example: "path/to/model",
                })?;
            Ok((ModelText::load(path)?, path))
        };
        match form {
            PromptForm::Lengths => Ok(PromptMaker::lengths(self.seed)),
            PromptForm::Words => Ok(PromptMaker::words(api, self.seed)),
            PromptForm::Tokens => {
                let (model, path) = load("--prompt-as tokens")?;
                PromptMaker::tokens(api, model, path, self.seed)
            }
            PromptForm::Text => {
                let (model, path) = load("--prompt-as text")?;
                PromptMaker::text(api, model, path, self.seed)
            }
        }
    }

    fn needs(&self, option: &'static str, example: &'static str) -> PlanError {
        PlanError::Missing {
            option,
            needed_by: self.chosen(),
            example,
        }
    }

    pub(super) fn chosen(&self) -> String {
        let kind = self.workload.to_possible_value();
        let name = kind.as_ref().map_or("", |kind| kind.get_name());
        format!("--workload {name}")
    }
}
