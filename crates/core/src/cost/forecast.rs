//! What a request is expected to see if it is placed now.

use super::{Load, Price};
use crate::WorkerView;

/// A request's near future on the workers of one placement.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Forecast {
    /// The request has waited in the router for room.
    pub waited: bool,
    /// Until the prompts before it are computed.
    pub wait_s: f64,
    /// Computing its own prompt.
    pub prefill_s: f64,
    /// A decode step with the request in it.
    pub step_s: f64,
    /// The work that it is, wherever it runs: its prompt, and by how much it lengthens the
    /// steps of its decode.
    pub work_s: f64,
    /// Tokens for which there is no room yet, of the prompt and the first growth.
    pub missing_tokens: f64,
    /// Neither worker has anything to do: waiting would change nothing.
    pub idle: bool,
    /// One worker computes the prompt and another one decodes.
    pub split: bool,
}

impl Forecast {
    /// From now to the first token.
    pub fn ttft_s(&self) -> f64 {
        self.wait_s + self.prefill_s
    }
}

impl Price {
    /// The work that a request is on hardware of its class, see [`Forecast::work_s`].
    pub fn work_s(&self) -> f64 {
        self.prompt_s + self.steps * self.longer_s
    }

    /// Completes the half that is known of the prefill worker's class, `self`, with that of
    /// the decode worker's. `cached`: tokens of the prompt that need not be computed.
    pub fn forecast(
        &self,
        prefill: &WorkerView,
        (decode_price, decode): (&Price, &WorkerView),
        cached: u32,
    ) -> Forecast {
        let (here, there) = (Load::of(prefill), Load::of(decode));
        let whole = prefill.id == decode.id;
        let missing = |load: &Load, tokens: f64| (tokens - load.spare_tokens).max(0.0);
        let with_growth = self.prompt_tokens + self.growth_tokens;
        Forecast {
            waited: self.waited,
            wait_s: self.rates.prompt_token_s * here.backlog_tokens,
            prefill_s: self.rates.prompt_step_s + self.prompt_part_s(cached),
            step_s: decode_price
                .rates
                .decode_s(there.sequences, there.kv_tokens)
                + decode_price.longer_s,
            work_s: self.work_s(),
            missing_tokens: if whole {
                missing(&here, with_growth)
            } else {
                missing(&here, self.prompt_tokens).max(missing(&there, with_growth))
            },
            idle: [prefill, decode].into_iter().all(WorkerView::is_idle),
            split: !whole,
        }
    }
}
