//! What one worker is.

use std::sync::Arc;

use tasuki_core::Role;

use crate::steps::StepModel;

/// One worker.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    pub role: Role,
    /// The machine that it is on.
    pub host: u32,
    /// Workers of one class are equally fast.
    pub class: Arc<str>,
    pub steps: Arc<StepModel>,
    pub limits: Limits,
}

/// A worker's sizes, as the options of `tasuki worker` of these names set them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    pub num_blocks: u32,
    pub block_size: u32,
    /// Prompt plus output of one request.
    pub max_model_len: u32,
    pub max_batched_tokens: u32,
    pub max_running_requests: u32,
    /// Of a step that decodes and computes prompts; `None`: bounded in tokens only.
    pub itl_target_s: Option<f64>,
    /// Of a step that only computes prompts.
    pub longest_step_s: f64,
    /// Room for output that a decode leg asks for beyond its prompt.
    pub headroom_tokens: u32,
    pub prefix_caching: bool,
    /// So long before a step ends the next one is planned; what comes later is not part of it.
    pub lead_s: f64,
    /// The same for each sequence that decodes.
    pub lead_sequence_s: f64,
    /// The share of a step with prompts by which the next one is planned earlier still: such steps
    /// vary, so the engine does not count on all of their time.
    pub lead_of_prompts: f64,
    /// From a request's arrival at an idle worker to its first step. What comes meanwhile is part of
    /// the next one.
    pub launch_s: f64,
    /// To read a request: those of a burst come one after another.
    pub receive_s: f64,
    /// Between a step and the next one, while the worker writes its messages: nothing where the
    /// device goes on meanwhile.
    pub between_s: f64,
    /// The same for each sequence that decodes.
    pub between_sequence_s: f64,
}

impl Limits {
    /// What `tasuki worker` does on a GPU unless it is told otherwise.
    pub fn gpu(num_blocks: u32, max_model_len: u32) -> Self {
        Self {
            num_blocks,
            block_size: 32,
            max_model_len,
            max_batched_tokens: 4_096,
            max_running_requests: 256,
            itl_target_s: Some(9e-3),
            longest_step_s: 1.0,
            headroom_tokens: 64,
            prefix_caching: true,
            lead_s: 1.5e-3,
            lead_sequence_s: 0.0,
            lead_of_prompts: 0.15,
            launch_s: 1.5e-3,
            receive_s: 1e-4,
            between_s: 0.0,
            between_sequence_s: 0.0,
        }
    }

    /// The same on a processor.
    pub fn cpu(num_blocks: u32, max_model_len: u32) -> Self {
        Self {
            block_size: 16,
            max_batched_tokens: 1_024,
            max_running_requests: 64,
            itl_target_s: Some(0.1),
            lead_s: 0.0,
            lead_of_prompts: 0.0,
            launch_s: 0.5e-3,
            ..Self::gpu(num_blocks, max_model_len)
        }
    }

    /// How long before a step's end the next one is planned: when it begins at the earliest.
    pub fn planned_before_s(&self, sequences: f64, step_s: f64, prompts: bool) -> f64 {
        let lead_s = self.lead_s + self.lead_sequence_s * sequences;
        let early_s = if prompts {
            self.lead_of_prompts * step_s
        } else {
            0.0
        };
        (lead_s + early_s).min(step_s)
    }

    /// From a step of so many decodes to the next one.
    pub fn between_steps_s(&self, sequences: f64) -> f64 {
        self.between_s + self.between_sequence_s * sequences
    }

    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size)
    }

    /// Blocks of one request of maximal length.
    pub fn max_request_blocks(&self) -> u32 {
        self.blocks_for(self.max_model_len)
    }
}
