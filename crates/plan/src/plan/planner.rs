//! The search: an estimate of every design, a simulation of the best, the rest of the answer.

use std::collections::BTreeMap;

use serde::Serialize;
use tasuki_bench::args::{WorkloadArgs, WorkloadKind};
use tasuki_bench::slo::Slo;
use tasuki_core::Role;

use super::args::{GoalArgs, PlanArgs};
use super::degrees::by_degree;
use super::design::{Design, all};
use super::lengths::{Conversations, Lengths, refuse_too_long, requests_of_file};
use super::probe::{Found, Seeing};
use super::screen::{Limits, Rates, estimate};
use super::start::Start;
use super::variations::Variation;
use crate::error::SimulateError;
use crate::hardware::Hardware;
use crate::replay::Logged;

/// Of the file.
const SCHEMA: &str = "tasuki.plan/1";
/// Step sizes that are tried for the best designs, where none was given.
const STEP_TOKENS: [u32; 3] = [1_024, 2_048, 8_192];
/// Designs whose step sizes are varied.
const REFINED: usize = 2;
/// Designs that are simulated, at most, by `--quick`.
const QUICK_DESIGNS: usize = 4;
/// Of the time that a token may take, what a step with prompts in it may: the rest is for what lies
/// between steps. `tasuki serve` makes `--itl-target-ms` of `--tpot-target-ms` so.
pub const STEP_SHARE: f64 = 0.8;

/// See the module.
pub struct Planner<'a> {
    pub goal: &'a GoalArgs,
    pub workload: WorkloadArgs,
    pub slo: Slo,
    pub limits: Limits,
    pub attainment: f64,
    pub gpus_per_host: u32,
    /// By degree of tensor parallelism.
    pub(super) hardware: BTreeMap<u32, Hardware>,
    /// As the command that starts the design names it, where it is known.
    model: Option<String>,
    pub lengths: Lengths,
    pub(super) conversations: Conversations,
    /// As `--itl-target-ms` says, 0 where steps have no bound; `None`: it follows from the objectives.
    step_target_s: Option<f64>,
    /// See [`STEP_TOKENS`].
    step_tokens: &'static [u32],
    /// See [`Start::given`].
    given: Vec<(&'static str, u32)>,
    /// Requests of the workload's file. `None`: the workload has no end.
    pub(super) file_requests: Option<u32>,
    /// In place of the workload.
    pub log: Option<Logged>,
}

/// The answer.
#[derive(Debug, Serialize)]
pub struct Plan {
    pub schema: &'static str,
    /// For the reader: what the plan cannot be.
    pub notes: Vec<String>,
    pub slo: Slo,
    /// Of the requests, in the mean.
    pub lengths: Lengths,
    pub steps: String,
    pub designs: usize,
    /// How long a worker's step that decodes may take with prompts in it; 0: there is no bound.
    pub itl_target_ms: f64,
    /// Rates that differ by less than this factor count as equal.
    pub precision: f64,
    /// The best first.
    pub simulated: Vec<Found>,
    pub best: Found,
    pub best_colocated: Option<Found>,
    pub command: String,
    /// For the Helm chart, in YAML.
    pub helm_values: String,
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
        let (lengths, tokens) = match &log {
            Some(log) => (Lengths::logged(log), log.tokens()),
            None => Lengths::planned(&workload)?,
        };
        let file_requests = requests_of_file(&workload)?;
        let conversations = Conversations::of(&workload)?;
        let hardware = by_degree(&args.hardware, goal, log.as_ref())?;
        let limits = hardware.values().map(|known| known.limits.max_model_len);
        refuse_too_long(&tokens, limits.max().unwrap_or(0), goal.attainment)?;
        if let (Some(price), Some(known)) = (&goal.price, hardware.values().next())
            && !price.is_of(&known.name)
        {
            return Err(SimulateError::Price {
                given: price.kind.clone(),
                known: known.name.clone(),
            });
        }
        Ok(Self {
            goal,
            workload,
            slo: goal.slo,
            limits: Limits { ttft_s, tpot_s },
            attainment: goal.attainment,
            gpus_per_host: goal.gpus_per_host,
            model: hardware.values().find_map(|known| known.model.clone()),
            hardware,
            lengths,
            conversations,
            file_requests,
            step_target_s: args.hardware.itl_target_ms.map(|ms| ms / 1e3),
            step_tokens: match args.hardware.max_batched_tokens {
                Some(_) => &[],
                None => &STEP_TOKENS,
            },
            given: args.hardware.given(),
            log,
        })
    }

    pub fn hardware_of(&self, tensor_parallel: u32) -> Result<&Hardware, SimulateError> {
        let known = self.hardware.get(&tensor_parallel.max(1));
        known
            .or_else(|| self.hardware.values().next())
            .ok_or(SimulateError::NoSteps)
    }

    /// How long a step that decodes may take with prompts in it; 0: there is no bound.
    pub fn step_target_s(&self) -> f64 {
        self.step_target_s
            .unwrap_or(STEP_SHARE * self.limits.tpot_s)
    }

    /// # Errors
    ///
    /// A workload that cannot be read.
    pub fn plan(&mut self) -> Result<Plan, SimulateError> {
        let (mut simulated, designs) = self.search()?;
        simulated.sort_by(|a, b| b.rate.total_cmp(&a.rate));
        let best = self.simplest(&simulated).ok_or(SimulateError::NoSteps)?;
        let colocated = |found: &&Found| found.design.is_colocated();
        let best_colocated = simulated.iter().find(colocated).cloned();
        let logged = self.log.as_ref().and_then(Logged::arrival_rate);
        let rate = self.goal.request_rate.or(logged);
        // Where nothing meets the objectives, what the lowest rate brings is shown.
        let rate = rate.unwrap_or(match best.rate > 0.0 {
            true => 0.8 * best.rate,
            false => best.at.rate,
        });
        let expected = self.see(&best.design, rate)?;
        let expected_colocated = match &best_colocated {
            Some(found) => Some(self.see(&found.design, rate)?),
            None => None,
        };
        let steps = self.hardware_of(1)?.source.clone();
        let bare = self.goal.no_variations || self.goal.quick || best.rate <= 0.0;
        let losses = if bare {
            Vec::new()
        } else {
            self.losses(&best, rate)?
        };
        let variations = if bare {
            Vec::new()
        } else {
            self.variations(&best, &simulated, rate)?
        };
        let start = Start {
            design: best.design,
            itl_target_ms: 1e3 * self.step_target_s(),
            given: self.given.clone(),
        };
        Ok(Plan {
            schema: SCHEMA,
            notes: self.notes(),
            slo: self.goal.slo,
            lengths: self.lengths,
            precision: self.precision(),
            // What comes beyond the highest rate is not served in time.
            expected_cost_per_million_tokens: self.cost(&best.design, rate.min(best.rate)),
            losses,
            steps,
            designs,
            itl_target_ms: start.itl_target_ms,
            command: start.command(self.model.as_deref()),
            helm_values: start.values(self.hardware_of(1)?.on_gpus),
            simulated,
            best,
            best_colocated,
            expected,
            expected_colocated,
            variations,
        })
    }

    /// The designs that were simulated, and how many were looked at.
    pub(super) fn search(&self) -> Result<(Vec<Found>, usize), SimulateError> {
        let degrees: Vec<u32> = self.hardware.keys().copied().collect();
        let default = self.hardware_of(1)?.limits.max_batched_tokens;
        let (gpus, gpus_per_host) = (self.goal.gpus, self.goal.gpus_per_host);
        let mut designs = all(gpus, &degrees, default);
        designs.retain(|design| design.fits(gpus, gpus_per_host));
        if designs.is_empty() {
            return Err(SimulateError::Indivisible {
                gpus,
                gpus_per_host,
                each: degrees[0],
            });
        }
        let hardware = self.hardware.iter();
        let rates =
            hardware.map(|(degree, of)| (*degree, Rates::of(of, self.lengths, self.limits)));
        let rates: BTreeMap<u32, Rates> = rates.collect();
        let estimated = designs
            .iter()
            .map(|design| (estimate(design, &rates), *design));
        let mut ranked: Vec<(f64, Design)> = estimated.collect();
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
        let most = match self.goal.quick {
            true => QUICK_DESIGNS.min(self.goal.designs as usize),
            false => self.goal.designs as usize,
        };
        let mut chosen: Vec<(f64, Design)> = ranked.iter().take(most).copied().collect();
        if !chosen.iter().any(|(_, design)| design.is_colocated()) {
            chosen.extend(ranked.iter().find(|(_, design)| design.is_colocated()));
        }
        let mut found = Vec::new();
        for (estimated, design) in self.with_strict(&chosen) {
            found.push(self.probe(&design, estimated)?);
        }
        found.sort_by(|a, b| b.rate.total_cmp(&a.rate));
        if self.goal.quick {
            return Ok((found, designs.len()));
        }
        let mut refined: Vec<Found> = found.iter().take(REFINED).cloned().collect();
        refined.extend(found.iter().find(|f| f.design.is_colocated()).cloned());
        let all = found.clone();
        for base in &refined {
            for size in self.step_tokens.iter().filter(|size| **size != default) {
                self.resize(base, base.design.sized(*size, None), &mut found)?;
            }
        }
        // The best of these sizes is tried for all: else a design could win by its size alone.
        let better = |a: &&Found, b: &&Found| a.rate.total_cmp(&b.rate);
        let size = found.iter().max_by(better);
        if let Some(size) = size.map(|best| best.design.max_batched_tokens) {
            for base in &all {
                self.resize(base, base.design.sized(size, None), &mut found)?;
            }
        }
        // Prefill workers need not share the size that suits decodes.
        let split = found.iter().filter(|f| f.design.is_split()).max_by(better);
        if let Some(base) = split.cloned() {
            for size in self.step_tokens.iter().copied().chain([default]) {
                let design = base
                    .design
                    .sized(base.design.max_batched_tokens, Some(size));
                self.resize(&base, design, &mut found)?;
            }
        }
        Ok((found, designs.len()))
    }

    /// Designs, each with strict roles, too; with `--quick` only the best split has them.
    fn with_strict(&self, designs: &[(f64, Design)]) -> Vec<(f64, Design)> {
        let mut all = Vec::new();
        let mut splits = 0;
        for &(estimated, design) in designs {
            splits += usize::from(design.is_split());
            let strict = design.strict();
            if self.goal.strict_roles {
                all.push((estimated, strict.unwrap_or(design)));
                continue;
            }
            all.push((estimated, design));
            let tried = !self.goal.quick || (design.is_split() && splits == 1);
            all.extend(strict.filter(|_| tried).map(|strict| (estimated, strict)));
        }
        all
    }

    /// Adds a design that is `base` with steps of other sizes, unless it is there.
    fn resize(
        &self,
        base: &Found,
        design: Design,
        found: &mut Vec<Found>,
    ) -> Result<(), SimulateError> {
        if !found.iter().any(|known| known.design == design) {
            let start = base.rate.max(base.estimated_rate / 4.0);
            found.push(Found {
                estimated_rate: base.estimated_rate,
                ..self.probe(&design, start)?
            });
        }
        Ok(())
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

    /// Of the designs that are the best as far as the search can tell, the one with the fewest
    /// kinds of workers, then the smallest ones, then steps of one size, then roles that are
    /// preferences: a worker that is left alone serves on. Where none meets the objectives, the
    /// nearest are the best. `found`: the highest rate first.
    fn simplest(&self, found: &[Found]) -> Option<Found> {
        let meets = found.first()?.rate > 0.0;
        let score = |f: &Found| if meets { f.rate } else { self.nearness(f) };
        let most = found.iter().map(score).fold(0.0, f64::max);
        let equal = found.iter().filter(|f| score(f) >= most / self.precision());
        equal
            .min_by_key(|f| {
                let own_steps = f.design.prefill_max_batched_tokens.is_some();
                let design = &f.design;
                (
                    design.roles(),
                    design.widest(),
                    own_steps,
                    design.strict_roles,
                )
            })
            .cloned()
    }

    /// An objective as a share of what 95% of the requests see, of the one that is missed by more.
    fn nearness(&self, found: &Found) -> f64 {
        let ttft = found.at.ttft_p95_ms / (1e3 * self.limits.ttft_s);
        let tpot = found.at.tpot_p95_ms / (1e3 * self.limits.tpot_s);
        // Not a number where nothing was answered.
        (1.0 / ttft.max(tpot)).max(0.0)
    }
}
