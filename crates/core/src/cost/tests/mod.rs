mod chunks;
mod pace;
mod prices;
mod short;
mod waiting;

use super::*;
use crate::WorkerId;

/// Deterministic numbers in `0..1`.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// An H200's steps with Qwen3-4B's shape (benchmarks/RESULTS.md), roughly.
const H200: Rates = Rates {
    step_s: 2.7e-3,
    sequence_s: 1.5e-5,
    kv_token_s: 2.6e-8,
    prompt_step_s: 2.6e-3,
    prompt_token_s: 1.1e-5,
    prompt_square_s: 5e-10,
};

fn decode_step(number: u64, rates: &Rates, sequences: u32, kv_tokens: u64) -> StepSample {
    StepSample {
        number,
        duration_s: rates.decode_s(f64::from(sequences), kv_tokens as f64),
        sequences,
        kv_tokens,
        ..StepSample::default()
    }
}

fn near(got: f64, wanted: f64, share: f64) -> bool {
    (got / wanted - 1.0).abs() < share
}

/// Hardware of one class that has measured steps of all sizes, a tenth off either way.
fn measured(rates: &Rates, draw: &mut Draw) -> Hardware {
    let mut hardware = Hardware::default();
    let class = hardware.class(&HardwareClass::default());
    for number in 1..400 {
        let sequences = 1 + (draw.next() * 95.0) as u32;
        let kv_tokens = u64::from(sequences) * (100 + (draw.next() * 5_000.0) as u64);
        let mut sample = decode_step(number, rates, sequences, kv_tokens);
        sample.duration_s *= 0.9 + 0.2 * draw.next();
        hardware.learn(class, &sample);
        let (start, tokens) = (
            (draw.next() * 9_000.0).floor(),
            16.0 + (draw.next() * 2_000.0).floor(),
        );
        let own_s = rates.prompt_step_s + rates.prompt_s(start + tokens, start);
        hardware.learn(
            class,
            &StepSample {
                number,
                duration_s: own_s * (0.9 + 0.2 * draw.next()),
                prefill_tokens: tokens as u32,
                prefill_squares: (start + tokens).powi(2) - start.powi(2),
                ..StepSample::default()
            },
        );
    }
    hardware
}

#[test]
fn noisy_steps_of_all_sizes_teach_their_rates() {
    let learnt = measured(&H200, &mut Draw(1)).rates()[0];
    for (sequences, kv_tokens) in [(1.0, 770.0), (32.0, 163_200.0), (96.0, 73_920.0)] {
        let wanted = H200.decode_s(sequences, kv_tokens);
        assert!(
            near(learnt.decode_s(sequences, kv_tokens), wanted, 0.05),
            "{learnt:?}"
        );
    }
    for tokens in [500.0, 4_000.0, 11_000.0] {
        let wanted = H200.prompt_step_s + H200.prompt_s(tokens, 0.0);
        let got = learnt.prompt_step_s + learnt.prompt_s(tokens, 0.0);
        assert!(near(got, wanted, 0.1), "{learnt:?}");
    }
}

#[test]
fn a_short_prompt_says_little_of_a_long_one() {
    // On two cores 19 tokens take as long as the weights take to be read, and 900 take a second.
    let mut hardware = Hardware::default();
    let class = hardware.class(&HardwareClass::default());
    for number in 1..20 {
        let sample = StepSample {
            number,
            duration_s: 0.1,
            prefill_tokens: 19,
            prefill_squares: 361.0,
            ..StepSample::default()
        };
        hardware.learn(class, &sample);
        let learnt = hardware.rates()[class];
        let long_s = learnt.prompt_step_s + learnt.prompt_s(900.0, 0.0);
        assert!((0.3..2.0).contains(&long_s), "{long_s} after {number}");
    }
}

#[test]
fn what_was_learnt_is_kept_while_other_sizes_are_measured() {
    let mut hardware = measured(&H200, &mut Draw(2));
    let busy_s = |hardware: &Hardware| hardware.rates()[0].decode_s(96.0, 400_000.0);
    let before_s = busy_s(&hardware);
    for number in 1_000..20_000 {
        hardware.learn(0, &decode_step(number, &H200, 1, 300));
    }
    assert!(near(busy_s(&hardware), before_s, 0.1));
}

#[test]
fn hardware_that_becomes_slower_is_noticed() {
    let mut hardware = measured(&H200, &mut Draw(3));
    let slower = Rates {
        step_s: 2.0 * H200.step_s,
        sequence_s: 2.0 * H200.sequence_s,
        kv_token_s: 2.0 * H200.kv_token_s,
        ..H200
    };
    let mut draw = Draw(4);
    for number in 1_000..1_400 {
        let sequences = 1 + (draw.next() * 95.0) as u32;
        let kv_tokens = u64::from(sequences) * (100 + (draw.next() * 5_000.0) as u64);
        hardware.learn(0, &decode_step(number, &slower, sequences, kv_tokens));
    }
    let learnt_s = hardware.rates()[0].decode_s(32.0, 30_000.0);
    assert!(near(learnt_s, slower.decode_s(32.0, 30_000.0), 0.1));
}

#[test]
fn one_unlucky_step_moves_little() {
    let mut hardware = measured(&H200, &mut Draw(5));
    let before_s = hardware.rates()[0].decode_s(32.0, 30_000.0);
    let mut stalled = decode_step(999, &H200, 32, 30_000);
    stalled.duration_s = 10.0;
    hardware.learn(0, &stalled);
    assert!(near(
        hardware.rates()[0].decode_s(32.0, 30_000.0),
        before_s,
        0.05
    ));
    for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let before = hardware.rates()[0];
        stalled.duration_s = bad;
        hardware.learn(0, &stalled);
        assert_eq!(hardware.rates()[0], before);
    }
}

#[test]
fn rates_are_finite_and_never_negative_whatever_is_measured() {
    let mut draw = Draw(6);
    for _ in 0..200 {
        let mut hardware = Hardware::default();
        let class = hardware.class(&HardwareClass::default());
        for number in 1..100 {
            let chunk = if draw.next() < 0.5 {
                0.0
            } else {
                3_000.0 * draw.next()
            };
            hardware.learn(
                class,
                &StepSample {
                    number,
                    duration_s: 1e-4 * 10f64.powf(5.0 * draw.next()),
                    sequences: (100.0 * draw.next()) as u32,
                    kv_tokens: (1e6 * draw.next()) as u64,
                    prefill_tokens: chunk as u32,
                    prefill_squares: chunk * 2e4 * draw.next(),
                },
            );
            let Rates {
                step_s,
                sequence_s,
                kv_token_s,
                prompt_step_s,
                prompt_token_s,
                prompt_square_s,
            } = hardware.rates()[class];
            for rate in [
                step_s,
                sequence_s,
                kv_token_s,
                prompt_step_s,
                prompt_token_s,
                prompt_square_s,
            ] {
                assert!(rate.is_finite() && rate >= 0.0, "{:?}", hardware.rates());
            }
        }
    }
}

#[test]
fn doubt_falls_with_samples_like_the_question() {
    let mut fit = LinearFit::new([1.0, 1.0], 10.0);
    let doubts: Vec<f64> = (0..20)
        .map(|_| {
            fit.learn([1.0, 4.0], 3.0);
            fit.doubt(&[1.0, 4.0])
        })
        .collect();
    assert!(
        doubts.windows(2).all(|pair| pair[1] < pair[0]),
        "{doubts:?}"
    );
    assert!(doubts[19] < 0.05, "{doubts:?}");
    assert!(fit.doubt(&[1.0, 400.0]) > 5.0 * doubts[19]);
}

#[test]
fn a_class_that_measured_nothing_is_as_fast_as_the_others() {
    let mut hardware = measured(&H200, &mut Draw(7));
    let slow = HardwareClass {
        device: "slow".to_owned(),
        ..HardwareClass::default()
    };
    let class = hardware.class(&slow);
    let known = hardware.rates()[0].decode_s(8.0, 8_000.0);
    assert!(near(
        hardware.rates()[class].decode_s(8.0, 8_000.0),
        known,
        0.05
    ));
    let ten_times = Rates {
        step_s: 0.027,
        ..H200
    };
    for number in 1..30 {
        hardware.learn(class, &decode_step(number, &ten_times, 8, 8_000));
    }
    let learnt_s = hardware.rates()[class].decode_s(8.0, 8_000.0);
    assert!(
        near(learnt_s, ten_times.decode_s(8.0, 8_000.0), 0.1),
        "{learnt_s}"
    );
    assert!(
        near(hardware.rates()[0].decode_s(8.0, 8_000.0), known, 1e-9),
        "nor do they mix"
    );
}

#[test]
fn handoffs_teach_their_link_and_the_other_is_never_cheaper() {
    let mut links = Links::default();
    for _ in 0..100 {
        for tokens in [100, 1_000, 8_000] {
            links.learn(true, tokens, 1e-3 + 1e-7 * tokens as f64);
        }
    }
    assert!(near(links.handoff_s(true, 4_000.0), 1.4e-3, 0.05));
    assert!(links.handoff_s(false, 4_000.0) > 5e-3, "not measured");
    for _ in 0..100 {
        links.learn(false, 4_000, 1e-5);
    }
    assert_eq!(
        links.handoff_s(false, 4_000.0),
        links.handoff_s(true, 4_000.0)
    );
}

fn price(request: &RequestView) -> Price {
    Price::new(CostConfig::default(), H200, request)
}

const IDLE: Load = Load {
    backlog_tokens: 0.0,
    sequences: 0.0,
    stalled_sequences: 0.0,
    kv_tokens: 0.0,
    spare_tokens: 1e6,
};
