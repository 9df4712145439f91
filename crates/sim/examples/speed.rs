//! Times the simulator: `speed WORKERS REQUESTS RATE PREFILL [TRACE]`, a line of JSON.
//!
//! Requests of 512:128 tokens, Poisson at RATE a second, before WORKERS workers of which PREFILL
//! only prefill and as many only decode as are left; 0: all mixed. With TRACE, in Mooncake's
//! format, its requests with their hashes instead; RATE is its speed-up then.

use std::sync::Arc;

use tasuki_core::{Rates, Role, mix};
use tasuki_sim::steps::StepModel;
use tasuki_sim::{Config, Limits, Request, Run, Time, WorkerConfig, simulate};

/// In the proportions of an 8 B model on an H100.
const RATES: Rates = Rates {
    step_s: 5.5e-3,
    sequence_s: 2e-5,
    kv_token_s: 4.5e-8,
    prompt_step_s: 5.5e-3,
    prompt_token_s: 2.2e-5,
    prompt_square_s: 3e-10,
};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| words.get(at).and_then(|word| word.parse::<f64>().ok());
    let [workers, requests, rate, prefill] = [0, 1, 2, 3].map(|at| {
        number(at).unwrap_or_else(|| panic!("usage: speed WORKERS REQUESTS RATE PREFILL [TRACE]"))
    });
    let (workers, prefill) = (workers as u32, prefill as u32);
    let trace = words.get(4).map(|path| read(path, rate));
    let config = Config {
        workers: (0..workers)
            .map(|index| worker(index, prefill, trace.is_some()))
            .collect(),
        policy: tasuki_policy::PolicyConfig {
            strict_roles: prefill > 0,
            ..tasuki_policy::PolicyConfig::default()
        },
        kv_bytes_per_token: 131_072.0,
        message_s: 3e-4,
        handoff_s: 1e-3,
        prefix_index: trace.is_some(),
        ..Config::default()
    };
    let began_s = cpu_s();
    let run = match trace {
        Some(trace) => simulate(config, &mut trace.into_iter()),
        None => simulate(config, &mut poisson(requests as usize, rate)),
    };
    say(&run, cpu_s() - began_s);
}

fn worker(index: u32, prefill: u32, long: bool) -> WorkerConfig {
    let role = match prefill {
        0 => Role::Mixed,
        _ if index < prefill => Role::Prefill,
        _ => Role::Decode,
    };
    WorkerConfig {
        role,
        host: index / 8,
        class: "gpu".into(),
        steps: Arc::new(StepModel::Rates(RATES)),
        limits: if long {
            Limits::gpu(24_000, 160_000)
        } else {
            Limits::gpu(12_000, 8_192)
        },
    }
}

/// This thread's own time: others on the machine do not count.
fn cpu_s() -> f64 {
    let told = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    let ns = told
        .split_whitespace()
        .next()
        .and_then(|word| word.parse::<f64>().ok());
    ns.map_or(f64::NAN, |ns| ns / 1e9)
}

fn poisson(requests: usize, rate: f64) -> impl Iterator<Item = Request> {
    let mut due_s = 0.0;
    (0..requests).map(move |index| {
        let uniform = (mix(index as u64) >> 11) as f64 / (1u64 << 53) as f64;
        due_s -= (1.0 - uniform).ln() / rate;
        Request::new(index, Time::from_s(due_s), 512, 128)
    })
}

/// The trace, so many times faster. A chunk is a quarter of a block of 512 tokens.
fn read(path: &str, speed_up: f64) -> Vec<Request> {
    let text = std::fs::read_to_string(path).expect("the trace can be read");
    let field = |line: &str, name: &str| {
        let rest = line
            .split_once(&format!("\"{name}\":"))
            .expect("the field is there")
            .1;
        let rest = rest.trim_start().trim_start_matches('[');
        let end = rest.find([']', '}']).unwrap_or(rest.len());
        rest[..end].to_owned()
    };
    let first = |text: String| -> f64 {
        let number = text.split(',').next().unwrap_or_default().trim();
        number.parse().expect("a number")
    };
    let requests = text.lines().enumerate().map(|(index, line)| {
        let at_s = first(field(line, "timestamp")) / 1e3 / speed_up;
        let tokens = first(field(line, "input_length")) as u32;
        let output = (first(field(line, "output_length")) as u32).max(1);
        let mut chunks = Vec::new();
        for hash in field(line, "hash_ids").split(',') {
            let hash: u64 = hash.trim().parse().expect("a hash");
            chunks.extend((0..4).map(|part| mix(4 * hash + part)));
        }
        chunks.truncate((tokens / 128) as usize);
        Request {
            chunks: chunks.into(),
            ..Request::new(index, Time::from_s(at_s), tokens, output)
        }
    });
    requests.collect()
}

fn say(run: &Run, cpu_s: f64) {
    let done = run
        .outcomes
        .iter()
        .filter(|outcome| outcome.failure.is_none());
    let mut ttft_s: Vec<f64> = done
        .clone()
        .filter_map(tasuki_sim::Outcome::ttft_s)
        .collect();
    ttft_s.sort_by(f64::total_cmp);
    let at = |share: f64| ttft_s.get((share * ttft_s.len() as f64) as usize).copied();
    let tpot_s: Vec<f64> = done.filter_map(tasuki_sim::Outcome::tpot_s).collect();
    let steps: u64 = run.workers.iter().map(|worker| worker.steps).sum();
    let cached: u64 = run.workers.iter().map(|worker| worker.cached_tokens).sum();
    let split = run
        .outcomes
        .iter()
        .filter(|outcome| outcome.is_split())
        .count();
    println!(
        "{{\"requests\": {}, \"completed\": {}, \"cpu_s\": {cpu_s:.4}, \"requests_per_s\": {:.0}, \
         \"events\": {}, \"steps\": {steps}, \"simulated_s\": {:.2}, \"split\": {split}, \
         \"cached_tokens\": {cached}, \"ttft_p50_ms\": {:.2}, \"ttft_p95_ms\": {:.2}, \
         \"tpot_mean_ms\": {:.3}}}",
        run.outcomes.len(),
        ttft_s.len(),
        run.outcomes.len() as f64 / cpu_s,
        run.events,
        run.ended.as_s(),
        1e3 * at(0.5).unwrap_or(f64::NAN),
        1e3 * at(0.95).unwrap_or(f64::NAN),
        1e3 * tpot_s.iter().sum::<f64>() / tpot_s.len().max(1) as f64,
    );
}
