//! What a model's clients have asked for lately: how many requests, how long.
//!
//! Arrivals are summed until another load begins ([`super::arrivals`]). How long answers are is
//! known when they have ended, which may be long after that. So it is learnt for each class of
//! prompts ([`super::answers`]) and kept: a load that comes back is known with its first arrivals.

use std::time::Duration;

use super::answers::{Answers, Expected};
use super::arrivals::{Arrivals, CLASSES, FINE, Sums, class};

/// Lengths are not estimated from fewer requests, each with the weight that it still has.
const LEAST_REQUESTS: f64 = 0.5;
/// Of a class of which there is no answer, if there is no other class.
const USUAL_OUTPUT_TOKENS: f64 = 256.0;

/// What was asked for lately, and what answers were like.
#[derive(Debug, Clone, Default)]
pub struct Demand {
    arrivals: Arrivals,
    /// By class of prompts.
    answers: [Answers; CLASSES],
}

/// The mean answer.
struct Output {
    tokens: f64,
    /// Relative; and once the answers to all requests that have come have ended.
    error: f64,
    error_soon: f64,
    context_tokens: f64,
}

/// The mean request of a moment, and how many come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lengths {
    /// Requests a second.
    pub rate: f64,
    pub prompt_tokens: f64,
    /// Mean of the squares of the prompts' lengths.
    pub prompt_squares: f64,
    /// Of a prompt, the share that need not be computed.
    pub cached: f64,
    pub output_tokens: f64,
    /// Tokens of KV that a sequence attends to, in the mean over steps.
    pub context_tokens: f64,
    /// How far the prompts' and the outputs' tokens a second may be off, as shares: a standard
    /// error each.
    pub prompt_error: f64,
    pub output_error: f64,
    /// The same of the outputs once the answers to all requests that have come have ended.
    pub output_error_soon: f64,
}

impl Demand {
    /// A request arrives.
    pub fn on_arrival(&mut self, prompt_tokens: u32, now: Duration) {
        self.arrivals.on_arrival(prompt_tokens, now);
    }

    /// So many tokens of a prompt were found cached.
    pub fn on_cached(&mut self, tokens: u32) {
        self.arrivals.on_cached(tokens);
    }

    /// An answer of `from` tokens has `to` by now.
    pub fn on_output(&mut self, prompt_tokens: u64, from: u32, to: u32) {
        self.answers[class(prompt_tokens)].on_output(from, to);
    }

    /// An answer of so many tokens has ended.
    pub fn on_ended(&mut self, prompt_tokens: u64, output_tokens: u32) {
        self.answers[class(prompt_tokens)].on_ended(output_tokens);
    }

    /// `None`: nothing has come lately.
    pub fn lengths(&self, now: Duration) -> Option<Lengths> {
        let sums = self.lately(now);
        (sums.requests >= LEAST_REQUESTS).then(|| self.lengths_of(&sums))
    }

    /// The same of the requests whose prompts `counts` selects, by their tokens; of all requests
    /// if it selects none.
    pub fn lengths_where(&self, counts: impl Fn(f64) -> bool, now: Duration) -> Option<Lengths> {
        let sums = counted(&self.lately(now), counts);
        (sums.requests >= LEAST_REQUESTS).then(|| self.lengths_of(&sums))
    }

    /// How many seconds more the load is expected to last, and the loads before it with their
    /// shares of the time, each of the requests that `counts` selects. `None`: without
    /// an end, because none has ended yet.
    pub fn expected_where(
        &self,
        counts: impl Fn(f64) -> bool,
        now: Duration,
    ) -> Option<(f64, Vec<(f64, Lengths)>)> {
        let rest_s = self.arrivals.loads.rest_s(now)?;
        let before = self.arrivals.loads.before();
        let before = before.map(|(share, sums)| (share, self.lengths_of(&counted(sums, &counts))));
        Some((rest_s, before.collect()))
    }

    fn lately(&self, now: Duration) -> Sums {
        let mut arrivals = self.arrivals.clone();
        arrivals.advance(now);
        arrivals.all()
    }

    fn lengths_of(&self, sums: &Sums) -> Lengths {
        let prompt_tokens = sums.mean_prompt();
        let prompt_squares = sums.squares / sums.requests;
        // Of a sum of random many random lengths.
        let scatter = prompt_squares / (prompt_tokens * prompt_tokens).max(1.0);
        let Output {
            tokens: output_tokens,
            error: output_error,
            error_soon: output_error_soon,
            context_tokens,
        } = self.output(sums);
        Lengths {
            rate: sums.rate(),
            prompt_tokens,
            prompt_squares,
            cached: (sums.cached / sums.prompt_tokens.max(1.0)).min(0.99),
            output_tokens,
            context_tokens,
            prompt_error: (scatter / (2.0 * sums.requests)).sqrt().min(0.9),
            output_error,
            output_error_soon,
        }
    }

    /// The mean answer to these prompts.
    fn output(&self, sums: &Sums) -> Output {
        let usual = Answers::all(&self.answers)
            .expected(USUAL_OUTPUT_TOKENS)
            .tokens;
        let (mut mean, mut variance, mut soon, mut attended) = (0.0, 0.0, 0.0, 0.0);
        for (answers, fine) in self.answers.iter().zip(sums.classes.chunks(FINE)) {
            let requests: f64 = fine.iter().map(|class| class.requests).sum();
            let prompts: f64 = fine.iter().map(|class| class.prompt_tokens).sum();
            let share = requests / sums.requests;
            if requests == 0.0 {
                continue;
            }
            let ended = answers.ended + 1.0;
            let Expected { tokens, squares } = answers.expected(usual);
            let spread = (squares - tokens * tokens).max(0.0);
            mean += share * tokens;
            attended += prompts / sums.requests * tokens + share * squares / 2.0;
            variance += share * share * spread / ended;
            soon += share * share * spread / (ended + requests);
        }
        let mean = mean.max(1.0);
        let relative = |variance: f64| (variance.sqrt() / mean).min(0.9);
        Output {
            tokens: mean,
            error: relative(variance),
            error_soon: relative(soon),
            context_tokens: attended / mean,
        }
    }
}

/// The requests whose prompts `counts` selects; all of them if it selects none.
fn counted(sums: &Sums, counts: impl Fn(f64) -> bool) -> Sums {
    let some = sums.of_prompts(counts);
    if some.requests >= LEAST_REQUESTS {
        some
    } else {
        *sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    /// Ten requests a second from `from_s` on.
    fn steady(demand: &mut Demand, from_s: f64, to_s: f64, (prompt, output): (u32, u32)) {
        for tenth in (from_s * 10.0) as u32..(to_s * 10.0) as u32 {
            demand.on_arrival(prompt, at(f64::from(tenth) / 10.0));
            demand.on_cached(prompt / 4);
            end(demand, prompt, output);
        }
    }

    /// An answer comes, and ends.
    fn end(demand: &mut Demand, prompt: u32, output: u32) {
        demand.on_output(u64::from(prompt), 0, output);
        demand.on_ended(u64::from(prompt), output);
    }

    #[test]
    fn a_steady_load_is_known_after_a_while() {
        let mut demand = Demand::default();
        assert_eq!(demand.lengths(at(1.0)), None);
        steady(&mut demand, 0.0, 40.0, (512, 100));
        let lengths = demand.lengths(at(40.0)).unwrap();
        let near =
            |got: f64, wanted: f64| assert!((got / wanted - 1.0).abs() < 0.05, "{lengths:?}");
        near(lengths.rate, 10.0);
        near(lengths.prompt_tokens, 512.0);
        near(lengths.cached, 0.25);
        near(lengths.output_tokens, 100.0);
        assert!(lengths.prompt_error < 0.12 && lengths.output_error < 0.15);
    }

    #[test]
    fn another_load_is_seen_soon_and_one_that_comes_back_at_once() {
        let mut demand = Demand::default();
        steady(&mut demand, 0.0, 40.0, (512, 500));
        steady(&mut demand, 40.0, 48.0, (5_000, 50));
        let lengths = demand.lengths(at(48.0)).unwrap();
        assert!(lengths.prompt_tokens > 4_000.0, "{lengths:?}");
        assert!(lengths.output_tokens < 120.0, "{lengths:?}");
        // No answer of these has ended yet.
        for tenth in 480..520 {
            demand.on_arrival(512, at(f64::from(tenth) / 10.0));
        }
        let lengths = demand.lengths(at(52.0)).unwrap();
        assert!(lengths.output_tokens > 250.0, "{lengths:?}");
    }

    #[test]
    fn answers_that_are_alike_leave_less_doubt_than_others() {
        let error = |lengths: [u32; 2]| {
            let mut demand = Demand::default();
            for index in 0..20 {
                demand.on_arrival(512, at(0.1 * f64::from(index)));
                end(&mut demand, 512, lengths[index as usize % 2]);
            }
            let lengths = demand.lengths(at(2.0)).unwrap();
            assert!(lengths.output_error_soon < 0.8 * lengths.output_error);
            lengths.output_error
        };
        let (alike, others) = (error([256, 256]), error([12, 500]));
        assert!(alike < 0.06, "{alike}");
        assert!((0.18..0.3).contains(&others), "{others}");
    }

    #[test]
    fn a_few_requests_leave_doubt_and_are_forgotten() {
        let mut few = Demand::default();
        few.on_arrival(512, at(1.0));
        let lengths = few.lengths(at(1.0)).unwrap();
        assert!(
            lengths.prompt_error > 0.6 && lengths.output_error > 0.8,
            "{lengths:?}"
        );
        assert_eq!(few.lengths(at(60.0)), None);
    }
}
