//! Designs in simulation: the highest rate that meets the objectives, and what binds there.

use serde::Serialize;
use tasuki_bench::arrivals::{Arrival, Process};
use tasuki_core::Role;
use tasuki_policy::PolicyConfig;
use tasuki_sim::{Clients, Config, Outcome, Run, WorkerConfig, simulate};

use super::design::Design;
use super::planner::Planner;
use crate::clients::BenchClients;
use crate::error::SimulateError;
use crate::hardware::Hardware;
use crate::replay::{LogClients, is_met};

/// The rate is found within this factor.
const PRECISION: f64 = 1.06;
const MOST_PROBES: u32 = 14;
/// A run takes so many times the TTFT objective, and so many times the longest request that meets
/// the objectives, if that is not too many requests.
const RUN_OF_TTFT: f64 = 20.0;
const RUN_OF_E2E: f64 = 3.0;
const MOST_TIMES: u32 = 20;
/// A run that takes less than this share of the longest request says nothing: all requests could
/// be served together within the objectives, at whatever rate they come.
const LEAST_OF_E2E: f64 = 0.8;
/// Of `--quick`: how long a run takes, its requests, and the factor of rates.
const QUICK_RUN_OF_E2E: f64 = 1.0;
const QUICK_REQUESTS: (u32, u32) = (200, 1_500);
const QUICK_PRECISION: f64 = 1.12;

/// What requests saw at one rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Seeing {
    pub rate: f64,
    pub goodput: f64,
    pub attainment: f64,
    pub ttft_p50_ms: f64,
    pub ttft_p95_ms: f64,
    pub tpot_p50_ms: f64,
    pub tpot_p95_ms: f64,
    /// Of requests, that were split.
    pub split: f64,
}

/// A design that was simulated.
#[derive(Debug, Clone, Serialize)]
pub struct Found {
    pub name: String,
    pub design: Design,
    pub estimated_rate: f64,
    /// The highest that meets the objectives; 0: none does.
    pub rate: f64,
    /// Higher rates were not tried, as runs would have been too short.
    pub at_least: bool,
    pub at: Seeing,
    pub binds: String,
    /// Of a million output tokens at that rate, if prices are known.
    pub cost_per_million_tokens: Option<f64>,
    /// Every rate that was tried.
    pub probes: Vec<Seeing>,
}

impl Planner<'_> {
    /// The rate is found within this factor.
    pub fn precision(&self) -> f64 {
        match self.goal.quick {
            true => QUICK_PRECISION,
            false => PRECISION,
        }
    }

    /// Simulates a design at rising rates.
    pub fn probe(&self, design: &Design, estimated: f64) -> Result<Found, SimulateError> {
        let start = self.long_enough(estimated.max(0.01));
        let precision = self.precision();
        let mut good: Option<(Seeing, Run)> = None;
        let mut bad: Option<(f64, Option<Seeing>)> = None;
        let (mut rate, mut probes) = (start, Vec::new());
        for _ in 0..MOST_PROBES {
            if self.is_too_short(rate) {
                bad = Some((rate, None));
            } else {
                let run = self.run(design, rate)?;
                let seen = self.seeing(&run, rate);
                probes.push(seen);
                if seen.attainment >= self.attainment {
                    good = Some((seen, run));
                } else {
                    bad = Some((rate, Some(seen)));
                }
            }
            rate = match (&good, &bad) {
                (Some((low, _)), Some((high, _))) if high / low.rate <= precision => break,
                (Some((low, _)), Some((high, _))) => (low.rate * high).sqrt(),
                (Some((low, _)), None) => low.rate * 1.5,
                (None, Some((high, _))) if *high < start / 200.0 => break,
                (None, _) => rate / 1.8,
            };
        }
        let name = design.name();
        let at_least = good.is_some() && matches!(bad, Some((_, None)));
        let (rate, at, binds) = match (good, bad) {
            (Some((seen, run)), bad) => {
                let breaks = bad.map(|(rate, seen)| match seen {
                    Some(seen) => self.broken(&seen),
                    None => self.lengthen(rate),
                });
                (seen.rate, seen, self.binds(design, &run, breaks))
            }
            (None, bad) => {
                let tried = bad.map_or(start, |(rate, _)| rate);
                let seen = match bad.and_then(|(_, seen)| seen) {
                    Some(seen) => seen,
                    None => self.see(design, tried)?,
                };
                (0.0, seen, self.broken(&seen).to_owned())
            }
        };
        probes.sort_by(|a, b| a.rate.total_cmp(&b.rate));
        Ok(Found {
            name,
            design: *design,
            estimated_rate: estimated,
            rate,
            at_least,
            at,
            binds,
            cost_per_million_tokens: self.cost(design, rate),
            probes,
        })
    }

    /// Of a million output tokens at a rate.
    pub fn cost(&self, design: &Design, rate: f64) -> Option<f64> {
        let per_hour = self.goal.price.as_ref()?.per_hour * f64::from(design.gpus());
        let tokens_per_hour = 3_600.0 * rate * self.lengths.output;
        (rate > 0.0).then(|| 1e6 * per_hour / tokens_per_hour)
    }

    /// What requests see at a rate.
    pub fn see(&self, design: &Design, rate: f64) -> Result<Seeing, SimulateError> {
        Ok(self.seeing(&self.run(design, rate)?, rate))
    }

    fn run(&self, design: &Design, rate: f64) -> Result<Run, SimulateError> {
        let mut clients = self.clients(rate)?;
        let mut workers = Vec::new();
        let mut network = None;
        let mut gpus = 0;
        for (part, role) in [
            (design.prefill, Role::Prefill),
            (design.decode, Role::Decode),
            (design.mixed, Role::Mixed),
        ] {
            for _ in 0..part.workers {
                let hardware = self.hardware_of(part.tensor_parallel)?;
                network.get_or_insert((
                    hardware.network,
                    hardware.message_s,
                    hardware.kv_bytes_per_token,
                    hardware.handoff_s,
                ));
                workers.push(self.worker(hardware, role, design, gpus / self.gpus_per_host));
                gpus += part.tensor_parallel;
            }
        }
        let (network, message_s, kv_bytes_per_token, handoff_s) = network.unwrap_or_default();
        let config = Config {
            workers,
            network,
            message_s,
            kv_bytes_per_token,
            handoff_s,
            prefix_index: true,
            warm_router: true,
            policy: PolicyConfig {
                strict_roles: design.strict_roles,
                ..PolicyConfig::default()
            },
            ..Config::default()
        };
        Ok(simulate(config, &mut *clients))
    }

    /// Requests at a rate: the log's, in its pattern, or else the workload's, independent ones.
    fn clients(&self, rate: f64) -> Result<Box<dyn Clients + '_>, SimulateError> {
        let requests = self.requests(rate);
        if let Some(log) = &self.log {
            let speed = rate / log.replay_rate();
            return Ok(Box::new(LogClients::new(log, requests as usize, speed)));
        }
        let arrival = Arrival {
            process: Process::Poisson { rate },
            max_concurrency: None,
            ramp_s: 0.0,
        };
        let mut workload = self.workload.clone();
        workload.num_requests = Some(requests);
        let workload = workload.plan_lengths()?.build()?;
        let seed = self.workload.seed;
        Ok(Box::new(BenchClients::new(workload, arrival, seed, None)))
    }

    /// Requests of a run: as many as were asked for or are enough, and no more than the file has.
    fn requests(&self, rate: f64) -> u32 {
        let wanted = self.workload.num_requests;
        let wanted = wanted.unwrap_or_else(|| self.enough_requests(rate));
        wanted.min(self.file_requests.unwrap_or(u32::MAX))
    }

    /// So many that a queue that grows is seen: it would break the objective within the run.
    fn enough_requests(&self, rate: f64) -> u32 {
        let (ttft_s, e2e_s) = self.longest_s();
        let (run_s, (least, most)) = if self.goal.quick {
            (QUICK_RUN_OF_E2E * e2e_s, QUICK_REQUESTS)
        } else {
            let least = self.goal.probe_requests;
            let run_s = (RUN_OF_TTFT * ttft_s).max(RUN_OF_E2E * e2e_s);
            (run_s, (least, MOST_TIMES * least))
        };
        ((rate * run_s) as u32).clamp(least, most)
    }

    fn is_too_short(&self, rate: f64) -> bool {
        f64::from(self.requests(rate)) < LEAST_OF_E2E * rate * self.longest_s().1
    }

    /// The rate, or the highest one at which as many requests as there are take long enough.
    fn long_enough(&self, rate: f64) -> f64 {
        let limits = [self.workload.num_requests, self.file_requests];
        match limits.into_iter().flatten().min() {
            Some(most) => rate.min(0.99 * f64::from(most) / (LEAST_OF_E2E * self.longest_s().1)),
            None => rate,
        }
    }

    /// Why the expected rate is not that of the log.
    pub fn rate_note(&self) -> Option<&'static str> {
        let untold = self.log.as_ref().is_some_and(|log| log.rate().is_none());
        (untold && self.goal.request_rate.is_none()).then_some(
            "all requests of the log came at one time, so it has no request rate; the plan \
             expects 80% of the best design's rate: give --request-rate or a longer log",
        )
    }

    /// What makes a run of this rate longer.
    fn lengthen(&self, rate: f64) -> &'static str {
        match (self.workload.num_requests, self.file_requests) {
            (_, Some(most)) if self.requests(rate) == most => {
                "higher rates need longer runs: give a trace with more requests"
            }
            (Some(_), _) => "higher rates need longer runs: raise --num-requests",
            (None, _) => "higher rates need longer runs: raise --probe-requests",
        }
    }

    /// Seconds to the first and to the last token of a request that just meets the objectives: those
    /// of the question, so that runs of variations are as long.
    fn longest_s(&self) -> (f64, f64) {
        let ttft_s = self.goal.slo.ttft_s.unwrap_or(self.limits.ttft_s);
        let tpot_s = self.goal.slo.tpot_s.unwrap_or(self.limits.tpot_s);
        (ttft_s, ttft_s + tpot_s * self.lengths.output)
    }

    fn worker(&self, hardware: &Hardware, role: Role, design: &Design, host: u32) -> WorkerConfig {
        let mut limits = hardware.limits;
        limits.max_batched_tokens = design.step_tokens(role);
        limits.itl_target_s = Some(self.step_target_s()).filter(|target_s| *target_s > 0.0);
        WorkerConfig {
            role,
            host,
            class: hardware.name.as_str().into(),
            steps: std::sync::Arc::clone(&hardware.steps),
            limits,
        }
    }

    fn seeing(&self, run: &Run, rate: f64) -> Seeing {
        let met = |outcome: &&Outcome| is_met(outcome, &self.slo);
        let met = run.outcomes.iter().filter(met).count() as f64;
        let count = run.outcomes.len().max(1) as f64;
        let spread = |of: fn(&Outcome) -> Option<f64>| {
            let mut all: Vec<f64> = run.outcomes.iter().filter_map(of).collect();
            all.sort_by(f64::total_cmp);
            let at = |share: f64| all.get((share * (all.len() as f64 - 1.0)).round() as usize);
            [0.5, 0.95].map(|share| 1e3 * at(share).copied().unwrap_or(f64::NAN))
        };
        let (ttft, tpot) = (spread(Outcome::ttft_s), spread(Outcome::tpot_s));
        let split = run
            .outcomes
            .iter()
            .filter(|outcome| outcome.is_split())
            .count() as f64;
        Seeing {
            rate,
            goodput: rate * met / count,
            attainment: met / count,
            ttft_p50_ms: ttft[0],
            ttft_p95_ms: ttft[1],
            tpot_p50_ms: tpot[0],
            tpot_p95_ms: tpot[1],
            split: split / count,
        }
    }

    /// The objective that fails.
    fn broken(&self, seen: &Seeing) -> &'static str {
        let ttft = seen.ttft_p95_ms / (1e3 * self.limits.ttft_s);
        let tpot = seen.tpot_p95_ms / (1e3 * self.limits.tpot_s);
        if ttft > tpot {
            "TTFT breaks first"
        } else {
            "TPOT breaks first"
        }
    }

    /// What is used up at the highest rate.
    fn binds(&self, design: &Design, run: &Run, breaks: Option<&'static str>) -> String {
        let over_s = run.ended.as_s().max(1e-9);
        let mut from = 0;
        let mut told = Vec::new();
        let mut most = (0.0, "");
        for (part, role) in [
            (design.prefill, "prefill"),
            (design.decode, "decode"),
            (design.mixed, "mixed"),
        ] {
            let workers = &run.workers[from..from + part.workers as usize];
            from += part.workers as usize;
            let Some(count) = Some(workers.len() as f64).filter(|count| *count > 0.0) else {
                continue;
            };
            let busy = workers.iter().map(|w| w.busy_s).sum::<f64>() / count / over_s;
            let prompts = workers.iter().map(|w| w.prompt_steps_s).sum::<f64>() / count / over_s;
            let blocks = self
                .hardware_of(part.tensor_parallel)
                .map_or(1, |h| h.limits.num_blocks);
            let peak = workers.iter().map(|w| w.peak_blocks).max().unwrap_or(0);
            let full = f64::from(peak) / f64::from(blocks.max(1));
            told.push(format!(
                "{role} busy {:.0}%, KV {:.0}%",
                100.0 * busy,
                100.0 * full
            ));
            let what = if prompts > busy / 2.0 {
                "compute (prompts)"
            } else {
                "memory bandwidth (decode)"
            };
            for (share, what) in [(busy, what), (full, "KV memory")] {
                if share > most.0 {
                    most = (share, what);
                }
            }
        }
        if let Ok(hardware) = self.hardware_of(design.mixed.tensor_parallel.max(1))
            && run.moved_bytes > 0.0
        {
            let senders = f64::from(design.prefill.workers + design.mixed.workers);
            let way = hardware.network.within_host.bytes_per_s * senders * over_s;
            let share = run.moved_bytes / way;
            told.push(format!("links {:.0}%", 100.0 * share));
            if share > most.0 {
                most = (share, "link");
            }
        }
        let breaks = breaks.map_or(String::new(), |breaks| format!("; {breaks}"));
        format!("{}{breaks} ({})", most.1, told.join("; "))
    }
}
