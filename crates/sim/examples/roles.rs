//! Compares topologies and whoever moves roles, on a load that changes: reads a scenario as JSON
//! from its input and prints a line of JSON for each run. `benchmarks/roles_follow.py` calls it.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tasuki_core::{CostConfig, Rates, Role};
use tasuki_flow::AdmissionConfig;
use tasuki_flow::roles::{Objectives, RolesConfig};
use tasuki_policy::{PolicyConfig, PolicyKind, Rule};
use tasuki_sim::steps::StepModel;
use tasuki_sim::{Config, Limits, Outcome, Request, Roles, Run, Thresholds, Time};
use tasuki_sim::{WorkerConfig, simulate};

#[derive(Debug, Deserialize)]
struct Scenario {
    rates: StepRates,
    kv_bytes_per_token: f64,
    num_blocks: u32,
    max_model_len: u32,
    ttft_s: f64,
    tpot_s: f64,
    seed: u64,
    phases: Vec<Phase>,
    /// When each is due, in seconds, its prompt and its output, in tokens: in place of random ones.
    #[serde(default)]
    requests: Vec<(f64, u32, u32)>,
    runs: Vec<Case>,
    /// The length of a part of the timeline.
    part_s: f64,
}

/// Coefficients, in seconds.
#[derive(Debug, Deserialize)]
struct StepRates {
    step: f64,
    sequence: f64,
    kv_token: f64,
    prompt_step: f64,
    prompt_token: f64,
    prompt_square: f64,
}

#[derive(Debug, Deserialize)]
struct Phase {
    seconds: f64,
    /// Requests a second.
    rate: f64,
    kinds: Vec<Kind>,
}

/// Lengths are uniform between the two ends.
#[derive(Debug, Deserialize)]
struct Kind {
    weight: f64,
    input: [u32; 2],
    output: [u32; 2],
}

#[derive(Debug, Deserialize)]
struct Case {
    name: String,
    prefill: u32,
    decode: u32,
    mixed: u32,
    strict: bool,
    /// cost, round-robin, or a number: shorter prompts are not split.
    policy: String,
    /// fixed, follow or thresholds.
    roles: String,
    timeline: bool,
}

#[derive(Debug, Serialize, Default, Clone)]
struct Part {
    at_s: f64,
    offered: f64,
    good: f64,
    prefill: u32,
    decode: u32,
    mixed: u32,
}

fn main() {
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .expect("a scenario is read");
    let scenario: Scenario = serde_json::from_str(&text).expect("a scenario");
    let requests = scenario.requests();
    for case in &scenario.runs {
        let run = simulate(scenario.config(case), &mut requests.clone().into_iter());
        println!("{}", scenario.told(case, &requests, &run));
    }
}

/// Numbers that leave no pattern (splitmix64's).
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn within(&mut self, [low, high]: [u32; 2]) -> u32 {
        low + (self.next() * f64::from(high - low + 1)) as u32
    }
}

impl Scenario {
    fn requests(&self) -> Vec<Request> {
        if !self.requests.is_empty() {
            let given = self.requests.iter().enumerate();
            let request = |(index, &(due_s, input, output))| {
                Request::new(index, Time::from_s(due_s), input, output)
            };
            return given.map(request).collect();
        }
        let mut draw = Draw(self.seed);
        let (mut from_s, mut requests) = (0.0, Vec::new());
        for phase in &self.phases {
            let mut due_s = from_s;
            from_s += phase.seconds;
            loop {
                due_s -= (1.0 - draw.next()).ln() / phase.rate;
                if due_s >= from_s {
                    break;
                }
                let all: f64 = phase.kinds.iter().map(|kind| kind.weight).sum();
                let mut at = draw.next() * all;
                let kind = phase.kinds.iter().find(|kind| {
                    at -= kind.weight;
                    at < 0.0
                });
                let kind = kind.unwrap_or(&phase.kinds[0]);
                let (input, output) = (draw.within(kind.input), draw.within(kind.output));
                requests.push(Request::new(
                    requests.len(),
                    Time::from_s(due_s),
                    input,
                    output,
                ));
            }
        }
        requests
    }

    fn config(&self, case: &Case) -> Config {
        let rates = &self.rates;
        let steps = Arc::new(StepModel::Rates(Rates {
            step_s: rates.step,
            sequence_s: rates.sequence,
            kv_token_s: rates.kv_token,
            prompt_step_s: rates.prompt_step,
            prompt_token_s: rates.prompt_token,
            prompt_square_s: rates.prompt_square,
        }));
        let mut workers = Vec::new();
        let hosts = (case.prefill + case.decode + case.mixed).div_ceil(8);
        for (role, count) in [
            (Role::Prefill, case.prefill),
            (Role::Decode, case.decode),
            (Role::Mixed, case.mixed),
        ] {
            workers.extend((0..count).map(|index| WorkerConfig {
                role,
                host: index % hosts,
                class: "gpu".into(),
                steps: Arc::clone(&steps),
                limits: Limits::gpu(self.num_blocks, self.max_model_len),
            }));
        }
        let threshold = case.policy.parse::<u32>().ok();
        let objectives = Objectives {
            ttft_s: Some(self.ttft_s),
            tpot_s: Some(self.tpot_s),
        };
        Config {
            workers,
            policy: PolicyConfig {
                kind: match case.policy.as_str() {
                    "round-robin" => PolicyKind::Simple(Rule::RoundRobin),
                    _ => PolicyKind::Cost,
                },
                strict_roles: case.strict,
                cost: CostConfig {
                    tpot_s: objectives.tpot_s,
                    ..CostConfig::default()
                },
                ..PolicyConfig::default()
            },
            prompt_threshold: threshold,
            admission: AdmissionConfig {
                ttft: Some(Duration::from_secs_f64(self.ttft_s)),
                tpot: Some(Duration::from_secs_f64(self.tpot_s)),
                ..AdmissionConfig::default()
            },
            roles: match case.roles.as_str() {
                "follow" => Roles::Follow(RolesConfig {
                    objectives,
                    ..RolesConfig::default()
                }),
                "thresholds" => Roles::Thresholds(Thresholds {
                    ttft_s: self.ttft_s,
                    itl_s: self.tpot_s,
                    low: 0.8,
                    every_s: 5.0,
                }),
                _ => Roles::Fixed,
            },
            kv_bytes_per_token: self.kv_bytes_per_token,
            message_s: 5e-4,
            handoff_s: 1e-3,
            warm_router: true,
            ..Config::default()
        }
    }

    fn is_good(&self, outcome: &Outcome) -> bool {
        outcome.failure.is_none()
            && outcome.ttft_s().is_some_and(|s| s <= self.ttft_s)
            && outcome.tpot_s().is_none_or(|s| s <= self.tpot_s)
    }

    fn told(&self, case: &Case, requests: &[Request], run: &Run) -> serde_json::Value {
        let mut from_s = 0.0;
        let mut phases = Vec::new();
        for phase in &self.phases {
            let to_s = from_s + phase.seconds;
            let due = run.outcomes.iter();
            let due = due.filter(|one| (from_s..to_s).contains(&one.due.as_s()));
            let due: Vec<&Outcome> = due.collect();
            let good = due.iter().filter(|one| self.is_good(one)).count();
            let mean = |each: &dyn Fn(&Outcome) -> Option<f64>| {
                let some: Vec<f64> = due.iter().filter_map(|one| each(one)).collect();
                some.iter().sum::<f64>() / some.len().max(1) as f64
            };
            phases.push(serde_json::json!({
                "requests": due.len(),
                "goodput": good as f64 / phase.seconds,
                "ttft_mean_s": mean(&Outcome::ttft_s),
                "tpot_mean_s": mean(&Outcome::tpot_s),
                "refused": due.iter().filter(|one| one.failure.is_some()).count(),
            }));
            from_s = to_s;
        }
        let good = run.outcomes.iter().filter(|one| self.is_good(one)).count();
        let retries: u32 = run.outcomes.iter().map(|one| one.retries).sum();
        let changes = run.role_changes.iter().map(|change| {
            serde_json::json!({
                "at_s": change.at.as_s(),
                "worker": change.worker,
                "from": change.from.as_str(),
                "to": change.to.as_str(),
                "reason": change.reason,
            })
        });
        serde_json::json!({
            "name": case.name,
            "requests": requests.len(),
            "ended": run.outcomes.len(),
            "failed": run.outcomes.iter().filter_map(|one| one.failure.clone()).next_back(),
            "goodput": good as f64 / from_s,
            "retries": retries,
            "phases": phases,
            "role_changes": run.role_changes.len(),
            "changes": if case.timeline { changes.collect() } else { Vec::new() },
            "timeline": if case.timeline { self.timeline(case, run, from_s) } else { Vec::new() },
        })
    }

    fn timeline(&self, case: &Case, run: &Run, seconds: f64) -> Vec<Part> {
        let parts = (seconds / self.part_s).ceil() as usize;
        let mut timeline = vec![Part::default(); parts];
        for outcome in &run.outcomes {
            let at = (outcome.due.as_s() / self.part_s) as usize;
            let part = &mut timeline[at.min(parts - 1)];
            part.offered += 1.0 / self.part_s;
            part.good += f64::from(u8::from(self.is_good(outcome))) / self.part_s;
        }
        let mut counts = [case.prefill, case.decode, case.mixed];
        let mut changes = run.role_changes.iter().peekable();
        for (index, part) in timeline.iter_mut().enumerate() {
            part.at_s = self.part_s * index as f64;
            let ends = part.at_s + self.part_s;
            while let Some(change) = changes.next_if(|change| change.at.as_s() < ends) {
                counts[change.from as usize] -= 1;
                counts[change.to as usize] += 1;
            }
            [part.prefill, part.decode, part.mixed] = counts;
        }
        timeline
    }
}
