//! A workload chosen and checked, before it is made.

use serde::Serialize;
use serde_json::{Value, json};

use super::Making;
use super::decode_only::DecodeOnly;
use super::lengths::Lengths;
use super::multi_turn::{MultiTurn, MultiTurnSettings};
use super::prompts::{Prompts, PromptsSettings};
use super::random::{Random, SharedPrefix};
use super::trace::{Trace, TraceSettings};
use crate::error::PlanError;
use crate::plan::Workload;
use crate::tokens::PromptMaker;

/// Requests of a synthetic workload when nobody says how many.
const DEFAULT_REQUESTS: usize = 100;

/// The kinds of workloads and their parameters.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Shape {
    Random(Lengths),
    Fixed(Lengths),
    PrefillOnly(Lengths),
    DecodeOnly {
        #[serde(flatten)]
        lengths: Lengths,
        /// None: as many as requests.
        distinct_prompts: Option<usize>,
    },
    SharedPrefix {
        #[serde(flatten)]
        prefix: SharedPrefix,
        #[serde(flatten)]
        lengths: Lengths,
    },
    MultiTurn(MultiTurnSettings),
    Trace(TraceSettings),
    Prompts(PromptsSettings),
}

/// A workload, ready to be made.
#[derive(Debug)]
pub struct WorkloadPlan {
    pub shape: Shape,
    /// None: all of the file, or 100 where there is none.
    pub num_requests: Option<usize>,
    pub seed: u64,
    /// Whether answers have all their tokens, or end by themselves.
    pub exact_output: bool,
    pub maker: PromptMaker,
}

impl WorkloadPlan {
    /// The `workload` of a result file.
    #[must_use]
    pub fn describe(&self) -> Value {
        let mut described = json!(self.shape);
        described["num_requests"] = json!(self.requests());
        described["seed"] = json!(self.seed);
        described["prompt_form"] = json!(self.maker.form());
        described["exact_output"] = json!(self.exact_output);
        described
    }

    /// Whether the workload itself says when requests are due.
    #[must_use]
    pub fn has_times(&self) -> bool {
        matches!(self.shape, Shape::Trace(_))
    }

    /// Makes the workload, reading its file if it has one.
    ///
    /// # Errors
    /// [`PlanError::TooShort`], and what is wrong with files.
    pub fn build(self) -> Result<Box<dyn Workload>, PlanError> {
        let requests = self.requests();
        let making = Making {
            requests: requests.unwrap_or_default(),
            maker: self.maker,
            seed: self.seed,
            exact_output: self.exact_output,
        };
        Ok(match self.shape {
            Shape::Random(lengths) | Shape::Fixed(lengths) | Shape::PrefillOnly(lengths) => {
                Box::new(Random::new(making, None, lengths)?)
            }
            Shape::DecodeOnly {
                lengths,
                distinct_prompts,
            } => Box::new(DecodeOnly::new(making, lengths, distinct_prompts)?),
            Shape::SharedPrefix { prefix, lengths } => {
                Box::new(Random::new(making, Some(prefix), lengths)?)
            }
            Shape::MultiTurn(settings) => Box::new(MultiTurn::new(making, settings)?),
            Shape::Trace(settings) => Box::new(Trace::read(making, &settings, requests)?),
            Shape::Prompts(settings) => Box::new(Prompts::read(making, &settings, requests)?),
        })
    }

    /// How many requests are wanted; None: all of a file.
    fn requests(&self) -> Option<usize> {
        match self.shape {
            Shape::Trace(_) | Shape::Prompts(_) => self.num_requests,
            _ => Some(self.num_requests.unwrap_or(DEFAULT_REQUESTS)),
        }
    }
}
