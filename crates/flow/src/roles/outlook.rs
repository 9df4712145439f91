//! What requests are expected to see where so many workers have each role: the cost model of
//! placement, over a horizon in place of one request.
//!
//! With `p` prefill, `d` decode and `m` mixed workers, prompts of `P` seconds, outputs of `o` tokens
//! and steps of `A + B b` seconds for `b` sequences, as placement by cost divides requests:
//!
//! ```text
//!  prompts       go to prefill workers as long as these keep up, the rest to mixed ones, which
//!                spend the share  u = rest P / m  of their time on them
//!  sequences     as many on each worker that decodes:  b = rate o A / (d + m (1 - u) - rate o B)
//!  a token       A + B b  on decode workers,  (A + B b) / (1 - u)  on mixed ones
//!  room          b <= sequences whose KV fits; the 95th percentile of a token's time <= the objective
//! ```
//!
//! Up to the rate at which that is possible a request takes its wait, its prompt and its tokens.
//! Above it a queue grows. Both are counted in seconds of requests over the horizon, so there is
//! one currency.

use tasuki_core::Rates;

use super::demand::Lengths;
use crate::admission::P95;

/// Prompt tokens that share a step, and its overhead, on a worker that only prefills.
const STEP_TOKENS: f64 = 4_096.0;
/// Of the TTFT objective, what forecasts may use up: as in admission.
const TTFT_SHARE: f64 = 0.9;
/// The same of the TPOT objective: prompts between tokens are counted apart.
const TPOT_SHARE: f64 = 0.97;
/// A wait that so few exceed as objectives allow, in means.
const TAIL: f64 = 3.0;
/// Of its time, what a mixed worker spends on prompts at most.
const MOST_PROMPTS: f64 = 0.95;
/// Halvings in the search for the highest rate.
const HALVINGS: u32 = 24;

/// Workers by role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Topology {
    pub prefill: u32,
    pub decode: u32,
    pub mixed: u32,
}

impl Topology {
    /// Whether it can serve at all.
    pub fn serves(&self) -> bool {
        self.prefill + self.mixed > 0 && self.decode + self.mixed > 0
    }

    pub fn workers(&self) -> u32 {
        self.prefill + self.decode + self.mixed
    }

    fn counts(&self) -> [f64; 3] {
        [self.prefill, self.decode, self.mixed].map(f64::from)
    }
}

impl std::fmt::Display for Topology {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts = [
            (self.prefill, "prefill"),
            (self.decode, "decode"),
            (self.mixed, "mixed"),
        ];
        let some = parts.into_iter().filter(|(count, _)| *count > 0);
        for (index, (count, role)) in some.enumerate() {
            let and = if index > 0 { " + " } else { "" };
            write!(f, "{and}{count} {role}")?;
        }
        Ok(())
    }
}

/// Objectives of requests, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Objectives {
    pub ttft_s: Option<f64>,
    /// Of the time per token after the first.
    pub tpot_s: Option<f64>,
}

impl Objectives {
    /// Whether the first token of such a prompt comes in time on a worker that does nothing else.
    /// `cached`: the share of it that need not be computed.
    pub fn in_reach(&self, rates: &Rates, prompt_tokens: f64, cached: f64) -> bool {
        let alone_s = rates.prompt_step_s + rates.prompt_s(prompt_tokens, prompt_tokens * cached);
        self.ttft_s.is_none_or(|ttft_s| alone_s <= ttft_s)
    }
}

/// What is to be served, by what.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Task {
    pub lengths: Lengths,
    pub rates: Rates,
    pub objectives: Objectives,
    /// KV of one worker.
    pub pool_tokens: f64,
    pub handoff_s: f64,
    /// Requests that wait now, to be placed or for their prompt to be computed.
    pub queued: f64,
    pub horizon_s: f64,
}

/// Which half limits what workers can serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    Prefill,
    Decode,
}

/// What is expected of a topology.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outlook {
    /// Seconds of requests over the horizon.
    pub cost_s: f64,
    /// Requests a second that can be served within the objectives.
    pub capacity: f64,
    pub token_s: f64,
    pub bound: Bound,
}

/// How workers divide a rate among themselves.
#[derive(Debug, Clone, Copy)]
struct Division {
    /// Of the requests, those whose prompts are computed on prefill workers.
    on_prefill: f64,
    /// Of a mixed worker's time, for prompts.
    used: f64,
    /// Sequences on each worker that decodes.
    batch: f64,
    /// Of them, a step without prompts.
    step_s: f64,
}

impl Task {
    /// What requests see where so many workers have each role.
    pub fn outlook(&self, topology: Topology) -> Outlook {
        let fits = |rate: f64| self.divided(topology, rate);
        let (mut low, mut high) = (0.0, self.most(topology));
        let mut bound = Bound::Prefill;
        let all = fits(high);
        if all.is_ok() {
            low = high;
        }
        for _ in 0..HALVINGS {
            if high - low <= 1e-4 * high {
                break;
            }
            let middle = f64::midpoint(low, high);
            match fits(middle) {
                Ok(_) => low = middle,
                Err(why) => (high, bound) = (middle, why),
            }
        }
        let capacity = low;
        let served = self.lengths.rate.min(0.99 * capacity);
        let Some(division) = fits(served).ok().filter(|_| served > 0.0) else {
            return Outlook {
                cost_s: self.excess_s(0.0),
                capacity: 0.0,
                token_s: f64::INFINITY,
                bound,
            };
        };
        let [p, d, m] = topology.counts();
        let Division {
            on_prefill,
            used,
            batch,
            step_s,
        } = division;
        let (prompt_s, alone_s) = (self.prompt_s(), self.prompt_alone_s());
        let on_mixed = 1.0 - on_prefill;
        // A mixed worker gets prompts once the queue at the others costs as much as its decodes.
        // With a TPOT objective it gets them sooner; to count that here changed no outcome for the better.
        let queue_s = if on_mixed > 0.0 && p > 0.0 {
            batch * prompt_s
        } else {
            f64::INFINITY
        };
        let load = served * on_prefill * alone_s;
        let wait_s = self.wait_s(load, alone_s, p).min(queue_s);
        let first_s = self.rates.prompt_step_s + prompt_s + self.handoff_s + wait_s;
        // Half of a step is for the decodes.
        let beside_s = 2.0 * prompt_s + self.wait_s(used * m, prompt_s, m);
        let token_s = step_s * (d + m) / (d + m * (1.0 - used));
        let late = self.late(&division, topology, (served, capacity));
        let request_s =
            on_prefill * first_s + on_mixed * beside_s + self.lengths.output_tokens * token_s;
        Outlook {
            cost_s: self.horizon_s * served * (request_s + late * self.horizon_s)
                + self.excess_s(capacity),
            capacity,
            token_s,
            bound,
        }
    }

    /// The share of the answers whose tokens come too slowly, because of prompts on the workers
    /// that decode them.
    fn late(&self, division: &Division, topology: Topology, (served, capacity): (f64, f64)) -> f64 {
        let Some(tpot_s) = self.objectives.tpot_s else {
            return 0.0;
        };
        let [_, d, m] = topology.counts();
        let left = 1.0 - division.used;
        if m == 0.0 || division.used <= 0.0 {
            return 0.0;
        }
        let token_s = division.step_s / left;
        let deviation_s = self.deviation_s(division, m, served, served / capacity);
        // Of a normal distribution, nearly.
        let late = 1.0 / (1.0 + (1.702 * (tpot_s - token_s) / deviation_s).exp());
        late * m * left / (d + m * left)
    }

    /// How far the time per token differs among the answers of `m` mixed workers, because some
    /// workers have more prompts than others, and some answers: a standard deviation. `busy`: of
    /// what can be served, the share that is.
    fn deviation_s(&self, division: &Division, m: f64, served: f64, busy: f64) -> f64 {
        let output = self.lengths.output_tokens;
        let token_s = division.step_s / (1.0 - division.used);
        // Workers differ as prompts do: placement gives each as many of equal ones.
        let scatter = self.prompt_scatter();
        let differ = (scatter - 1.0).max(0.0).sqrt();
        let workers_s = differ * (token_s - division.step_s);
        let prompts = served * (1.0 - division.on_prefill) / m * token_s * output;
        // Requests come at random. Those that wait before the workers are let in as work is done
        // (what leaves a busy queue, by Marshall's formula).
        let uneven = scatter - busy * busy;
        // Half of a prompt is where an answer begins among them.
        let answers_s = self.prompt_s() * (uneven * prompts + 0.5).sqrt() / output;
        workers_s.hypot(answers_s)
    }

    /// More requests a second than can be served by far.
    fn most(&self, topology: Topology) -> f64 {
        let workers = f64::from(topology.workers());
        let output_s = self.lengths.output_tokens * self.sequence_s();
        workers / self.prompt_s().min(output_s).max(1e-6)
    }

    /// What a sequence adds to a step.
    fn sequence_s(&self) -> f64 {
        self.rates.sequence_s + self.rates.kv_token_s * self.lengths.context_tokens
    }

    /// How a rate is served, or what limits it.
    fn divided(&self, topology: Topology, rate: f64) -> Result<Division, Bound> {
        let [p, d, m] = topology.counts();
        let (prompt_s, alone_s) = (self.prompt_s(), self.prompt_alone_s());
        let alone = (self.most_busy(alone_s, p) * p / alone_s).min(rate);
        let rest = rate - alone;
        let used = if rest > 0.0 { rest * prompt_s / m } else { 0.0 };
        // Infinite, or no number, where there is no mixed worker.
        if used.is_nan() || used > MOST_PROMPTS {
            return Err(Bound::Prefill);
        }
        let output = self.lengths.output_tokens;
        let left = d + m * (1.0 - used) - rate * output * self.sequence_s();
        if left <= 0.0 {
            return Err(Bound::Decode);
        }
        let batch = rate * output * self.rates.step_s / left;
        let step_s = self.rates.step_s + self.sequence_s() * batch;
        let room = self.pool_tokens / (self.lengths.prompt_tokens + output);
        if batch > room.max(1.0) {
            return Err(Bound::Decode);
        }
        let on_prefill = alone / rate.max(f64::MIN_POSITIVE);
        let division = Division {
            on_prefill,
            used,
            batch,
            step_s,
        };
        let Some(tpot_s) = self.objectives.tpot_s else {
            return Ok(division);
        };
        // The time between first and second token counts among those of all tokens.
        let longest_s = TPOT_SHARE * tpot_s - on_prefill * self.handoff_s / output;
        let deviation_s = match used > 0.0 {
            true => self.deviation_s(&division, m, rate, 1.0),
            false => 0.0,
        };
        if step_s / (1.0 - used) + P95 * deviation_s <= longest_s {
            Ok(division)
        } else if step_s > longest_s {
            Err(Bound::Decode)
        } else {
            // Without prompts beside them the tokens would come in time.
            Err(Bound::Prefill)
        }
    }

    /// Of a mean prompt on a prefill worker, with its share of the steps' overhead.
    fn prompt_alone_s(&self) -> f64 {
        let steps = self.lengths.prompt_tokens / STEP_TOKENS;
        self.prompt_s() + self.rates.prompt_step_s * steps
    }

    /// Of a mean prompt, where decodes pay the step.
    pub fn prompt_s(&self) -> f64 {
        let (rates, lengths) = (&self.rates, &self.lengths);
        let computed = 1.0 - lengths.cached;
        let squares = lengths.prompt_squares * (1.0 - lengths.cached * lengths.cached);
        let prompt_s = rates.prompt_token_s * lengths.prompt_tokens * computed
            + rates.prompt_square_s * squares;
        prompt_s.max(1e-9)
    }

    /// The share of their time that prefill workers may compute, so that first tokens come in time.
    fn most_busy(&self, prompt_s: f64, workers: f64) -> f64 {
        let Some(ttft_s) = self.objectives.ttft_s else {
            return 1.0;
        };
        // A prompt that itself takes long may take twice as long as that.
        let slack_s = (TTFT_SHARE * ttft_s).max(2.0 * prompt_s) - prompt_s;
        let wait_s = TAIL * prompt_s * self.prompt_scatter() / (2.0 * workers.max(1.0));
        (1.0 - wait_s / slack_s).clamp(0.05, 1.0)
    }

    /// The mean wait for one of several workers that `load` of them are busy with (Sakasegawa's
    /// approximation); where they cannot keep up, as long as it can get within the horizon.
    fn wait_s(&self, load: f64, service_s: f64, workers: f64) -> f64 {
        if workers < 1.0 {
            return 0.0;
        }
        let busy = (load / workers).clamp(0.0, 1.0);
        let free = (1.0 - busy).max(0.5 * (service_s / (workers * self.horizon_s)).sqrt());
        let queue = busy.powf((2.0 * (workers + 1.0)).sqrt() - 1.0) / (workers * free);
        service_s * queue * self.prompt_scatter() / 2.0
    }

    /// By how much waits behind prompts are longer than behind prompts that are all alike.
    fn prompt_scatter(&self) -> f64 {
        self.lengths.prompt_squares / self.lengths.prompt_tokens.powi(2).max(1.0)
    }

    /// What the requests lose that wait beyond what can be served, over the horizon.
    fn excess_s(&self, capacity: f64) -> f64 {
        let (horizon_s, queued) = (self.horizon_s, self.queued);
        let grows = self.lengths.rate - capacity;
        if grows >= 0.0 && self.objectives.ttft_s.is_some() {
            // They come too late, and are lost.
            return grows * horizon_s * horizon_s;
        }
        if grows >= 0.0 {
            return queued * horizon_s + grows * horizon_s * horizon_s / 2.0;
        }
        let empty_s = (queued / -grows).min(horizon_s);
        queued * empty_s + grows * empty_s * empty_s / 2.0
    }

    /// The same with other lengths: prompts so many times, outputs so many times as long.
    pub fn tilted(&self, prompts: f64, outputs: f64) -> Self {
        let mut tilted = *self;
        tilted.lengths.prompt_tokens *= prompts;
        tilted.lengths.prompt_squares *= prompts * prompts;
        tilted.lengths.context_tokens *= prompts.max(outputs);
        tilted.lengths.output_tokens = (self.lengths.output_tokens * outputs).max(1.0);
        tilted
    }
}
