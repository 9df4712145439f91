//! The pace of hardware by its first prompt.

use super::*;

/// A prompt of 384 tokens, computed alone.
fn prompt_step(number: u64, duration_s: f64) -> StepSample {
    alone(number, 384, duration_s)
}

/// A prompt of so many tokens, computed alone.
fn alone(number: u64, tokens: u32, duration_s: f64) -> StepSample {
    StepSample {
        number,
        duration_s,
        prefill_tokens: tokens,
        prefill_squares: f64::from(tokens).powi(2),
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

#[test]
fn what_is_left_of_cached_prompts_teaches_what_a_step_takes() {
    let (mut hardware, mut draw) = (Hardware::default(), Draw(7));
    let class = hardware.class(&HardwareClass::default());
    // The first prompts come while the machine is busy.
    hardware.learn(class, &alone(1, 100, 0.06));
    hardware.learn(class, &alone(2, 1_500, 0.09));
    let before = hardware.rates()[0];
    for number in 3..=40 {
        let tokens = 1 + (14.0 * draw.next()) as u32;
        hardware.learn(class, &alone(number, tokens, 0.004));
    }
    let after = hardware.rates()[0];
    assert!(before.prompt_step_s > 0.02, "{before:?}");
    assert!(near(after.prompt_step_s, 0.004, 0.2), "{after:?}");
    assert!(after.prompt_s(1_500.0, 0.0) > 0.02, "{after:?}");
}
