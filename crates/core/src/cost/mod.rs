//! What a request costs on a worker, in seconds: its own time, and the time that it takes
//! from the requests that are there.
//!
//! Every cost grows with each part of a worker's load, and with what it lacks in room: an index
//! of the workers rests on that.

mod fit;
mod forecast;
mod hardware;
mod links;
mod step_fit;
#[cfg(test)]
mod tests;

pub use self::fit::LinearFit;
pub use self::forecast::Forecast;
pub use self::hardware::{Hardware, HardwareClass, Rates, StepSample};
pub use self::links::Links;
pub use self::step_fit::{ChunkFit, StepFit};
use crate::{RequestView, Role, WorkerView};

/// What prompts before a request cost more if it has waited in the router for room. The workers that
/// it waited for are busy, so one that has time for its prompt is the better choice where costs are
/// about equal. Much more would send long prompts to where others decode, and delay their tokens.
const WAITED_WEIGHT: f64 = 1.2;

/// Sequences that share a step where a worker is so full that blocks are missing.
const FULL_BATCH: f64 = 16.0;

/// Parameters of the cost model that nothing is measured for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostConfig {
    /// Output that a request is expected to have at most; few reach their `max_tokens`.
    pub expected_output_tokens: u32,
    /// Room for growth, beyond the prompt, that a decode worker should have per choice.
    pub headroom_tokens: u32,
    /// What a second costs that other requests wait, against one of the request's own.
    pub others_weight: f64,
    /// What a half of a request costs more on a worker of another role, as a share of its
    /// time on that worker if it is idle.
    pub role_preference: f64,
    /// Objective of the time per output token. `None`: every second that sequences wait counts.
    pub tpot_s: Option<f64>,
}

impl Default for CostConfig {
    fn default() -> Self {
        Self {
            expected_output_tokens: 256,
            headroom_tokens: 64,
            others_weight: 1.0,
            role_preference: 0.05,
            tpot_s: None,
        }
    }
}

/// The load of a worker, as far as costs depend on it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// Prompt tokens to be computed before a new arrival's.
    pub backlog_tokens: f64,
    /// That decode there, now or soon.
    pub sequences: f64,
    /// Of these: that a new arrival's prompt would stall.
    pub stalled_sequences: f64,
    /// That its sequences attend to.
    pub kv_tokens: f64,
    /// Tokens for which there is room.
    pub spare_tokens: f64,
}

impl Load {
    pub fn of(worker: &WorkerView) -> Self {
        let block_tokens = f64::from(worker.capacity.block_size_tokens.max(1));
        Self {
            backlog_tokens: worker.prefill_backlog_tokens() as f64,
            sequences: f64::from(worker.sequences()),
            stalled_sequences: f64::from(worker.stalled_sequences()),
            kv_tokens: worker.kv_tokens() as f64,
            spare_tokens: worker.spare_blocks() as f64 * block_tokens,
        }
    }
}

/// What is known of costs: parameters, and what was learnt.
#[derive(Debug, Clone, Default)]
pub struct CostModel {
    pub config: CostConfig,
    pub hardware: Hardware,
    pub links: Links,
}

impl CostModel {
    pub fn new(config: CostConfig) -> Self {
        Self {
            config,
            ..Self::default()
        }
    }

    /// The costs of a request on hardware of one class.
    pub fn price(&self, class: usize, request: &RequestView) -> Price {
        let rates = self.hardware.rates().get(class).copied();
        Price::new(self.config, rates.unwrap_or_default(), request)
    }

    /// What a handoff adds between the first token and the second. `held`: tokens of the
    /// prompt that the decode worker has already.
    pub fn handoff_s(&self, request: &RequestView, held: u32, same_machine: bool) -> f64 {
        let moved = request.prompt_tokens.saturating_sub(held);
        self.links.handoff_s(same_machine, f64::from(moved))
    }
}

/// What one request costs on workers of one hardware class, by their load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Price {
    rates: Rates,
    others_weight: f64,
    tpot_s: Option<f64>,
    prompt_tokens: f64,
    growth_tokens: f64,
    /// Decode steps that are expected.
    steps: f64,
    /// Computing the prompt.
    prompt_s: f64,
    /// By which the request lengthens a decode step.
    longer_s: f64,
    /// Waiting for a token's room where none is free. In the steady state a worker frees as
    /// many tokens as it produces.
    room_token_s: f64,
    waited: bool,
    /// What a second costs that the request waits for prompts before it.
    wait_weight: f64,
    /// What prefill and decode cost more on a worker whose role is another.
    preference_s: [f64; 2],
}

impl Price {
    fn new(config: CostConfig, rates: Rates, request: &RequestView) -> Self {
        let prompt_tokens = f64::from(request.prompt_tokens);
        let choices = f64::from(request.choices);
        let steps = request.max_tokens.saturating_sub(1);
        let steps = f64::from(steps.min(config.expected_output_tokens));
        let growth = f64::from(request.max_tokens.min(config.headroom_tokens));
        let prompt_s = rates.prompt_s(prompt_tokens, 0.0);
        let context = choices * (prompt_tokens + steps / 2.0);
        let longer_s = rates.sequence_s * choices + rates.kv_token_s * context;
        let idle_s = [
            rates.prompt_step_s + prompt_s,
            steps * (rates.step_s + longer_s),
        ];
        Self {
            rates,
            others_weight: config.others_weight,
            tpot_s: config.tpot_s,
            prompt_tokens,
            growth_tokens: growth * choices,
            steps,
            prompt_s,
            longer_s,
            waited: request.waited,
            wait_weight: if request.waited { WAITED_WEIGHT } else { 1.0 },
            room_token_s: rates.step_s / FULL_BATCH + rates.sequence_s,
            preference_s: idle_s.map(|idle_s| config.role_preference * idle_s),
        }
    }

    /// Prefill: the time to the first token, and the stall of the sequences that decode there.
    /// `cached`: tokens of the prompt that need not be computed.
    #[inline]
    pub fn prefill_s(&self, load: &Load, cached: u32) -> f64 {
        let own_s = self.prompt_part_s(cached);
        self.rates.prompt_step_s
            + self.wait_weight * self.rates.prompt_token_s * load.backlog_tokens
            + own_s * (1.0 + self.stall_weight(load) * load.stalled_sequences)
            + self.shortage_s(load, self.prompt_tokens)
    }

    /// Decode: the time from the first token to the last, and by how much the steps of the
    /// sequences there grow.
    ///
    /// Prompts are computed between the steps. Those that wait there now may be done when
    /// decode begins, but others come: as many are taken to wait then. `whole`: the worker
    /// prefills the request too, and the room for its prompt is counted there.
    #[inline]
    pub fn decode_s(&self, load: &Load, whole: bool) -> f64 {
        let step_s = self.rates.decode_s(load.sequences, load.kv_tokens) + self.longer_s;
        let others_s = self.others_weight * load.sequences * self.longer_s;
        let room = self.growth_tokens + if whole { 0.0 } else { self.prompt_tokens };
        self.steps * (step_s + others_s)
            + self.rates.prompt_token_s * load.backlog_tokens
            + self.shortage_s(load, room)
    }

    /// What prefill costs more on a worker whose role is another.
    pub fn prefill_preference_s(&self, role: Role) -> f64 {
        if role.prefills() {
            0.0
        } else {
            self.preference_s[0]
        }
    }

    /// What decode costs more on a worker whose role is another.
    pub fn decode_preference_s(&self, role: Role) -> f64 {
        if role.decodes() {
            0.0
        } else {
            self.preference_s[1]
        }
    }

    /// What a second counts that sequences wait for a prompt. The shorter their steps are than the
    /// objective, the less it matters.
    #[inline]
    fn stall_weight(&self, load: &Load) -> f64 {
        let share = self.tpot_s.map_or(1.0, |tpot_s| {
            self.rates.decode_s(load.sequences, load.kv_tokens) / tpot_s
        });
        self.others_weight * share.min(1.0).powi(2)
    }

    /// Computing what of the prompt is not cached; the last token always is computed.
    #[inline]
    fn prompt_part_s(&self, cached: u32) -> f64 {
        if cached == 0 {
            return self.prompt_s;
        }
        let cached = f64::from(cached).min(self.prompt_tokens - 1.0).max(0.0);
        self.rates.prompt_s(self.prompt_tokens, cached)
    }

    #[inline]
    fn shortage_s(&self, load: &Load, tokens: f64) -> f64 {
        (tokens - load.spare_tokens).max(0.0) * self.room_token_s
    }
}
