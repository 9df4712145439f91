//! Designs in simulation: the highest rate that meets the objectives, and what binds there.

use serde::Serialize;
use tasuki_bench::arrivals::{Arrival, Process};
use tasuki_core::Role;
use tasuki_policy::PolicyConfig;
use tasuki_sim::{Clients, Config, Outcome, Run, WorkerConfig, simulate};

use super::design::Design;
use super::lengths::Conversations;
use super::per_s;
use super::planner::Planner;
use super::until_missed::UntilMissed;
use crate::clients::BenchClients;
use crate::error::SimulateError;
use crate::hardware::Hardware;
use crate::replay::{LogClients, is_met, most_missed};

/// The rate is found within this factor.
const PRECISION: f64 = 1.06;
const MOST_PROBES: u32 = 14;
/// The same of `--quick`.
const QUICK_PRECISION: f64 = 1.12;

/// Of a run whose requests meet the objectives as yet.
const QUEUE_GROWS: &str = "TTFT breaks first";

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
    /// What a higher rate misses, for the reader.
    #[serde(skip)]
    pub breaks: &'static str,
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
                let (run, failed) = self.judge(design, rate)?;
                let seen = self.seeing(&run, rate);
                probes.push(seen);
                let meets = !failed && seen.attainment >= self.attainment;
                if meets && !self.is_outgrown(&run) {
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
                    Some(seen) => seen.breaks,
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
                (0.0, seen, seen.breaks.to_owned())
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

    /// What requests see at a rate, which may be too high.
    pub fn see(&self, design: &Design, rate: f64) -> Result<Seeing, SimulateError> {
        let mut clients = self.clients(rate, self.requests_to_see(rate))?;
        let run = simulate(self.config(design)?, &mut *clients);
        Ok(self.seeing(&run, rate))
    }

    /// A run at a rate, and whether it ended early, as too many requests missed the objectives.
    pub(super) fn judge(&self, design: &Design, rate: f64) -> Result<(Run, bool), SimulateError> {
        let requests = self.requests(rate);
        let most_missed = (1.0 - self.attainment) * f64::from(requests);
        let clients = self.clients(rate, requests)?;
        let mut clients = UntilMissed::new(clients, self.limits, most_missed.ceil() as usize);
        let run = simulate(self.config(design)?, &mut clients);
        Ok((run, clients.has_failed()))
    }

    fn config(&self, design: &Design) -> Result<Config, SimulateError> {
        let mut workers = Vec::new();
        let mut network = None;
        let mut hosts = design.hosts(self.gpus_per_host).into_iter();
        for (part, role) in [
            (design.prefill, Role::Prefill),
            (design.decode, Role::Decode),
            (design.mixed, Role::Mixed),
        ] {
            for host in hosts.by_ref().take(part.workers as usize) {
                let hardware = self.hardware_of(part.tensor_parallel)?;
                network.get_or_insert((
                    hardware.network,
                    hardware.message_s,
                    hardware.kv_bytes_per_token,
                    hardware.handoff_s,
                ));
                workers.push(self.worker(hardware, role, design, host));
            }
        }
        let (network, message_s, kv_bytes_per_token, handoff_s) = network.unwrap_or_default();
        Ok(Config {
            workers,
            network,
            message_s,
            kv_bytes_per_token,
            handoff_s,
            prefix_index: true,
            warm_router: true,
            token_times: self.slo.itl_s.is_some(),
            policy: PolicyConfig {
                strict_roles: design.strict_roles,
                ..PolicyConfig::default()
            },
            ..Config::default()
        })
    }

    /// Requests at a rate: the log's, in its pattern, or else the workload's, independent ones.
    pub(super) fn clients(
        &self,
        rate: f64,
        requests: u32,
    ) -> Result<Box<dyn Clients + '_>, SimulateError> {
        if let Some(log) = &self.log {
            let speed = rate / log.rate_of(requests as usize);
            return Ok(Box::new(LogClients::new(log, requests as usize, speed)));
        }
        let arrival = Arrival {
            // Of conversations only the first turns arrive by themselves.
            process: Process::Poisson {
                rate: rate / self.conversations.turns,
            },
            max_concurrency: None,
            ramp_s: 0.0,
        };
        let over_s = f64::from(requests) / rate;
        let Conversations {
            turns,
            think_time_s,
        } = self.conversations;
        let thinks = turns > 1.0 && think_time_s > 0.0;
        let mut workload = self.workload.clone();
        // Of conversations that are under way there are fewer turns than they have.
        workload.num_requests = Some(if thinks { u32::MAX } else { requests });
        let workload = workload.plan_lengths()?.build()?;
        let seed = self.workload.seed;
        let first = (f64::from(requests) / turns) as u32;
        let until_s = thinks.then_some(over_s);
        let clients = BenchClients::new(workload, arrival, seed, until_s);
        let clients = clients.evenly(first, over_s, seed);
        Ok(Box::new(match thinks {
            true => clients.under_way(rate / turns, turns as u32, think_time_s, over_s),
            false => clients,
        }))
    }

    /// What the log is not, and why the expected rate is another one than that of its answers.
    pub fn notes(&self) -> Vec<String> {
        let Some(log) = &self.log else {
            return Vec::new();
        };
        let mut notes = log.notes.clone();
        match (log.rate(), log.arrival_rate()) {
            _ if self.goal.request_rate.is_some() => {}
            (Some(served), Some(all)) if all > served => notes.push(format!(
                "{} requests/s of the log were answered, {} came: the plan expects all",
                per_s(served),
                per_s(all),
            )),
            (Some(_), _) => {}
            (None, _) => notes.push(
                "all requests of the log came at one time, so it has no request rate; the plan \
                 expects 80% of the best design's rate: give --request-rate or a longer log"
                    .to_owned(),
            ),
        }
        notes
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
        let outcomes = self.counted(run);
        let of = |fits: &dyn Fn(&Outcome) -> bool| {
            let fitting = outcomes.iter().filter(|outcome| fits(outcome)).count();
            fitting as f64 / outcomes.len().max(1) as f64
        };
        let spread = |of: fn(&Outcome) -> Option<f64>| {
            let mut all: Vec<f64> = outcomes.iter().filter_map(|outcome| of(outcome)).collect();
            all.sort_by(f64::total_cmp);
            let at = |share: f64| all.get((share * (all.len() as f64 - 1.0)).round() as usize);
            [0.5, 0.95].map(|share| 1e3 * at(share).copied().unwrap_or(f64::NAN))
        };
        let (ttft, tpot) = (spread(Outcome::ttft_s), spread(Outcome::tpot_s));
        let attainment = of(&|outcome| is_met(outcome, &self.slo));
        Seeing {
            rate,
            goodput: rate * attainment,
            attainment,
            ttft_p50_ms: ttft[0],
            ttft_p95_ms: ttft[1],
            tpot_p50_ms: tpot[0],
            tpot_p95_ms: tpot[1],
            split: of(&Outcome::is_split),
            breaks: most_missed(&outcomes, &self.slo).unwrap_or(QUEUE_GROWS),
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

#[cfg(test)]
mod tests {
    use clap::Parser;
    use tasuki_sim::{Request, Time};

    use super::*;
    use crate::plan::args::PlanArgs;

    #[test]
    fn what_is_seen_is_that_of_the_second_half() {
        let words = "plan --slo ttft=1s,tpot=30ms --gpus 2 --lengths 100:11 --rates \
                     step-ms=6,sequence-us=20,kv-token-ns=30,prompt-step-ms=6,prompt-token-us=20,\
                     prompt-square-ns=0.2";
        let args = PlanArgs::try_parse_from(words.split_whitespace()).unwrap();
        let planner = Planner::new(&args).unwrap();
        // One each second: of the last fifty the first token comes after 30 ms, 60 ms and so on.
        let outcomes = (0..100).map(|index| {
            let due = Time::from_s(index as f64);
            let first = due.plus_s(0.03 * (index as f64 - 49.0).max(1.0));
            Outcome {
                first: Some(first),
                end: first.plus_s(0.1),
                output_tokens: 11,
                prefill: 0,
                decode: u32::from(index % 2 == 0),
                ..Outcome::new(&Request::new(index, due, 100, 11), due)
            }
        });
        let run = Run {
            outcomes: outcomes.collect(),
            ..Run::default()
        };
        let seen = planner.seeing(&run, 2.0);
        let close = |seen: f64, wanted: f64| (seen - wanted).abs() < 1e-3;
        assert!(close(seen.attainment, 0.66) && close(seen.goodput, 1.32));
        assert!(close(seen.ttft_p50_ms, 780.0) && close(seen.ttft_p95_ms, 1_440.0));
        assert!(close(seen.tpot_p50_ms, 10.0) && close(seen.split, 0.5));
        assert_eq!(seen.breaks, "TTFT breaks first");
    }
}
