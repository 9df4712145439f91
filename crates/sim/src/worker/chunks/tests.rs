//! The rules give what a worker's do: cases of `tests/golden`, with which these are tested too.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use tasuki_core::StepFit;

use super::*;
use crate::steps::{Device, ModelShape, Roofline};

fn golden<T: DeserializeOwned>(name: &str) -> Vec<T> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden");
    let text = std::fs::read_to_string(format!("{folder}/{name}")).expect("the golden file");
    let cases: Vec<T> = serde_json::from_str(&text).expect("golden cases");
    assert!(cases.len() >= 50);
    cases
}

#[derive(Debug, Deserialize)]
struct StepSize {
    block_size: u32,
    max_batched_tokens: u32,
    itl_target_s: Option<f64>,
    longest_step_s: f64,
    alone_per_s: f64,
    beside_token_s: Option<f64>,
    overhead_tokens: f64,
    decodes: u32,
    decode_s: f64,
    backlog: u64,
    prompt_tokens: u32,
}

#[test]
fn a_step_has_as_many_prompt_tokens_as_a_workers() {
    for case in golden::<StepSize>("step_sizes.json") {
        let limits = Limits {
            block_size: case.block_size,
            max_batched_tokens: case.max_batched_tokens,
            itl_target_s: case.itl_target_s,
            longest_step_s: case.longest_step_s,
            ..Limits::gpu(1_000, 1_000)
        };
        let rates = PromptRates {
            alone_per_s: case.alone_per_s,
            beside_token_s: case.beside_token_s,
            overhead_tokens: case.overhead_tokens,
            ..unknown()
        };
        let decodes = (case.decodes, case.decode_s);
        let got = prompt_tokens(&limits, &rates, decodes, case.backlog);
        assert_eq!(got, case.prompt_tokens, "{case:?}");
    }
}

#[derive(Debug, Deserialize)]
struct Divided {
    budget: u32,
    lengths: Vec<u32>,
    takes: Vec<bool>,
    offers: [Vec<u32>; 2],
    left: u32,
}

#[test]
fn prompts_divide_a_step_as_a_workers_do() {
    for case in golden::<Divided>("prompt_shares.json") {
        let mut lengths = case.lengths.clone();
        let shortest = *lengths.iter().min().expect("a prompt");
        let mut shares = Shares::new(case.budget, shortest);
        for (round, expected) in case.offers.iter().enumerate() {
            if round == 1 {
                shares.lift();
            }
            let mut offers = Vec::new();
            for (length, takes) in lengths.iter_mut().zip(&case.takes) {
                let tokens = shares.offer(*length);
                offers.push(tokens);
                if *takes {
                    shares.take(*length, tokens);
                    *length -= tokens;
                }
            }
            assert_eq!(offers, *expected, "{case:?}");
        }
        assert_eq!(shares.left, case.left, "{case:?}");
    }
}

#[derive(Debug, Deserialize)]
struct Learnt {
    alone_per_s: f64,
    steps: Vec<Step>,
    learnt_per_s: f64,
}

#[derive(Debug, Deserialize)]
struct Step {
    decodes: u32,
    decode_s: f64,
    prompt_tokens: u32,
    duration_s: f64,
}

#[test]
fn steps_teach_the_rate_of_prompts_that_they_teach_a_worker() {
    for case in golden::<Learnt>("prompt_rates.json") {
        let mut rates = PromptRates {
            alone_per_s: case.alone_per_s,
            ..unknown()
        };
        for step in &case.steps {
            let work = work(
                step.decodes,
                500 * u64::from(step.decodes),
                step.prompt_tokens,
            );
            rates.learn(&work, step.duration_s, step.decode_s);
        }
        let off = (rates.alone_per_s / case.learnt_per_s - 1.0).abs();
        assert!(off < 1e-12, "{} {case:?}", rates.alone_per_s);
    }
}

/// A worker fits what a prompt token takes beside decodes; here what decodes take alone is known,
/// and an average of the rest is enough. Where a step is the sum of its parts both come to the
/// same.
#[test]
fn beside_decodes_a_prompt_token_takes_what_a_workers_fit_says() {
    // Of a GPU and of a CPU: a step, a sequence, a token of KV, a token of a prompt.
    for [step_s, sequence_s, kv_token_s, prompt_token_s] in
        [[4e-3, 2e-5, 1e-8, 1.5e-5], [2e-2, 2e-3, 4e-7, 8e-4]]
    {
        let mut fit = StepFit::default();
        let mut rates = PromptRates {
            alone_per_s: 1.0 / prompt_token_s,
            ..unknown()
        };
        for number in 0..200u32 {
            let sequences = 1 + number * 7 % 64;
            let kv_tokens = u64::from(sequences) * u64::from(200 + number * 131 % 1_500);
            let prompt_tokens = [0, 64, 512, 200][number as usize % 4];
            let decode_s =
                step_s + sequence_s * f64::from(sequences) + kv_token_s * kv_tokens as f64;
            let duration_s = decode_s + prompt_token_s * f64::from(prompt_tokens);
            fit.learn(sequences, kv_tokens, prompt_tokens, duration_s);
            rates.learn(
                &work(sequences, kv_tokens, prompt_tokens),
                duration_s,
                decode_s,
            );
        }
        let average_s = rates.beside_token_s.expect("steps with both");
        let off = fit.prompt_token_s() / average_s - 1.0;
        assert!(off.abs() < 0.02, "{off}");
        assert!((average_s / prompt_token_s - 1.0).abs() < 1e-9);
    }
}

/// Qwen3-30B-A3B's.
const EXPERTS: ModelShape = ModelShape {
    layers: 48.0,
    hidden: 2048.0,
    dense_parameters: 1.5e9,
    expert_parameters: 29e9,
    experts: 128.0,
    experts_per_token: 8.0,
    kv_bytes_per_token: 98_304.0,
    attention_width: 4096.0,
    bytes_per_parameter: 2.0,
};
/// Qwen3-4B's.
const DENSE: ModelShape = ModelShape {
    layers: 36.0,
    hidden: 2560.0,
    dense_parameters: 4.02e9,
    expert_parameters: 0.0,
    experts: 1.0,
    experts_per_token: 0.0,
    kv_bytes_per_token: 147_456.0,
    attention_width: 4096.0,
    bytes_per_parameter: 2.0,
};

/// Prompt tokens in a second beside so many decodes; without `overhead` as if there were none.
fn prompts_per_s(shape: ModelShape, decodes: u32, prompt: u32, overhead: bool) -> f64 {
    let steps = StepModel::Roofline(Roofline {
        device: Device::named("h100").expect("a GPU"),
        shape,
        tensor_parallel: 1,
    });
    let limits = Limits::gpu(10_000, 10_000);
    let mut rates = PromptRates::warmed_up(&steps);
    let (mut tokens, mut seconds) = (0.0, 0.0);
    for _ in 0..60 {
        let mut start = 0;
        while start < prompt {
            let decode = work(decodes, 5_000 * u64::from(decodes), 0);
            let decode_s = steps.step_s(&decode);
            if !overhead {
                rates.overhead_tokens = 0.0;
            }
            let backlog = u64::from(prompt - start);
            let chunk = prompt_tokens(&limits, &rates, (decodes, decode_s), backlog);
            let chunk = f64::from(chunk.min(prompt - start));
            let both = Work {
                prompt_tokens: chunk,
                prompt_squares: chunk * (2.0 * f64::from(start) + chunk),
                ..decode
            };
            let step_s = steps.step_s(&both);
            rates.learn(&both, step_s, decode_s);
            start += chunk as u32;
            tokens += chunk;
            seconds += step_s;
        }
    }
    tokens / seconds
}

#[test]
fn beside_few_decodes_of_a_model_with_experts_prompts_keep_a_third_of_their_rate() {
    let without = prompts_per_s(EXPERTS, 4, 5_000, false);
    let with = prompts_per_s(EXPERTS, 4, 5_000, true);
    assert!(without < 3_000.0, "{without}");
    assert!(with > 18_000.0, "{with}");
}

#[test]
fn a_dense_models_prompts_have_no_overhead_beside_decodes() {
    for (decodes, prompt) in [(1, 5_000), (4, 5_000), (24, 5_000), (60, 512)] {
        let without = prompts_per_s(DENSE, decodes, prompt, false);
        let with = prompts_per_s(DENSE, decodes, prompt, true);
        assert!((with / without - 1.0).abs() < 1e-9, "{with} {without}");
    }
}

/// Nothing is measured.
fn unknown() -> PromptRates {
    PromptRates {
        alone_per_s: 0.0,
        beside_token_s: None,
        chunks: ChunkFit::default(),
        overhead_tokens: 0.0,
    }
}

fn work(sequences: u32, kv_tokens: u64, prompt_tokens: u32) -> Work {
    Work {
        sequences: f64::from(sequences),
        kv_tokens: kv_tokens as f64,
        prompt_tokens: f64::from(prompt_tokens),
        prompt_squares: 0.0,
    }
}
