//! What steps that decode take on one worker, with prompts in them or without.

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
