//! How fast hardware is, learnt from the steps that workers report.

use super::fit::LinearFit;
use crate::Identity;

/// What makes workers equally fast, as far as is known before anything is measured.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct HardwareClass {
    pub device: String,
    /// The model, its weights and dtypes.
    pub identity: Identity,
    pub tensor_parallel: u32,
}

/// One step of an engine and its duration.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepSample {
    /// Of the step: a repeated sample has the same.
    pub number: u64,
    pub duration_s: f64,
    /// That decoded.
    pub sequences: u32,
    /// That these attended to.
    pub kv_tokens: u64,
    /// Computed.
    pub prefill_tokens: u32,
    /// Sum over prompts of `end² - start²`, of the positions computed.
    pub prefill_squares: f64,
}

/// What steps take on one class of hardware.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Of a decode step, whatever is in it.
    pub step_s: f64,
    pub sequence_s: f64,
    /// For each token of KV that a decode step reads.
    pub kv_token_s: f64,
    /// Of a step that computes prompts alone, whatever is in it: with few tokens it is all.
    pub prompt_step_s: f64,
    /// For each token of a prompt.
    pub prompt_token_s: f64,
    /// For each squared token of a prompt.
    pub prompt_square_s: f64,
}

impl Default for Rates {
    /// Before any measurement: in the proportions of a GPU, at the pace of a small CPU.
    fn default() -> Self {
        Self {
            step_s: 0.03,
            sequence_s: 4e-4,
            kv_token_s: 3e-7,
            prompt_step_s: 0.03,
            prompt_token_s: 5e-4,
            prompt_square_s: 2.5e-8,
        }
    }
}

impl Rates {
    /// The mean of several; the default if there are none.
    pub fn mean(all: impl Iterator<Item = Self>) -> Self {
        let mut count = 0.0;
        let mut sum = [0.0; 6];
        for rates in all {
            count += 1.0;
            let parts = rates.parts();
            sum.iter_mut()
                .zip(parts)
                .for_each(|(sum, part)| *sum += part);
        }
        if count == 0.0 {
            return Self::default();
        }
        Self::of(sum.map(|part| part / count))
    }

    fn parts(&self) -> [f64; 6] {
        [
            self.step_s,
            self.sequence_s,
            self.kv_token_s,
            self.prompt_step_s,
            self.prompt_token_s,
            self.prompt_square_s,
        ]
    }

    fn of(
        [
            step_s,
            sequence_s,
            kv_token_s,
            prompt_step_s,
            prompt_token_s,
            prompt_square_s,
        ]: [f64; 6],
    ) -> Self {
        Self {
            step_s,
            sequence_s,
            kv_token_s,
            prompt_step_s,
            prompt_token_s,
            prompt_square_s,
        }
    }

    /// A step that decodes so many sequences, with so many tokens of KV together.
    #[inline]
    pub fn decode_s(&self, sequences: f64, kv_tokens: f64) -> f64 {
        self.step_s + self.sequence_s * sequences + self.kv_token_s * kv_tokens
    }

    /// What a prompt of `tokens`, of which the first `cached` are there already, adds to a step.
    #[inline]
    pub fn prompt_s(&self, tokens: f64, cached: f64) -> f64 {
        self.prompt_token_s * (tokens - cached)
            + self.prompt_square_s * (tokens * tokens - cached * cached)
    }
}

/// A prior may be wrong by this factor; all is learnt within a few samples.
const DOUBT: f64 = 10.0;
/// Beside decodes smaller chunks say little about the prefill rate. Alone they say what a step takes.
const LEAST_CHUNK_TOKENS: u32 = 16;

/// The fitted models of one class.
#[derive(Debug, Clone, Copy, PartialEq)]
struct HardwareFit {
    step: LinearFit<3>,
    prompt: LinearFit<3>,
}

impl Default for HardwareFit {
    fn default() -> Self {
        let prior = Rates::default();
        let step = [prior.step_s, prior.sequence_s, prior.kv_token_s];
        let prompt = [
            prior.prompt_step_s,
            prior.prompt_token_s,
            prior.prompt_square_s,
        ];
        Self {
            step: LinearFit::new(step, DOUBT),
            prompt: LinearFit::new(prompt, DOUBT),
        }
    }
}

impl HardwareFit {
    fn learn(&mut self, sample: &StepSample) {
        let decode = [1.0, f64::from(sample.sequences), sample.kv_tokens as f64];
        let tokens = sample.prefill_tokens;
        if tokens == 0 && sample.sequences > 0 {
            self.step.learn(decode, sample.duration_s);
        }
        if tokens >= LEAST_CHUNK_TOKENS || tokens > 0 && sample.sequences == 0 {
            let (alone, decode_s) = match sample.sequences {
                0 => (1.0, 0.0),
                _ => (0.0, self.step.at(&decode)),
            };
            // Decodes beside a prompt cost less than a step of their own.
            let own_s = (sample.duration_s - decode_s).max(sample.duration_s / 2.0);
            let x = [alone, f64::from(tokens), sample.prefill_squares];
            if self.prompt.samples() == 0 {
                self.prompt = self.prompt.at_pace_of(&x, own_s);
            }
            self.prompt.learn(x, own_s);
        }
    }
}

/// The hardware of a fleet, by class. Workers of one class share what any of them measures.
#[derive(Debug, Clone, Default)]
pub struct Hardware {
    classes: Vec<(HardwareClass, HardwareFit)>,
    /// Of all classes: what a class that measured nothing is expected to do.
    pooled: HardwareFit,
    rates: Vec<Rates>,
}

impl Hardware {
    /// The index of a class, which is added if it is new.
    pub fn class(&mut self, class: &HardwareClass) -> usize {
        let known = self.classes.iter().position(|(known, _)| known == class);
        known.unwrap_or_else(|| {
            self.classes.push((class.clone(), HardwareFit::default()));
            self.rates.push(Rates::default());
            self.refresh();
            self.classes.len() - 1
        })
    }

    /// Takes a step on hardware of that class into account.
    pub fn learn(&mut self, class: usize, sample: &StepSample) {
        let Some((_, fit)) = self.classes.get_mut(class) else {
            return;
        };
        // Its first sample starts from what is known of the others.
        if fit.step.samples() == 0 {
            fit.step = self.pooled.step.doubted(DOUBT);
        }
        if fit.prompt.samples() == 0 {
            fit.prompt = self.pooled.prompt.doubted(DOUBT);
        }
        fit.learn(sample);
        self.pooled.learn(sample);
        self.refresh();
    }

    /// Every class and its rates, in the order of their indices.
    pub fn classes(&self) -> impl Iterator<Item = (&HardwareClass, &Rates)> {
        let classes = self.classes.iter().map(|(class, _)| class);
        classes.zip(&self.rates)
    }

    /// By class.
    pub fn rates(&self) -> &[Rates] {
        &self.rates
    }

    fn refresh(&mut self) {
        for ((_, fit), rates) in self.classes.iter().zip(&mut self.rates) {
            let known = |own: u64| own > 0;
            let step = if known(fit.step.samples()) {
                &fit.step
            } else {
                &self.pooled.step
            };
            let prompt = if known(fit.prompt.samples()) {
                &fit.prompt
            } else {
                &self.pooled.prompt
            };
            let ([a, b, c], [d, e, f]) = (step.coefficients(), prompt.coefficients());
            *rates = Rates::of([a, b, c, d, e, f]);
        }
    }
}
