//! What steps that decode take on one worker, with prompts in them or without, and what a chunk of
//! prompts adds to one.

use super::fit::LinearFit;
use super::hardware::Rates;

/// The first step sets the pace; how it divides may be wrong by this factor.
const DOUBT: f64 = 10.0;

/// `step + sequence x sequences + kv_token x KV tokens + prompt_token x prompt tokens`, fitted to
/// steps that decode. So the decodes' part is known also where no step only decodes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepFit {
    fit: Option<LinearFit<4>>,
}

impl StepFit {
    /// Takes a step into account.
    pub fn learn(&mut self, sequences: u32, kv_tokens: u64, prompt_tokens: u32, duration_s: f64) {
        let x = [
            1.0,
            f64::from(sequences),
            kv_tokens as f64,
            f64::from(prompt_tokens),
        ];
        let fit = self.fit.get_or_insert_with(|| prior(&x, duration_s));
        fit.learn(x, duration_s);
    }

    /// Of a step that only decodes, in seconds; 0 before the first step.
    pub fn decode_s(&self, sequences: u32, kv_tokens: u64) -> f64 {
        let x = [1.0, f64::from(sequences), kv_tokens as f64, 0.0];
        self.fit.map_or(0.0, |fit| fit.at(&x))
    }

    /// What a prompt token adds to a step, in seconds; 0 before the first step.
    pub fn prompt_token_s(&self) -> f64 {
        self.fit.map_or(0.0, |fit| fit.coefficients()[3])
    }
}

/// Of a step: what its chunk counts for at least. A chunk that adds less cannot be told from noise.
const LEAST_ADDED: f64 = 0.25;

/// What a chunk of prompts adds to a step that decodes:
/// `overhead + token x tokens + square x squares`, fitted to steps with chunks of several sizes.
///
/// Where decodes read all weights anyway there is almost no overhead. A few decodes read few
/// experts, and a few prompt tokens beside them read nearly all.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ChunkFit {
    fit: Option<LinearFit<3>>,
    /// Squares of a token in the newest step.
    depth: f64,
}

impl ChunkFit {
    /// Takes a step into account.
    ///
    /// `prompt_squares`: sum over prompts of `end² - start²`; `step_s`: of the whole step;
    /// `decode_s`: of its decodes alone.
    pub fn learn(&mut self, prompt_tokens: u32, prompt_squares: f64, step_s: f64, decode_s: f64) {
        if prompt_tokens == 0 {
            return;
        }
        let tokens = f64::from(prompt_tokens);
        let x = [1.0, tokens, prompt_squares];
        let added_s = Self::added_s(step_s, decode_s);
        let fit = self.fit.get_or_insert_with(|| {
            let usual = Rates::default();
            let usual = [
                usual.prompt_step_s,
                usual.prompt_token_s,
                usual.prompt_square_s,
            ];
            LinearFit::new(usual, DOUBT).at_pace_of(&x, added_s)
        });
        fit.learn(x, added_s);
        self.depth = prompt_squares / tokens;
    }

    /// How far a step is from what is known already, as a share of what its chunk adds.
    pub fn surprise(
        &self,
        prompt_tokens: u32,
        prompt_squares: f64,
        step_s: f64,
        decode_s: f64,
    ) -> f64 {
        let x = [1.0, f64::from(prompt_tokens), prompt_squares];
        let added_s = Self::added_s(step_s, decode_s);
        let off = |fit: LinearFit<3>| (fit.at(&x) / added_s - 1.0).abs();
        self.fit.map_or(f64::INFINITY, off)
    }

    fn added_s(step_s: f64, decode_s: f64) -> f64 {
        (step_s - decode_s).max(LEAST_ADDED * step_s)
    }

    /// Tokens of the newest step's prompts that take as long as the overhead; 0 before the first
    /// step.
    pub fn overhead_tokens(&self) -> f64 {
        self.fit.map_or(0.0, |fit| {
            let [overhead_s, token_s, square_s] = fit.coefficients();
            overhead_s / (token_s + square_s * self.depth)
        })
    }
}

/// Usual proportions at the pace of this step.
fn prior(x: &[f64; 4], duration_s: f64) -> LinearFit<4> {
    let usual = Rates::default();
    let usual = [
        usual.step_s,
        usual.sequence_s,
        usual.kv_token_s,
        usual.prompt_token_s,
    ];
    let usual_s: f64 = usual.iter().zip(x).map(|(a, b)| a * b).sum();
    let pace = match duration_s / usual_s {
        pace if pace.is_finite() && pace > 0.0 => pace,
        _ => 1.0,
    };
    LinearFit::new(usual.map(|part| part * pace), DOUBT)
}
