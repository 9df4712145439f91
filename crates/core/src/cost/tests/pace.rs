//! The pace of hardware by its first prompt.

use super::*;

/// A prompt of 384 tokens, computed alone.
fn prompt_step(number: u64, duration_s: f64) -> StepSample {
    StepSample {
        number,
        duration_s,
        prefill_tokens: 384,
        prefill_squares: 384.0_f64.powi(2),
        ..StepSample::default()
    }
}

#[test]
fn hardware_far_faster_than_the_prior_still_takes_time_for_each_token_of_a_prompt() {
    let mut hardware = Hardware::default();
    let class = hardware.class(&HardwareClass::default());
    for number in 1..=20 {
        hardware.learn(class, &prompt_step(number, 0.008));
        let rates = hardware.rates()[0];
        let tokens_s = rates.prompt_s(384.0, 0.0);
        assert!(tokens_s > 0.001, "{rates:?}");
        assert!(
            near(rates.prompt_step_s + tokens_s, 0.008, 0.05),
            "{rates:?}"
        );
    }
}

#[test]
fn a_duration_that_cannot_be_is_not_the_pace() {
    let mut hardware = Hardware::default();
    let class = hardware.class(&HardwareClass::default());
    for (number, duration_s) in (1..).zip([0.0, -1.0, f64::NAN, f64::INFINITY]) {
        hardware.learn(class, &prompt_step(number, duration_s));
        assert_eq!(hardware.rates()[0], Rates::default(), "{duration_s}");
    }
}
