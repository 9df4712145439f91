//! What work costs, in seconds. Plain parameters; measured rates take over when there are any.

use crate::{RequestView, WorkerView};

/// Parameters of the cost model. The priors hold until a worker has measured itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostConfig {
    /// Prefill speed before the first measurement.
    pub prior_prefill_tokens_per_s: f64,
    /// Decode step of a single request before the first measurement.
    pub prior_single_step_s: f64,
    /// How much each further request lengthens a decode step, as a share of a single one's.
    pub batch_slope: f64,
    /// Part of a handoff that does not depend on its size: messages, one step's wait.
    pub handoff_s: f64,
    /// Last, unhidden part of a transfer, per prompt token.
    pub handoff_s_per_token: f64,
    /// Output that a request is expected to have at most; few reach their `max_tokens`.
    pub expected_output_tokens: u32,
    /// Room for growth, beyond the prompt, that a decode worker should have per choice.
    pub headroom_tokens: u32,
    /// Measured speeds that differ by less than this factor count as equal:
    /// measurements are noisy, and an unlucky one must not starve a worker.
    pub noise_factor: f64,
}

impl Default for CostConfig {
    fn default() -> Self {
        Self {
            prior_prefill_tokens_per_s: 2_000.0,
            prior_single_step_s: 0.03,
            batch_slope: 0.05,
            handoff_s: 0.01,
            handoff_s_per_token: 2e-6,
            expected_output_tokens: 256,
            headroom_tokens: 64,
            noise_factor: 1.5,
        }
    }
}

/// The step time of a single request, from one measured with `running` in the batch.
pub fn single_step_s(measured_step_s: f64, running: u32, batch_slope: f64) -> f64 {
    measured_step_s / (1.0 + batch_slope * f64::from(running.saturating_sub(1)))
}

/// Expected durations on the workers of one fleet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostModel {
    config: CostConfig,
    /// The fastest that was measured; the priors when nothing was.
    best_prefill_tokens_per_s: f64,
    best_single_step_s: f64,
}

impl CostModel {
    /// A model for choosing among `fleet`. A worker that has measured nothing
    /// yet is taken for as fast as the best, so that it gets to measure.
    pub fn new<'a>(config: CostConfig, fleet: impl IntoIterator<Item = &'a WorkerView>) -> Self {
        let (mut rate, mut step_s) = (0.0_f64, f64::INFINITY);
        for worker in fleet {
            let load = &worker.load;
            rate = rate.max(measured(load.prefill_tokens_per_s).unwrap_or(0.0));
            step_s = step_s.min(measured(load.single_step_s).unwrap_or(f64::INFINITY));
        }
        Self {
            config,
            best_prefill_tokens_per_s: measured(rate).unwrap_or(config.prior_prefill_tokens_per_s),
            best_single_step_s: measured(step_s).unwrap_or(config.prior_single_step_s),
        }
    }

    /// From now to the first token, on a worker that prefills the request.
    pub fn first_token_s(&self, worker: &WorkerView, request: &RequestView) -> f64 {
        let own = u64::from(request.tokens_to_compute(worker.id));
        let queue_s = self.prefill_s(worker, worker.prefill_backlog_tokens());
        let prompt_blocks = worker.blocks_for(u64::from(request.prompt_tokens));
        queue_s + self.prefill_s(worker, own) + self.shortage_s(worker, prompt_blocks)
    }

    /// From the first token to the last expected one, on a worker that decodes the request.
    ///
    /// Prompts are computed between its steps. Those that wait there now may be done when
    /// it begins, but others come: as many are taken to wait then. `whole`: the worker
    /// prefills the request too, and its prompt's blocks were counted there.
    pub fn decode_s(&self, worker: &WorkerView, request: &RequestView, whole: bool) -> f64 {
        let steps = request.max_tokens.saturating_sub(1);
        let steps = f64::from(steps.min(self.config.expected_output_tokens));
        let batch = worker.requests() + request.choices;
        let stall_s = self.prefill_s(worker, worker.prefill_backlog_tokens());
        let blocks = if whole {
            self.growth_blocks(worker, request)
        } else {
            self.decode_blocks(worker, request)
        };
        steps * self.step_s(worker, batch) + stall_s + self.shortage_s(worker, blocks)
    }

    /// Blocks that a decode worker should have for the request: prompt and first growth.
    pub fn decode_blocks(&self, worker: &WorkerView, request: &RequestView) -> u64 {
        let prompt = worker.blocks_for(u64::from(request.prompt_tokens));
        prompt + self.growth_blocks(worker, request)
    }

    /// What a handoff adds between the first token and the second.
    pub fn handoff_s(&self, request: &RequestView) -> f64 {
        self.config.handoff_s + self.config.handoff_s_per_token * f64::from(request.prompt_tokens)
    }

    /// Computing so many prompt tokens.
    pub fn prefill_s(&self, worker: &WorkerView, tokens: u64) -> f64 {
        let best = self.best_prefill_tokens_per_s;
        let own = measured(worker.load.prefill_tokens_per_s);
        let slower = own.filter(|rate| rate * self.config.noise_factor < best);
        tokens as f64 / slower.unwrap_or(best)
    }

    /// One decode step with so many requests in it.
    pub fn step_s(&self, worker: &WorkerView, requests: u32) -> f64 {
        let best = self.best_single_step_s;
        let own = measured(worker.load.single_step_s);
        let slower = own.filter(|step_s| *step_s > best * self.config.noise_factor);
        slower.unwrap_or(best)
            * (1.0 + self.config.batch_slope * f64::from(requests.saturating_sub(1)))
    }

    fn growth_blocks(&self, worker: &WorkerView, request: &RequestView) -> u64 {
        let tokens = request.max_tokens.min(self.config.headroom_tokens);
        u64::from(request.choices) * worker.blocks_for(u64::from(tokens))
    }

    /// Waiting for blocks that are not free. In the steady state a worker frees
    /// as many tokens as it produces: one per running request and step.
    fn shortage_s(&self, worker: &WorkerView, blocks: u64) -> f64 {
        let missing = blocks.saturating_sub(worker.spare_blocks());
        let tokens = missing as f64 * f64::from(worker.capacity.block_size_tokens);
        let running = worker.load.running_requests.max(1);
        tokens / f64::from(running) * self.step_s(worker, running)
    }
}

/// A measurement, if there is one.
fn measured(value: f64) -> Option<f64> {
    (value.is_finite() && value > 0.0).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Capabilities, Capacity, Health, KvDomain, Outstanding, ReportedLoad, Role, WorkerId,
    };

    fn worker() -> WorkerView {
        WorkerView {
            id: WorkerId(0),
            domain: KvDomain::default(),
            capabilities: Capabilities::default(),
            role: Role::Mixed,
            health: Health::Ready,
            capacity: Capacity {
                max_model_len_tokens: 4_096,
                block_size_tokens: 16,
                total_blocks: 1_000,
            },
            load: ReportedLoad {
                free_blocks: 1_000,
                prefill_tokens_per_s: 1_000.0,
                single_step_s: 0.01,
                ..ReportedLoad::default()
            },
            outstanding: Outstanding::default(),
        }
    }

    fn alone(worker: &WorkerView) -> CostModel {
        CostModel::new(CostConfig::default(), [worker])
    }

    #[test]
    fn the_unmeasured_count_as_the_best_and_noise_counts_as_nothing() {
        let fast = worker();
        let (mut slow, mut new) = (worker(), worker());
        new.load.prefill_tokens_per_s = 0.0;
        new.load.single_step_s = 0.0;
        for (factor, expected) in [(1.4, 1.0), (2.0, 2.0)] {
            slow.load.prefill_tokens_per_s = 1_000.0 / factor;
            slow.load.single_step_s = 0.01 * factor;
            let model = CostModel::new(CostConfig::default(), [&slow, &fast, &new]);
            assert!((model.prefill_s(&slow, 100) - 0.1 * expected).abs() < 1e-9);
            assert!((model.step_s(&slow, 1) - 0.01 * expected).abs() < 1e-9);
            assert!((model.prefill_s(&new, 100) - 0.1).abs() < 1e-9);
            assert!((model.step_s(&new, 1) - 0.01).abs() < 1e-9);
        }
    }

    #[test]
    fn measured_rates_replace_priors() {
        let mut worker = worker();
        let model = alone(&worker);
        assert!((model.prefill_s(&worker, 500) - 0.5).abs() < 1e-9);
        assert!((model.step_s(&worker, 1) - 0.01).abs() < 1e-9);
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            worker.load.prefill_tokens_per_s = bad;
            worker.load.single_step_s = bad;
            let model = alone(&worker);
            assert!((model.prefill_s(&worker, 500) - 0.25).abs() < 1e-9);
            assert!((model.step_s(&worker, 1) - 0.03).abs() < 1e-9);
        }
    }

    #[test]
    fn the_queue_and_what_we_sent_since_both_count() {
        let model = alone(&worker());
        let request = RequestView::new(100, 10);
        let idle = model.first_token_s(&worker(), &request);
        let mut reported = worker();
        reported.load.waiting_prefill_tokens = 300;
        let mut sent = worker();
        sent.outstanding.prefill_tokens = 300;
        assert!((model.first_token_s(&reported, &request) - idle - 0.3).abs() < 1e-9);
        assert!((model.first_token_s(&sent, &request) - idle - 0.3).abs() < 1e-9);
    }

    #[test]
    fn a_warm_prefix_is_not_computed() {
        let mut request = RequestView::new(100, 10);
        request.warm = Some(crate::Warm {
            worker: WorkerId(0),
            tokens: 96,
        });
        assert_eq!(request.tokens_to_compute(WorkerId(0)), 4);
        assert_eq!(request.tokens_to_compute(WorkerId(1)), 100);
        request.warm = Some(crate::Warm {
            worker: WorkerId(0),
            tokens: 100,
        });
        assert_eq!(request.tokens_to_compute(WorkerId(0)), 1);
    }

    #[test]
    fn missing_blocks_cost_time() {
        let model = alone(&worker());
        let request = RequestView::new(160, 16);
        let roomy = model.decode_s(&worker(), &request, false);
        let mut full = worker();
        full.load.free_blocks = 5;
        assert!(model.decode_s(&full, &request, false) > roomy);
        let mut promised = worker();
        promised.outstanding.promised_blocks = 995;
        assert_eq!(
            model.decode_s(&full, &request, false),
            model.decode_s(&promised, &request, false)
        );
    }

    #[test]
    fn a_single_step_is_recovered_from_a_batch() {
        let model = alone(&worker());
        let worker = worker();
        let measured = model.step_s(&worker, 8);
        let single = single_step_s(measured, 8, CostConfig::default().batch_slope);
        assert!((single - 0.01).abs() < 1e-12);
    }

    #[test]
    fn prompts_stall_decodes_of_the_worker_on_which_they_wait() {
        let model = alone(&worker());
        let request = RequestView::new(100, 10);
        let mut busy = worker();
        busy.load.waiting_prefill_tokens = 1_000;
        for whole in [false, true] {
            let undisturbed = model.decode_s(&worker(), &request, whole);
            let stalled = model.decode_s(&busy, &request, whole);
            assert!((stalled - undisturbed - 1.0).abs() < 1e-9);
        }
    }
}
