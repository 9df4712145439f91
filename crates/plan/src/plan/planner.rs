//! The search: an estimate of every design, a simulation of the best, the rest of the answer.

use std::collections::BTreeMap;

use serde::Serialize;
use tasuki_bench::args::{WorkloadArgs, WorkloadKind};
use tasuki_bench::slo::Slo;
use tasuki_core::Role;
use tasuki_reqlog::Record;

use super::args::{GoalArgs, PlanArgs};
use super::design::{Design, all};
use super::probe::{Found, PRECISION, Seeing};
use super::screen::{Lengths, Limits, estimate};
use crate::args::HardwareArgs;
use crate::error::SimulateError;
use crate::hardware::Hardware;
use crate::replay::Logged;

/// Of the file.
const SCHEMA: &str = "tasuki.plan/1";
/// Step sizes that are tried for the best designs.
const STEP_TOKENS: [u32; 3] = [1_024, 2_048, 8_192];
/// Designs whose step sizes are varied.
const REFINED: usize = 2;
/// Requests whose lengths are looked at first.
const LOOKED_AT: usize = 1_000;

/// See the module.
pub struct Planner<'a> {
    pub goal: &'a GoalArgs,
    pub workload: WorkloadArgs,
    pub slo: Slo,
    pub limits: Limits,
    pub attainment: f64,
    pub gpus_per_host: u32,
    /// By degree of tensor parallelism.
    hardware: BTreeMap<u32, Hardware>,
    pub lengths: Lengths,
    /// In place of the workload.
    pub log: Option<Logged>,
}

/// The answer.
#[derive(Debug, Serialize)]
pub struct Plan {
    pub schema: &'static str,
    pub slo: Slo,
    pub steps: String,
    pub designs: usize,
    /// The best first.
    pub simulated: Vec<Found>,
    pub best: Found,
    pub best_colocated: Option<Found>,
    pub command: String,
    /// At the rate that is expected.
    pub expected: Seeing,
    pub expected_colocated: Option<Seeing>,
    /// Of a million output tokens, at the rate that is expected.
    pub expected_cost_per_million_tokens: Option<f64>,
    /// What is left of the best without one of its workers.
    pub losses: Vec<Loss>,
    pub variations: Vec<Variation>,
}

/// The best design without one of its workers.
#[derive(Debug, Serialize)]
pub struct Loss {
    pub role: &'static str,
    /// The highest that meets the objectives; 0: none does, or nobody can serve.
    pub rate: f64,
    /// At the rate that is expected; `None`: nobody can serve.
    pub expected: Option<Seeing>,
}

/// Another question, and its answer.
#[derive(Debug, Serialize)]
pub struct Variation {
    pub what: String,
    pub best: String,
    pub rate: f64,
    pub changes: bool,
}

impl<'a> Planner<'a> {
    /// # Errors
    ///
    /// An objective is missing, or nothing says how long steps take.
    pub fn new(args: &'a PlanArgs) -> Result<Self, SimulateError> {
        let goal = &args.goal;
        let (Some(ttft_s), Some(tpot_s)) = (goal.slo.ttft_s, goal.slo.tpot_s) else {
            return Err(SimulateError::Objectives);
        };
        let workload = args.workload.clone();
        match workload.workload {
            WorkloadKind::Prompts => return Err(SimulateError::Content("prompts")),
            WorkloadKind::DecodeOnly => return Err(SimulateError::Content("decode-only")),
            _ => {}
        }
        let log = goal.from.as_deref().map(Logged::read).transpose()?;
        let lengths = match &log {
            Some(log) => logged_lengths(log),
            None => mean_lengths(&workload)?,
        };
        let hardware = by_degree(&args.hardware, goal, log.as_ref())?;
        if let (Some(price), Some(known)) = (&goal.price, hardware.values().next()) {
            let (kind, name) = (price.kind.to_lowercase(), known.name.to_lowercase());
            if !name.contains(&kind) {
                return Err(SimulateError::Price {
                    given: price.kind.clone(),
                    known: known.name.clone(),
                });
            }
        }
        Ok(Self {
            goal,
            workload,
            slo: goal.slo,
            limits: Limits { ttft_s, tpot_s },
            attainment: goal.attainment,
            gpus_per_host: goal.gpus_per_host,
            hardware,
            lengths,
            log,
        })
    }

    pub fn hardware_of(&self, tensor_parallel: u32) -> Result<&Hardware, SimulateError> {
        let known = self.hardware.get(&tensor_parallel.max(1));
        known
            .or_else(|| self.hardware.values().next())
            .ok_or(SimulateError::NoSteps)
    }

    /// # Errors
    ///
    /// A workload that cannot be read.
    pub fn plan(&mut self) -> Result<Plan, SimulateError> {
        let (mut simulated, designs) = self.search()?;
        simulated.sort_by(|a, b| b.rate.total_cmp(&a.rate));
        let best = simplest(&simulated).ok_or(SimulateError::NoSteps)?;
        let colocated = |found: &&Found| found.design.is_colocated();
        let best_colocated = simulated.iter().find(colocated).cloned();
        let logged = self.log.as_ref().map(Logged::rate);
        let rate = self.goal.request_rate.or(logged);
        let rate = rate.unwrap_or(0.8 * best.rate);
        let expected = self.see(&best.design, rate)?;
        let expected_colocated = match &best_colocated {
            Some(found) => Some(self.see(&found.design, rate)?),
            None => None,
        };
        let steps = self.hardware_of(1)?.source.clone();
        let losses = if self.goal.no_variations {
            Vec::new()
        } else {
            self.losses(&best, rate)?
        };
        let variations = if self.goal.no_variations {
            Vec::new()
        } else {
            self.variations(&best)?
        };
        Ok(Plan {
            schema: SCHEMA,
            slo: self.goal.slo,
            expected_cost_per_million_tokens: self.cost(&best.design, rate),
            losses,
            steps,
            designs,
            command: best.design.command(),
            simulated,
            best,
            best_colocated,
            expected,
            expected_colocated,
            variations,
        })
    }

    /// The designs that were simulated, and how many were looked at.
    fn search(&self) -> Result<(Vec<Found>, usize), SimulateError> {
        let degrees: Vec<u32> = self.hardware.keys().copied().collect();
        let default = self.hardware_of(1)?.limits.max_batched_tokens;
        let designs = all(self.goal.gpus, &degrees, default, self.goal.strict_roles);
        let hardware = |degree: u32| self.hardware.get(&degree).cloned();
        let estimated = |design: &Design| estimate(design, &hardware, self.lengths, self.limits);
        let mut ranked: Vec<(f64, Design)> = designs.iter().map(|d| (estimated(d), *d)).collect();
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
        let most = self.goal.designs as usize;
        let mut chosen: Vec<(f64, Design)> = ranked.iter().take(most).copied().collect();
        if !chosen.iter().any(|(_, design)| design.is_colocated()) {
            chosen.extend(ranked.iter().find(|(_, design)| design.is_colocated()));
        }
        let mut found = Vec::new();
        for (estimated, design) in &chosen {
            found.push(self.probe(design, *estimated)?);
        }
        found.sort_by(|a, b| b.rate.total_cmp(&a.rate));
        let mut refined: Vec<Found> = found.iter().take(REFINED).cloned().collect();
        refined.extend(found.iter().find(|f| f.design.is_colocated()).cloned());
        for base in refined {
            for max_batched_tokens in STEP_TOKENS.into_iter().filter(|size| *size != default) {
                let design = Design {
                    max_batched_tokens,
                    ..base.design
                };
                if !found.iter().any(|known| known.design == design) {
                    let start = base.rate.max(base.estimated_rate / 4.0);
                    let refined = self.probe(&design, start)?;
                    found.push(Found {
                        estimated_rate: base.estimated_rate,
                        ..refined
                    });
                }
            }
        }
        Ok((found, designs.len()))
    }

    /// What one lost worker costs.
    fn losses(&self, best: &Found, rate: f64) -> Result<Vec<Loss>, SimulateError> {
        let mut losses = Vec::new();
        for role in [Role::Prefill, Role::Decode, Role::Mixed] {
            if best.design.count(role) == 0 {
                continue;
            }
            let (rate, expected) = match best.design.without(role) {
                Some(left) => {
                    let found = self.probe(&left, 0.7 * best.rate)?;
                    (found.rate, Some(self.see(&left, rate)?))
                }
                None => (0.0, None),
            };
            losses.push(Loss {
                role: role.as_str(),
                rate,
                expected,
            });
        }
        Ok(losses)
    }

    /// What would change the answer.
    fn variations(&mut self, best: &Found) -> Result<Vec<Variation>, SimulateError> {
        let mut told = Vec::new();
        let (limits, slo) = (self.limits, self.slo);
        self.limits.tpot_s /= 2.0;
        self.slo.tpot_s = Some(self.limits.tpot_s);
        told.push(self.variation("TPOT objective halved", best)?);
        (self.limits, self.slo) = (limits, slo);
        self.limits.ttft_s /= 2.0;
        self.slo.ttft_s = Some(self.limits.ttft_s);
        told.push(self.variation("TTFT objective halved", best)?);
        (self.limits, self.slo) = (limits, slo);
        let hardware = self.hardware.clone();
        for known in self.hardware.values_mut() {
            known.network.within_host.bytes_per_s /= 10.0;
            known.network.between_hosts.bytes_per_s /= 10.0;
        }
        told.push(self.variation("links a tenth as fast", best)?);
        self.hardware = hardware;
        Ok(told)
    }

    fn variation(&self, what: &str, best: &Found) -> Result<Variation, SimulateError> {
        let (mut found, _) = self.search()?;
        found.sort_by(|a, b| b.rate.total_cmp(&a.rate));
        let first = found.first().ok_or(SimulateError::NoSteps)?;
        let same = |f: &&Found| f.name == best.name;
        // Within the precision of the search the answer is the same.
        let kept = found
            .iter()
            .find(same)
            .is_some_and(|kept| kept.rate >= 0.95 * first.rate);
        Ok(Variation {
            what: what.to_owned(),
            best: if kept {
                best.name.clone()
            } else {
                first.name.clone()
            },
            rate: first.rate,
            changes: !kept,
        })
    }
}

/// Of the designs that are the best as far as the search can tell, the one with the fewest kinds
/// of workers. `found`: the highest rate first.
fn simplest(found: &[Found]) -> Option<Found> {
    let equal_s = found.first()?.rate / PRECISION;
    let equal = found.iter().filter(|f| f.rate >= equal_s);
    equal.min_by_key(|f| f.design.roles()).cloned()
}

fn by_degree(
    args: &HardwareArgs,
    goal: &GoalArgs,
    log: Option<&Logged>,
) -> Result<BTreeMap<u32, Hardware>, SimulateError> {
    if args.gpu.is_none() {
        let hardware = match log {
            Some(log) => Hardware::or(args, log.source())?,
            None => Hardware::new(args)?,
        };
        return Ok(BTreeMap::from([(1, hardware)]));
    }
    let mut known = BTreeMap::new();
    let mut refused = None;
    for tensor_parallel in [1, 2, 4, 8] {
        if tensor_parallel > goal.gpus.min(goal.gpus_per_host) {
            break;
        }
        let args = HardwareArgs {
            tensor_parallel,
            ..args.clone()
        };
        match Hardware::new(&args) {
            Ok(hardware) => {
                known.insert(tensor_parallel, hardware);
            }
            // More GPUs may have room for the weights.
            Err(error @ (SimulateError::TooLarge { .. } | SimulateError::Pool { .. })) => {
                refused = Some(error);
            }
            Err(error) => return Err(error),
        }
    }
    match refused {
        Some(error) if known.is_empty() => Err(error),
        _ => Ok(known),
    }
}

fn logged_lengths(log: &Logged) -> Lengths {
    let count = log.requests.len() as f64;
    let sum = |of: fn(&Record) -> u32| -> f64 {
        log.requests.iter().map(|r| f64::from(of(&r.record))).sum()
    };
    // Of a prompt that is cached only its rest costs time.
    let computed = |r: &Record| r.prompt_tokens.saturating_sub(r.cached_tokens);
    Lengths {
        prompt: (sum(computed) / count).max(1.0),
        output: (sum(|r| r.output_tokens) / count).max(1.0),
    }
}

fn mean_lengths(workload: &WorkloadArgs) -> Result<Lengths, SimulateError> {
    let mut source = workload.plan_lengths()?.build()?;
    let (mut count, mut prompt, mut output) = (0.0, 0.0, 0.0);
    while count < LOOKED_AT as f64
        && let Some(planned) = source.next()
    {
        count += 1.0;
        prompt += f64::from(planned.input_tokens.unwrap_or(1));
        output += f64::from(planned.output_tokens);
    }
    let mean = |sum: f64| (sum / f64::max(count, 1.0)).max(1.0);
    Ok(Lengths {
        prompt: mean(prompt),
        output: mean(output),
    })
}
