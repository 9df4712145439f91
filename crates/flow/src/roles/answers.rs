//! How long answers are, of those that have ended and those that still run.
//!
//! Short answers end first: while a load is new, the mean of those that have ended is far too short. So
//! a life table is kept. Of the answers that come to a length, a share ends before the next one, and
//! the others pass; an answer counts at each length that it passes, also if it has not ended.

/// Answers that count.
const ANSWERS: f64 = 300.0;
/// Of the parts in which lengths are told apart, from a power of two to the next one.
const PARTS_LOG2: u32 = 2;

/// The life table of a kind of answers.
#[derive(Debug, Clone, Default)]
pub(super) struct Answers {
    parts: Vec<Part>,
    /// How many have ended, of those that count.
    pub ended: f64,
}

/// Answers at a range of lengths.
#[derive(Debug, Clone, Copy, Default)]
struct Part {
    passed: f64,
    ended: f64,
    /// Of those that ended, and of the squares of each.
    tokens: f64,
    squares: f64,
}

/// What is expected of an answer: its tokens, and the mean of their squares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Expected {
    pub tokens: f64,
    pub squares: f64,
}

impl Answers {
    /// An answer of `from` tokens has `to` by now.
    pub fn on_output(&mut self, from: u32, to: u32) {
        let passed = part(from)..part(to);
        if passed.is_empty() {
            return;
        }
        self.reach(passed.end);
        for part in &mut self.parts[passed] {
            part.passed += 1.0;
        }
    }

    pub fn on_ended(&mut self, output_tokens: u32) {
        let kept = 1.0 - 1.0 / ANSWERS;
        for part in &mut self.parts {
            part.passed *= kept;
            part.ended *= kept;
            part.tokens *= kept;
            part.squares *= kept;
        }
        let (at, tokens) = (part(output_tokens), f64::from(output_tokens));
        self.reach(at);
        let part = &mut self.parts[at];
        part.ended += 1.0;
        part.tokens += tokens;
        part.squares += tokens * tokens;
        self.ended = self.ended * kept + 1.0;
    }

    fn reach(&mut self, part: usize) {
        if self.parts.len() <= part {
            self.parts.resize(part + 1, Part::default());
        }
    }

    /// Those of several kinds together.
    pub fn all(kinds: &[Self]) -> Self {
        let mut all = Self::default();
        for one in kinds {
            all.reach(one.parts.len().saturating_sub(1));
            for (sum, part) in all.parts.iter_mut().zip(&one.parts) {
                sum.passed += part.passed;
                sum.ended += part.ended;
                sum.tokens += part.tokens;
                sum.squares += part.squares;
            }
            all.ended += one.ended;
        }
        all
    }

    /// Of an answer, as if one had been seen besides whose length is exponentially distributed, with
    /// the mean `usual`.
    pub fn expected(&self, usual: f64) -> Expected {
        let mut expected = Expected {
            tokens: 0.0,
            squares: 0.0,
        };
        let mut come = 1.0;
        for (at, part) in self.parts.iter().enumerate() {
            let (from, to) = (least_of(at), least_of(at + 1));
            let [usual_come, usual_pass] = [from, to].map(|tokens| (-tokens / usual).exp());
            let usual_end = usual_come - usual_pass;
            let middle = f64::midpoint(from, to);
            let all = part.passed + part.ended + usual_come;
            expected.tokens += come / all * (part.tokens + usual_end * middle);
            expected.squares += come / all * (part.squares + usual_end * middle * middle);
            come *= (part.passed + usual_pass) / all;
        }
        // Nothing tells how long these will be: as much again as is usual.
        let from = least_of(self.parts.len());
        expected.tokens += come * (from + usual);
        expected.squares += come * (from * from + 2.0 * from * usual + 2.0 * usual * usual);
        expected
    }
}

/// That of answers of such a length.
fn part(tokens: u32) -> usize {
    if tokens < 1 << PARTS_LOG2 {
        return 0;
    }
    // The number's highest bit, and the bits after it.
    let power = tokens.ilog2() - PARTS_LOG2;
    let within = (tokens >> power) - (1 << PARTS_LOG2);
    ((power << PARTS_LOG2) + within + 1) as usize
}

/// The shortest length in a part.
fn least_of(part: usize) -> f64 {
    let Some(part) = part.checked_sub(1) else {
        return 0.0;
    };
    let parts = 1 << PARTS_LOG2;
    let power = (part / parts) as f64;
    f64::from(1_u32 << PARTS_LOG2) * power.exp2() * (1.0 + (part % parts) as f64 / parts as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const USUAL: f64 = 256.0;

    fn near(got: f64, wanted: f64, share: f64) {
        assert!((got / wanted - 1.0).abs() < share, "{got}, not {wanted}");
    }

    /// Answers that begin together, after so many tokens of each.
    fn after(lengths: &[u32], tokens: u32) -> Answers {
        let mut answers = Answers::default();
        for now in 0..tokens {
            for &length in lengths {
                if now < length {
                    answers.on_output(now, now + 1);
                }
                if now + 1 == length {
                    answers.on_ended(length);
                }
            }
        }
        answers
    }

    #[test]
    fn parts_hold_the_lengths_from_their_least_one_on() {
        for tokens in 0..100_000 {
            let (part, tokens) = (part(tokens), f64::from(tokens));
            assert!(
                least_of(part) <= tokens && tokens < least_of(part + 1),
                "{tokens}"
            );
        }
        assert!(part(u32::MAX) < 128);
    }

    #[test]
    fn answers_that_have_ended_are_their_own_mean() {
        let mut answers = Answers::default();
        for index in 0..2_000 {
            let tokens = [100, 300][index % 2];
            answers.on_output(0, tokens);
            answers.on_ended(tokens);
        }
        let expected = answers.expected(USUAL);
        near(expected.tokens, 200.0, 0.03);
        near(expected.squares, 50_000.0, 0.03);
    }

    #[test]
    fn short_answers_that_ended_first_do_not_stand_for_the_others() {
        // A tenth is short, the others go on.
        let lengths: Vec<u32> = (0..100)
            .map(|index| if index % 10 == 0 { 20 } else { 600 })
            .collect();
        for tokens in [30, 100, 400] {
            let expected = after(&lengths, tokens).expected(USUAL).tokens;
            let least = f64::from(tokens).max(200.0);
            assert!((least..900.0).contains(&expected), "{tokens}: {expected}");
        }
        near(after(&lengths, 600).expected(USUAL).tokens, 542.0, 0.05);
    }

    #[test]
    fn a_steady_load_is_not_biased_however_many_run() {
        // Each at its place among the others, with lengths from 100 to 1,000.
        let length = |index: u32| 100 + index * 7_919 % 900;
        for every in [1, 10] {
            let mut answers = Answers::default();
            let mut running: Vec<(u32, u32)> = Vec::new();
            for now in 0..6_000 {
                if now % every == 0 {
                    running.push((now, length(now / every)));
                }
                running.retain(|&(began, length)| {
                    let tokens = now - began;
                    answers.on_output(tokens, tokens + 1);
                    if tokens + 1 == length {
                        answers.on_ended(length);
                    }
                    tokens + 1 < length
                });
            }
            near(answers.expected(USUAL).tokens, 550.0, 0.08);
        }
    }

    #[test]
    fn without_any_answer_the_usual_one_is_expected() {
        let expected = Answers::default().expected(USUAL);
        assert_eq!(
            (expected.tokens, expected.squares),
            (USUAL, 2.0 * USUAL * USUAL)
        );
        let expected = after(&[5_000; 40], 2_000).expected(USUAL).tokens;
        assert!((2_000.0..2_800.0).contains(&expected), "{expected}");
    }
}
