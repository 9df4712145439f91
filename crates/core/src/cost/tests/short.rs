//! Steps that do not tell what KV costs: too short, too alike, or against all sense.

use super::*;

/// The proportions of an H200 at the pace of a tiny model on a CPU.
const TINY: Rates = Rates {
    step_s: 1e-3,
    sequence_s: 6e-6,
    kv_token_s: 1e-8,
    ..H200
};

fn fresh() -> Hardware {
    let mut hardware = Hardware::default();
    hardware.class(&HardwareClass::default());
    hardware
}

/// Fails if the KV of 10,000 tokens costs less than a tenth of an empty step.
fn assert_kv_counts(hardware: &Hardware, what: &str) {
    let rates = hardware.rates()[0];
    let far_s = 10_000.0 * rates.kv_token_s;
    assert!(far_s > 0.1 * TINY.step_s, "{what}: {rates:?}");
}

#[test]
fn kv_has_a_price_where_its_part_of_every_step_is_below_the_noise() {
    for seed in 0..50 {
        let (mut draw, mut hardware) = (Draw(seed), fresh());
        for number in 1..=400 {
            let sequences = 1 + (4.0 * draw.next()) as u32;
            let kv_tokens = u64::from(sequences) * (20 + (80.0 * draw.next()) as u64);
            let mut sample = decode_step(number, &TINY, sequences, kv_tokens);
            sample.duration_s *= 0.85 + 0.3 * draw.next();
            hardware.learn(0, &sample);
            assert_kv_counts(&hardware, &format!("{number} of {seed}"));
        }
        let rates = hardware.rates()[0];
        assert!(rates.kv_token_s < 20.0 * TINY.kv_token_s, "{rates:?}");
        assert!(near(rates.step_s, TINY.step_s, 0.1), "{rates:?}");
    }
}

#[test]
fn kv_has_a_price_where_steps_become_faster_while_one_context_grows() {
    let mut hardware = fresh();
    for number in 1..=200 {
        let mut sample = decode_step(number, &TINY, 1, 20 + number);
        sample.duration_s *= 1.0 + 3.0 / number as f64;
        hardware.learn(0, &sample);
        assert_kv_counts(&hardware, &number.to_string());
    }
}

#[test]
fn steps_of_all_sizes_teach_the_truth_far_from_the_priors_pace_and_proportions() {
    let prior = Rates::default();
    let cases = [0.04, 1.0, 25.0].into_iter().flat_map(|pace| {
        let kv = [0.1, 1.0, 3.0].into_iter();
        kv.map(move |kv_token| Rates {
            step_s: pace * prior.step_s,
            sequence_s: pace * prior.sequence_s / 3.0,
            kv_token_s: pace * kv_token * prior.kv_token_s,
            prompt_step_s: pace * prior.prompt_step_s,
            prompt_token_s: pace * prior.prompt_token_s / 3.0,
            prompt_square_s: pace * kv_token * prior.prompt_square_s,
        })
    });
    for (seed, truth) in (0..).zip(cases) {
        let learnt = measured(&truth, &mut Draw(seed)).rates()[0];
        for (sequences, kv_tokens) in [(1.0, 770.0), (32.0, 163_200.0), (96.0, 400_000.0)] {
            let wanted_s = truth.decode_s(sequences, kv_tokens);
            let got_s = learnt.decode_s(sequences, kv_tokens);
            assert!(near(got_s, wanted_s, 0.1), "{truth:?} {learnt:?}");
        }
        let kv_s = 400_000.0 * (learnt.kv_token_s - truth.kv_token_s);
        let busy_s = truth.decode_s(96.0, 400_000.0);
        assert!(kv_s.abs() < 0.1 * busy_s, "{truth:?} {learnt:?}");
    }
}

#[test]
fn a_coefficient_as_low_as_it_gets_is_not_the_end_of_learning() {
    let mut fit = LinearFit::new([0.03, 5e-4, 2.5e-8], 10.0);
    for _ in 0..200 {
        // More takes less: only the constant is left.
        fit.learn([1.0, 16.0, 256.0], 0.1);
        fit.learn([1.0, 160.0, 25_600.0], 0.05);
    }
    let [step_s, sequence_s, token_s] = fit.coefficients();
    let measurable_s = 0.03 * step_s;
    assert!(160.0 * sequence_s < measurable_s && 25_600.0 * token_s < measurable_s);
    let before = fit.at(&[0.0, 16.0, 256.0]);
    for y in [0.01, 1e-300, 0.01] {
        fit.learn([0.0, 16.0, 256.0], y);
    }
    let expected = fit.at(&[0.0, 16.0, 256.0]);
    assert!(expected > 2.0 * before && expected.is_finite(), "{fit:?}");
}
