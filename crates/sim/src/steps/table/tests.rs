use super::*;
use crate::steps::testing::{decodes, prompts};

/// Prompts: tokens, context, seconds. Decodes: sequences, context, seconds.
fn measured(prefill: &[(f64, f64, f64)], decode: &[(f64, f64, f64)]) -> StepTable {
    let prompt = |&(tokens, context, seconds): &_| PrefillRow {
        tokens,
        context,
        seconds,
    };
    let decodes = |&(batch, context, seconds): &_| DecodeRow {
        batch,
        context,
        seconds,
    };
    let prefill: Vec<_> = prefill.iter().map(prompt).collect();
    let decode: Vec<_> = decode.iter().map(decodes).collect();
    StepTable::new(&prefill, &[], &decode, &[]).unwrap()
}

fn table() -> StepTable {
    let prefill = [
        (100.0, 0.0, 2.0),
        (200.0, 0.0, 3.0),
        (100.0, 100.0, 2.5),
        (200.0, 100.0, 4.0),
    ];
    let decode = [
        (1.0, 100.0, 1.0),
        (3.0, 100.0, 2.0),
        (1.0, 300.0, 2.0),
        (3.0, 300.0, 6.0),
    ];
    measured(&prefill, &decode)
}

#[test]
fn measured_points_are_met_and_what_is_between_is_linear() {
    let decode = |sequences: f64, context: f64| {
        table().step_s(&Work {
            sequences,
            kv_tokens: sequences * context,
            ..Work::default()
        })
    };
    assert_eq!(decode(3.0, 300.0), 6.0);
    assert_eq!(decode(2.0, 200.0), (1.5 + 4.0) / 2.0);
    assert_eq!(decode(5.0, 100.0), 3.0);
}

#[test]
fn a_step_that_only_decodes_is_padded_by_rows_without_tokens() {
    let padded = table().padded_to(vec![3.0, 1.0]);
    let step_s = |table: &StepTable, work: Work| table.step_s(&work);
    let decodes = Work {
        sequences: 2.0,
        kv_tokens: 600.0,
        ..Work::default()
    };
    assert_eq!(step_s(&padded, decodes), 4.0); // three rows of 200 tokens, not two of 300
    for (sequences, kv_tokens) in [(3.0, 600.0), (4.0, 800.0)] {
        let work = Work {
            sequences,
            kv_tokens,
            ..Work::default()
        };
        assert_eq!(step_s(&padded, work), step_s(&table(), work));
    }
    let beside = Work {
        prompt_tokens: 100.0,
        prompt_squares: 100.0 * 100.0,
        ..decodes
    };
    assert_eq!(step_s(&padded, beside), step_s(&table(), beside));
}

#[test]
fn prompts_of_one_step_count_as_one_and_share_the_step_with_decodes() {
    let prompt = Work {
        prompt_tokens: 100.0,
        prompt_squares: 200.0 * 200.0 - 100.0 * 100.0,
        ..Work::default()
    };
    assert_eq!(table().step_s(&prompt), 2.5);
    let beside = Work {
        sequences: 1.0,
        kv_tokens: 100.0,
        ..prompt
    };
    // The step's own second is the intercept of the first line.
    assert_eq!(table().step_s(&beside), 1.0 + 2.5 - 1.0);
}

#[test]
fn what_prompts_add_to_decodes_is_as_measured_and_grows_with_what_is_before_them() {
    let prefill = [
        (100.0, 0.0, 4.0),
        (200.0, 0.0, 5.0),
        (100.0, 100.0, 6.0),
        (200.0, 100.0, 8.0),
    ];
    let prefill = prefill.map(|(tokens, context, seconds)| PrefillRow {
        tokens,
        context,
        seconds,
    });
    let beside = [(100.0, 1.5), (200.0, 3.5)];
    let beside = beside.map(|(tokens, seconds)| BesideRow { tokens, seconds });
    let table = StepTable::new(&prefill, &[], &decodes(3.0), &beside).unwrap();
    let step = |sequences: f64, tokens: f64, context: f64| {
        table.step_s(&Work {
            sequences,
            kv_tokens: 100.0 * sequences,
            prompt_tokens: tokens,
            prompt_squares: (context + tokens).powi(2) - context * context,
        })
    };
    assert_eq!(step(0.0, 100.0, 0.0), 4.0);
    assert_eq!(step(2.0, 100.0, 0.0), 3.0 + 1.5);
    assert_eq!(step(2.0, 150.0, 0.0), 3.0 + 2.5);
    assert_eq!(step(2.0, 100.0, 100.0), 3.0 + 1.5 + 2.0);
    // No tokens add nothing.
    assert_eq!(step(2.0, 50.0, 0.0), 3.0 + 0.75);
}

#[test]
fn one_prompt_beside_decodes_suffices_and_may_take_no_time() {
    let both = |seconds| {
        let beside = [BesideRow {
            tokens: 16.0,
            seconds,
        }];
        let table = StepTable::new(
            &prompts([(16.0, 1.0), (64.0, 2.0)]),
            &[],
            &decodes(3.0),
            &beside,
        )
        .unwrap();
        table.step_s(&Work {
            sequences: 1.0,
            kv_tokens: 100.0,
            prompt_tokens: 32.0,
            prompt_squares: 32.0 * 32.0,
        })
    };
    assert_eq!(both(0.5), 3.0 + 1.0);
    assert_eq!(both(0.0), 3.0);
}

#[test]
fn short_prompts_attend_to_less_than_a_long_one_of_their_tokens() {
    let prefill = [
        (100.0, 0.0, 2.0),
        (200.0, 0.0, 4.0),
        (100.0, 100.0, 3.0),
        (200.0, 100.0, 6.0),
    ];
    let table = measured(&prefill, &[(1.0, 100.0, 1.0), (2.0, 100.0, 1.0)]);
    let prompts = |count: f64, tokens: f64| {
        table.step_s(&Work {
            prompt_tokens: count * tokens,
            prompt_squares: count * tokens * tokens,
            ..Work::default()
        })
    };
    assert_eq!(prompts(1.0, 200.0), 4.0);
    // Each attends to 50 tokens on average, 50 less than those of one prompt of 200.
    assert_eq!(prompts(2.0, 100.0), 3.0);
    assert!((prompts(200.0, 1.0) - 2.01).abs() < 1e-9);
}

#[test]
fn what_disturbed_a_measurement_makes_no_step_free() {
    let decode = [(1.0, 100.0, 1.0), (2.0, 100.0, 5.0), (4.0, 100.0, 2.0)];
    let prefill = [
        (100.0, 0.0, 3.0),
        (200.0, 0.0, 4.0),
        (100.0, 100.0, 1.0),
        (200.0, 100.0, 2.0),
    ];
    let table = measured(&prefill, &decode);
    let decodes = |sequences: f64| {
        table.step_s(&Work {
            sequences,
            kv_tokens: 100.0 * sequences,
            ..Work::default()
        })
    };
    assert_eq!((decodes(1.0), decodes(2.0), decodes(4.0)), (1.0, 3.5, 3.5));
    assert!(decodes(64.0) > 40.0, "{}", decodes(64.0));
    let prompt = |context: f64| {
        table.step_s(&Work {
            prompt_tokens: 100.0,
            prompt_squares: (context + 100.0).powi(2) - context * context,
            ..Work::default()
        })
    };
    assert_eq!(prompt(1_000.0), 1.0);
    assert!((table.largest_drop() - 0.6).abs() < 1e-9);
}

#[test]
fn what_is_smaller_than_all_that_was_measured_is_not_free() {
    let prefill = [(2048.0, 0.0, 0.029), (4096.0, 0.0, 0.060)]; // 2 ms less than nothing at 0
    let table = measured(&prefill, &[(1.0, 100.0, 0.002), (3.0, 100.0, 0.003)]);
    let step_s = |tokens: f64| {
        table.step_s(&Work {
            prompt_tokens: tokens,
            prompt_squares: tokens * tokens,
            ..Work::default()
        })
    };
    assert!(step_s(64.0) >= 0.029 * 64.0 / 2048.0 * 0.999);
    assert!(step_s(2048.0) < 0.030);
}

#[test]
fn a_table_without_two_sizes_is_refused() {
    let row = PrefillRow {
        tokens: 1.0,
        context: 0.0,
        seconds: 1.0,
    };
    let error = StepTable::new(&[row], &[], &[], &[]).unwrap_err();
    assert!(error.to_string().contains("--prefill-tokens"), "{error}");
}

#[test]
fn prompts_back_to_back_take_less_than_the_first_one() {
    let alone = prompts([(100.0, 3.0), (200.0, 4.5)]);
    let steady = prompts([(100.0, 2.0), (200.0, 4.0)]);
    let table = StepTable::new(&alone, &steady, &decodes(3.0), &[]).unwrap();
    let prompt = Work {
        prompt_tokens: 150.0,
        prompt_squares: 150.0 * 150.0,
        ..Work::default()
    };
    assert_eq!(table.step_s(&prompt), 3.0);
    assert_eq!(table.first_longer_s(&prompt), 0.75);
    let beside = Work {
        sequences: 1.0,
        kv_tokens: 100.0,
        ..prompt
    };
    assert_eq!(table.first_longer_s(&beside), 0.0);
    let same = StepTable::new(&alone, &[], &decodes(3.0), &[]).unwrap();
    assert_eq!(same.first_longer_s(&prompt), 0.0);
}
