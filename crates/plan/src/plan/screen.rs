//! A first estimate of the rate that a design can serve: steady state, no queues.
//!
//! With `p` the time of a prompt, `o` output tokens and `s(b)` a step of `b` sequences:
//!
//! ```text
//!  mixed     a token every s(b) + p b / o, so b / (o s(b) + p b) requests a second
//!  decode    b / (o s(b))
//!  prefill   0.85 / p
//! ```
//!
//! with the largest `b` for which KV fits and tokens come in time. A split is as fast as its
//! slower half, and no faster than its links.

use std::collections::BTreeMap;

use tasuki_sim::steps::{StepModel, Work};

use super::design::{Design, Part};
use super::lengths::Lengths;
use crate::hardware::Hardware;

/// Of its time that a worker that only prefills may be busy.
const PREFILL_SHARE: f64 = 0.85;

/// Objectives in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    pub ttft_s: f64,
    pub tpot_s: f64,
}

/// Requests a second that one worker is estimated to serve as one of each role.
#[derive(Debug, Clone, Copy)]
pub struct Rates {
    prefill: f64,
    decode: f64,
    mixed: f64,
}

impl Rates {
    pub fn of(hardware: &Hardware, lengths: Lengths, limits: Limits) -> Self {
        // Of a prompt that is cached only its rest costs time.
        let lengths = Lengths {
            prompt: (lengths.prompt - lengths.cached).max(1.0),
            ..lengths
        };
        Self {
            prefill: prefill_rate(hardware, lengths, limits),
            decode: decode_rate(hardware, lengths, limits),
            mixed: mixed_rate(hardware, lengths, limits),
        }
    }
}

/// Requests a second that a design is estimated to serve. `rates`: by degree of tensor parallelism.
pub fn estimate(design: &Design, rates: &BTreeMap<u32, Rates>) -> f64 {
    let of = |part: Part, rate: fn(&Rates) -> f64| {
        let each = rates.get(&part.tensor_parallel).map_or(0.0, rate);
        f64::from(part.workers) * each
    };
    let prefill = of(design.prefill, |rates| rates.prefill);
    let decode = of(design.decode, |rates| rates.decode);
    // Mixed workers do what is left of either half.
    let (mixed, halves) = (of(design.mixed, |rates| rates.mixed), [prefill, decode]);
    let split = prefill.min(decode);
    let lonely = halves.iter().fold(0.0, |most: f64, half| most.max(*half)) - split;
    let helped = if mixed > 0.0 {
        lonely.min(mixed) * 0.5
    } else {
        0.0
    };
    split + mixed + helped
}

fn prompt_s(steps: &StepModel, lengths: Lengths, beside: bool) -> f64 {
    let work = Work {
        prompt_tokens: lengths.prompt,
        prompt_squares: lengths.prompt * lengths.prompt,
        ..Work::default()
    };
    if !beside {
        return steps.step_s(&work);
    }
    let one = |prompt: Work| {
        steps.step_s(&Work {
            sequences: 8.0,
            kv_tokens: 8.0 * lengths.prompt,
            ..prompt
        })
    };
    one(work) - one(Work::default())
}

fn link_rate(hardware: &Hardware, lengths: Lengths) -> f64 {
    let bytes = lengths.prompt * hardware.kv_bytes_per_token;
    hardware.network.within_host.bytes_per_s / bytes.max(1.0)
}

fn prefill_rate(hardware: &Hardware, lengths: Lengths, limits: Limits) -> f64 {
    let own_s = prompt_s(&hardware.steps, lengths, false);
    if own_s > limits.ttft_s {
        return 0.0;
    }
    (PREFILL_SHARE / own_s).min(link_rate(hardware, lengths))
}

fn decode_rate(hardware: &Hardware, lengths: Lengths, limits: Limits) -> f64 {
    best_batch(hardware, lengths, limits, 0.0).min(link_rate(hardware, lengths))
}

fn mixed_rate(hardware: &Hardware, lengths: Lengths, limits: Limits) -> f64 {
    if prompt_s(&hardware.steps, lengths, false) > limits.ttft_s {
        return 0.0;
    }
    best_batch(
        hardware,
        lengths,
        limits,
        prompt_s(&hardware.steps, lengths, true),
    )
}

/// The highest rate of a worker whose sequences share their time with prompts of `own_s` each.
fn best_batch(hardware: &Hardware, lengths: Lengths, limits: Limits, own_s: f64) -> f64 {
    let pool = f64::from(hardware.limits.num_blocks) * f64::from(hardware.limits.block_size);
    let context = lengths.prompt + lengths.output / 2.0;
    let most = (pool / (lengths.prompt + lengths.output)).floor();
    let most = most.min(f64::from(hardware.limits.max_running_requests)) as u32;
    let mut best = 0.0f64;
    let mut batch = 1;
    while batch <= most {
        let sequences = f64::from(batch);
        let step_s = hardware.steps.decode_s(sequences, sequences * context)
            + hardware.limits.between_steps_s(sequences);
        let token_s = step_s + own_s * sequences / lengths.output;
        if token_s > limits.tpot_s {
            break;
        }
        best = best.max(sequences / (lengths.output * token_s));
        batch = (batch + 1).max(batch * 9 / 8);
    }
    best
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tasuki_sim::{LinkSpec, NetworkSpec};

    use super::super::design::all;
    use super::*;

    const LENGTHS: Lengths = Lengths {
        prompt: 1_000.0,
        cached: 0.0,
        output: 100.0,
    };
    const LIMITS: Limits = Limits {
        ttft_s: 1.0,
        tpot_s: 0.05,
    };

    /// Prompts of 1,000 tokens take 0.1 s, steps 10 ms; there is room for ten requests.
    fn hardware() -> Hardware {
        let link = LinkSpec {
            bytes_per_s: 1e9,
            latency_s: 0.0,
        };
        Hardware {
            steps: Arc::new(StepModel::Rates(tasuki_core::Rates {
                step_s: 0.01,
                sequence_s: 0.0,
                kv_token_s: 0.0,
                prompt_step_s: 0.0,
                prompt_token_s: 1e-4,
                prompt_square_s: 0.0,
            })),
            limits: tasuki_sim::Limits::gpu(344, 2_048),
            kv_bytes_per_token: 1e3,
            network: NetworkSpec {
                within_host: link,
                between_hosts: link,
            },
            message_s: 0.0,
            handoff_s: 0.0,
            name: String::new(),
            model: None,
            on_gpus: true,
            source: String::new(),
        }
    }

    /// Of a prefill, a decode and a mixed worker.
    fn rates(hardware: &Hardware, lengths: Lengths, limits: Limits) -> [f64; 3] {
        let rates = Rates::of(hardware, lengths, limits);
        [rates.prefill, rates.decode, rates.mixed].map(|rate| (1e6 * rate).round() / 1e6)
    }

    #[test]
    fn each_limit_of_a_worker_counts() {
        let known = hardware();
        // Ten sequences for 100 steps; beside prompts a token takes 20 ms.
        assert_eq!(rates(&known, LENGTHS, LIMITS), [8.5, 10.0, 5.0]);
        let cached = Lengths {
            cached: 500.0,
            ..LENGTHS
        };
        assert_eq!(rates(&known, cached, LIMITS)[0], 17.0);
        let late = Limits {
            ttft_s: 0.09,
            ..LIMITS
        };
        assert_eq!(rates(&known, LENGTHS, late), [0.0, 10.0, 0.0]);
        let slow = Limits {
            tpot_s: 0.009,
            ..LIMITS
        };
        assert_eq!(rates(&known, LENGTHS, slow), [8.5, 0.0, 0.0]);
        let mut pauses = hardware();
        pauses.limits.between_s = 0.01;
        assert_eq!(rates(&pauses, LENGTHS, LIMITS)[1], 5.0);
        let mut linked = hardware();
        linked.network.within_host.bytes_per_s = 2e6;
        assert_eq!(rates(&linked, LENGTHS, LIMITS), [2.0, 2.0, 5.0]);
    }

    #[test]
    fn a_design_is_as_fast_as_its_slower_half_and_what_mixed_workers_add() {
        let known = BTreeMap::from([(1, Rates::of(&hardware(), LENGTHS, LIMITS))]);
        for (gpus, name, wanted) in [
            (2, "1 prefill + 1 decode", 8.5),
            (3, "1 prefill + 2 decode", 8.5),
            (2, "2 mixed", 10.0),
            (2, "1 prefill + 1 mixed", 5.0 + 2.5),
            (3, "1 prefill + 1 decode + 1 mixed", 8.5 + 5.0 + 0.75),
        ] {
            let designs = all(gpus, &[1], 1_024);
            let design = designs.iter().find(|design| design.name() == name);
            let rate = estimate(design.expect(name), &known);
            assert!((rate - wanted).abs() < 1e-6, "{name}: {rate}");
        }
    }
}
