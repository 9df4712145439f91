//! How many tokens prompts and answers have.

use clap::ValueEnum;
use rand::Rng;
use serde::Serialize;

use crate::seeds::{Purpose, generator, stream};

/// What a range ratio r means for a length L.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RangeConvention {
    /// U[L (1 - r), L (1 + r)], as `vllm bench serve` draws: 0 is fixed, and the mean is L.
    Vllm,
    /// U[r L, L], as SGLang's bench_serving draws: 1 is fixed, and the mean is L (1 + r) / 2.
    Sglang,
}

/// The lengths of a workload's requests.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Lengths {
    pub input_tokens: u32,
    pub output_tokens: u32,
    /// None: every request has exactly these lengths.
    pub range_ratio: Option<f64>,
    pub range_convention: Option<RangeConvention>,
}

impl Lengths {
    /// The same for every request.
    #[must_use]
    pub fn fixed(input_tokens: u32, output_tokens: u32) -> Self {
        Self {
            input_tokens,
            output_tokens,
            range_ratio: None,
            range_convention: None,
        }
    }

    /// What inputs can be.
    #[must_use]
    pub fn input(&self) -> Length {
        self.around(self.input_tokens)
    }

    /// What outputs can be.
    #[must_use]
    pub fn output(&self) -> Length {
        self.around(self.output_tokens)
    }

    /// The input and output tokens of a request: a function of its index, so
    /// that the order in which answers come changes nothing.
    #[must_use]
    pub fn of(&self, seed: u64, index: usize) -> (u32, u32) {
        let mut generator = generator(seed, stream(Purpose::Lengths, index as u64));
        let input = self.input().draw(&mut generator);
        (input, self.output().draw(&mut generator))
    }

    fn around(&self, tokens: u32) -> Length {
        match (self.range_ratio, self.range_convention) {
            // One token is one token, so that prefill-only stays what it is.
            (Some(ratio), Some(convention)) if tokens > 1 => {
                Length::ranged(tokens, ratio, convention)
            }
            _ => Length::fixed(tokens),
        }
    }
}

/// A length: fixed, or drawn evenly from a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Length {
    least: u32,
    most: u32,
}

impl Length {
    /// Always `tokens`, at least 1.
    #[must_use]
    pub fn fixed(tokens: u32) -> Self {
        let tokens = tokens.max(1);
        Self {
            least: tokens,
            most: tokens,
        }
    }

    /// The range of a ratio between 0 and 1; at least 1 token.
    ///
    /// Source: `get_sampling_params` of vLLM's benchmark data sets and
    /// `compute_random_lens` of SGLang, rounding included.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub fn ranged(tokens: u32, ratio: f64, convention: RangeConvention) -> Self {
        let exact = f64::from(tokens);
        let (least, most) = match convention {
            RangeConvention::Vllm => (
                (exact * (1.0 - ratio)).floor() as u32,
                (exact * (1.0 + ratio)).ceil() as u32,
            ),
            RangeConvention::Sglang => ((exact * ratio) as u32, tokens),
        };
        let least = least.max(1);
        Self {
            least,
            most: most.max(least),
        }
    }

    /// The shortest.
    #[must_use]
    pub fn least(self) -> u32 {
        self.least
    }

    /// The longest.
    #[must_use]
    pub fn most(self) -> u32 {
        self.most
    }

    /// One length.
    pub fn draw(self, generator: &mut impl Rng) -> u32 {
        generator.random_range(self.least..=self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::{Length, Lengths, RangeConvention};

    fn range(tokens: u32, ratio: f64, convention: RangeConvention) -> (u32, u32) {
        let length = Length::ranged(tokens, ratio, convention);
        (length.least(), length.most())
    }

    #[test]
    fn the_conventions_differ_as_their_owners_have_them() {
        use RangeConvention::{Sglang, Vllm};
        assert_eq!(range(1000, 0.25, Vllm), (750, 1250));
        assert_eq!(range(1000, 0.25, Sglang), (250, 1000));
        assert_eq!(range(1000, 0.0, Vllm), (1000, 1000));
        assert_eq!(range(1000, 0.0, Sglang), (1, 1000));
        assert_eq!(range(1000, 1.0, Vllm), (1, 2000));
        assert_eq!(range(1000, 1.0, Sglang), (1000, 1000));
        assert_eq!(range(5, 0.5, Vllm), (2, 8));
        assert_eq!(range(5, 0.5, Sglang), (2, 5));
        assert_eq!(range(1, 0.5, Sglang), (1, 1));
    }

    #[test]
    fn draws_fill_the_range_evenly() {
        let lengths = Lengths {
            range_ratio: Some(0.5),
            range_convention: Some(RangeConvention::Vllm),
            ..Lengths::fixed(100, 10)
        };
        let drawn: Vec<(u32, u32)> = (0..20_000).map(|i| lengths.of(7, i)).collect();
        let inputs = || drawn.iter().map(|(input, _)| *input);
        assert_eq!((inputs().min(), inputs().max()), (Some(50), Some(150)));
        let outputs = || drawn.iter().map(|(_, output)| *output);
        assert_eq!((outputs().min(), outputs().max()), (Some(5), Some(15)));
        // The standard error of the mean is 29.2 / sqrt(20,000) = 0.21.
        let mean = inputs().map(f64::from).sum::<f64>() / 20_000.0;
        assert!((mean - 100.0).abs() < 1.0, "{mean}");
        assert_ne!(lengths.of(7, 0), lengths.of(8, 0));
        assert_eq!(Lengths::fixed(9, 0).of(7, 3), (9, 1));
    }
}
