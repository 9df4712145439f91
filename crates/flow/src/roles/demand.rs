//! What a model's clients have asked for lately: how many requests, how long.
//!
//! Arrivals are summed over a while, and over a shorter one. Where the two differ by more than
//! chance the longer one is forgotten. How long answers are is known when they have ended, which
//! may be long after the load has changed. So it is learnt for each class of prompts (by powers of
//! two of their length) and kept: a load that comes back is known with its first arrivals.

use std::time::Duration;

/// How long arrivals count, in seconds: long, for few errors, unless what came lately differs.
const LONG_S: f64 = 8.0;
const SHORT_S: f64 = 2.0;
/// What came lately differs from what came before if it is off by so many standard errors.
const DIFFERS: f64 = 3.0;
/// Answers of a class that count.
const ANSWERS: f64 = 300.0;
/// Of a class of which no answer has ended, if there is no other class.
const USUAL_OUTPUT_TOKENS: f64 = 256.0;
const CLASSES: usize = 24;

/// What was asked for: over a while, and lately.
#[derive(Debug, Clone, Copy, Default)]
pub struct Demand {
    at: Option<Duration>,
    long: Sums,
    short: Sums,
    /// By class of prompts: answers that have ended, and their tokens.
    answers: [Answers; CLASSES],
}

#[derive(Debug, Clone, Copy, Default)]
struct Answers {
    ended: f64,
    tokens: f64,
    /// Of the tokens of each.
    squares: f64,
}

/// Sums in which the past counts less and less.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    seconds: f64,
    requests: f64,
    prompt_tokens: f64,
    /// Of the prompts.
    squares: f64,
    /// Of the prompts' tokens, those that were found cached.
    cached: f64,
    by_class: [f64; CLASSES],
    prompts_by_class: [f64; CLASSES],
}

/// The mean answer.
struct Output {
    tokens: f64,
    /// Relative.
    error: f64,
    context_tokens: f64,
}

fn class(prompt_tokens: u64) -> usize {
    (prompt_tokens.max(1).ilog2() as usize).min(CLASSES - 1)
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
}

impl Sums {
    fn pass(&mut self, seconds: f64, memory_s: f64) {
        let kept = (-seconds / memory_s).exp();
        for sum in [
            &mut self.seconds,
            &mut self.requests,
            &mut self.prompt_tokens,
            &mut self.squares,
            &mut self.cached,
        ] {
            *sum *= kept;
        }
        self.by_class.iter_mut().for_each(|sum| *sum *= kept);
        self.prompts_by_class
            .iter_mut()
            .for_each(|sum| *sum *= kept);
        self.seconds += memory_s * (1.0 - kept);
    }

    fn rate(&self) -> f64 {
        self.requests / self.seconds.max(1.0)
    }

    fn mean_prompt(&self) -> f64 {
        self.prompt_tokens / self.requests.max(f64::MIN_POSITIVE)
    }

    /// Whether these, of lately, come from another load than those.
    fn differs(&self, from: &Self) -> bool {
        let mean = from.mean_prompt();
        let spread = (from.squares / from.requests - mean * mean).max(0.0).sqrt();
        let off = |got: f64, wanted: f64, error: f64| (got - wanted).abs() > DIFFERS * error;
        let expected = from.rate() * self.seconds;
        off(
            self.mean_prompt(),
            mean,
            spread.max(0.05 * mean) / self.requests.max(1.0).sqrt(),
        ) || off(self.requests, expected, expected.max(1.0).sqrt())
    }
}

impl Demand {
    fn advance(&mut self, now: Duration) {
        let passed = now.saturating_sub(*self.at.get_or_insert(now));
        self.at = self.at.max(Some(now));
        self.long.pass(passed.as_secs_f64(), LONG_S);
        self.short.pass(passed.as_secs_f64(), SHORT_S);
    }

    /// A request arrives.
    pub fn on_arrival(&mut self, prompt_tokens: u32, now: Duration) {
        self.advance(now);
        let tokens = f64::from(prompt_tokens);
        for sums in [&mut self.long, &mut self.short] {
            sums.requests += 1.0;
            sums.prompt_tokens += tokens;
            sums.squares += tokens * tokens;
            sums.by_class[class(u64::from(prompt_tokens))] += 1.0;
            sums.prompts_by_class[class(u64::from(prompt_tokens))] += tokens;
        }
        if self.short.differs(&self.long) {
            self.long = self.short;
        }
    }

    /// So many tokens of a prompt were found cached.
    pub fn on_cached(&mut self, tokens: u32) {
        self.long.cached += f64::from(tokens);
        self.short.cached += f64::from(tokens);
    }

    /// An answer of so many tokens has ended.
    pub fn on_ended(&mut self, prompt_tokens: u64, output_tokens: u32) {
        let answers = &mut self.answers[class(prompt_tokens)];
        let tokens = f64::from(output_tokens);
        for (sum, one) in [
            (&mut answers.ended, 1.0),
            (&mut answers.tokens, tokens),
            (&mut answers.squares, tokens * tokens),
        ] {
            *sum = *sum * (1.0 - 1.0 / ANSWERS) + one;
        }
    }

    /// `None`: nothing has come lately.
    pub fn lengths(&self, now: Duration) -> Option<Lengths> {
        let mut demand = *self;
        demand.advance(now);
        let sums = demand.long;
        if sums.requests < 0.5 {
            return None;
        }
        let prompt_tokens = sums.mean_prompt();
        let prompt_squares = sums.squares / sums.requests;
        // Of a sum of random many random lengths.
        let scatter = prompt_squares / (prompt_tokens * prompt_tokens).max(1.0);
        let Output {
            tokens: output_tokens,
            error: output_error,
            context_tokens,
        } = demand.output(&sums);
        Some(Lengths {
            rate: sums.rate(),
            prompt_tokens,
            prompt_squares,
            cached: (sums.cached / sums.prompt_tokens.max(1.0)).min(0.99),
            output_tokens,
            context_tokens,
            prompt_error: (scatter / (2.0 * sums.requests)).sqrt().min(0.9),
            output_error,
        })
    }

    /// The mean answer to these prompts.
    fn output(&self, sums: &Sums) -> Output {
        let all = self
            .answers
            .iter()
            .fold(Answers::default(), |all, one| Answers {
                ended: all.ended + one.ended,
                tokens: all.tokens + one.tokens,
                squares: all.squares + one.squares,
            });
        let usual = if all.ended > 0.0 {
            all.tokens / all.ended
        } else {
            USUAL_OUTPUT_TOKENS
        };
        let (mut mean, mut variance, mut attended) = (0.0, 0.0, 0.0);
        let classes = sums.by_class.iter().zip(sums.prompts_by_class);
        for (answers, (requests, prompts)) in self.answers.iter().zip(classes) {
            let share = requests / sums.requests;
            // As if one of the usual length had ended.
            let ended = answers.ended + 1.0;
            let tokens = (answers.tokens + usual) / ended;
            let squares = (answers.squares + usual * usual) / ended;
            mean += share * tokens;
            attended += prompts / sums.requests * tokens + share * squares / 2.0;
            variance += (share * tokens).powi(2) / ended;
        }
        let mean = mean.max(1.0);
        Output {
            tokens: mean,
            error: (variance.sqrt() / mean).min(0.9),
            context_tokens: attended / mean,
        }
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
            demand.on_ended(u64::from(prompt), output);
        }
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
