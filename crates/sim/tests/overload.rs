//! Overload of two mixed workers with a TPOT objective. Some answers have more prompts between their
//! tokens than others.

use std::sync::Arc;
use std::time::Duration;

use tasuki_core::{Rates, Role};
use tasuki_flow::AdmissionConfig;
use tasuki_sim::steps::StepModel;
use tasuki_sim::{Config, Limits, Outcome, Request, Time, WorkerConfig, simulate};

const TPOT_S: f64 = 0.008;
const SECONDS: f64 = 60.0;
const RATE: f64 = 42.0;
const LENGTHS: (f64, f64) = (5.0, 1_020.0);

/// Steps 1.2 times as long as an H200's with Qwen3-4B's shape, roughly.
fn config() -> Config {
    let steps = Arc::new(StepModel::Rates(Rates {
        step_s: 3.2e-3,
        sequence_s: 1.7e-5,
        kv_token_s: 3.6e-8,
        prompt_step_s: 3.2e-3,
        prompt_token_s: 1.4e-5,
        prompt_square_s: 5.6e-10,
    }));
    let worker = WorkerConfig {
        role: Role::Mixed,
        host: 0,
        class: "gpu".into(),
        steps,
        limits: Limits::gpu(25_000, 16_384),
    };
    Config {
        workers: vec![worker; 2],
        admission: AdmissionConfig {
            ttft: Some(Duration::from_secs(2)),
            tpot: Some(Duration::from_secs_f64(TPOT_S)),
            ..AdmissionConfig::default()
        },
        warm_router: true,
        ..Config::default()
    }
}

/// Poisson arrivals; prompts and answers of uniform lengths.
fn load(seed: u64) -> Vec<Request> {
    let mut state = seed;
    let mut draw = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state ^ (state >> 29)) >> 11) as f64 / (1u64 << 53) as f64
    };
    let (mut at, mut requests) = (0.0, Vec::new());
    while at < SECONDS {
        at -= (1.0 - draw()).ln() / RATE;
        let mut length = || (LENGTHS.0 + (LENGTHS.1 - LENGTHS.0) * draw()) as u32;
        let (prompt, output) = (length(), length());
        let index = requests.len();
        requests.push(Request::new(index, Time::from_s(at), prompt, output));
    }
    requests
}

#[test]
fn admitted_requests_meet_the_tpot_objective() {
    let (mut all_slow, mut all_served) = (0, 0);
    for seed in 1..=6 {
        let run = simulate(config(), &mut load(seed).into_iter());
        let served = || run.outcomes.iter().filter(|one| one.failure.is_none());
        let slow = |one: &&Outcome| one.tpot_s().is_some_and(|tpot_s| tpot_s > TPOT_S);
        let (slow, all) = (served().filter(slow).count(), served().count());
        assert!(all < run.outcomes.len(), "it is no overload");
        assert!(slow * 10 <= all, "{slow} of {all}");
        assert!(all as f64 > 0.75 * RATE * SECONDS, "{all} are served");
        all_slow += slow;
        all_served += all;
    }
    assert!(all_slow * 25 <= all_served, "{all_slow} of {all_served}");
}
