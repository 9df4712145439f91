//! What chunks of prompts add to steps that decode.

use super::*;

const DECODE_S: f64 = 5e-3;

/// Learns 300 chunks of 16 to 1,024 tokens; `seconds`: of a chunk by its tokens.
fn learnt(seconds: impl Fn(f64) -> f64, noise: f64, seed: u64) -> ChunkFit {
    let (mut fit, mut draw) = (ChunkFit::default(), Draw(seed));
    for _ in 0..300 {
        let tokens = (16.0 * 64f64.powf(draw.next())).round();
        let step_s = DECODE_S + seconds(tokens);
        let step_s = step_s * (1.0 - noise + 2.0 * noise * draw.next());
        fit.learn(tokens as u32, tokens * tokens, step_s, DECODE_S);
    }
    fit
}

#[test]
fn nothing_measured_is_no_overhead() {
    assert_eq!(ChunkFit::default().overhead_tokens(), 0.0);
}

#[test]
fn an_overhead_is_told_from_what_each_token_takes() {
    for seed in 0..20 {
        for (overhead_s, token_s) in [(20e-3, 2e-5), (5e-3, 1e-4)] {
            for noise in [0.0, 0.1] {
                let fit = learnt(|tokens| overhead_s + token_s * tokens, noise, seed);
                let (got, wanted) = (fit.overhead_tokens(), overhead_s / token_s);
                assert!(got > 0.5 * wanted && got < 2.0 * wanted, "{got} {wanted}");
            }
        }
    }
}

/// A worker gives prompts half of the overhead's tokens, and four fifths of the decodes' time.
#[test]
fn where_there_is_none_what_is_taken_for_it_is_less_than_prompts_get_anyway() {
    let token_s = 1e-5;
    for seed in 0..20 {
        for noise in [0.0, 0.1] {
            let got = learnt(|tokens| token_s * tokens, noise, seed).overhead_tokens();
            assert!(0.5 * got * token_s < 0.8 * DECODE_S, "{got}");
        }
    }
}
