//! Every instance against float64.

use super::functions::{exp2, silu};
use super::*;
use crate::testing::{Numbers, bits, each_instance, wide};

each_instance!(
    powers_and_silu_agree_with_the_library,
    what_is_not_finite_stays_so,
    parts_of_vectors_leave_their_neighbours_alone,
    bfloat16_is_rounded_to_the_nearest,
    every_int8_number_is_exact,
    a_dot_product_is_a_sum_of_terms,
);

/// Apply a function to a number in every lane.
fn apply<S: Simd>(x: f32, f: unsafe fn(Vector<S>) -> Vector<S>) -> f32 {
    let mut lanes = [0.0; 16];
    // SAFETY: the macro looked whether the machine can.
    unsafe {
        S::vectorize(|| {
            let y = f(S::Floats::splat(x));
            S::Floats::store(lanes.as_mut_ptr(), S::Floats::LANES, y);
        });
    }
    lanes[S::Floats::LANES - 1]
}

fn powers_and_silu_agree_with_the_library<S: Simd>() {
    for i in -600..=600 {
        let x = i as f32 * 0.1 + 0.003;
        let x64 = f64::from(x);
        let close = |got: f32, expected: f64| {
            let error = (f64::from(got) - expected).abs();
            let allowed = (1e-6 + 1e-7 * x64.abs()) * expected.abs() + 1e-30;
            assert!(error <= allowed, "{x}: {got}, {expected}");
        };
        close(apply::<S>(x, exp2::<S::Floats>), x64.exp2());
        close(apply::<S>(x, silu::<S::Floats>), x64 / (1.0 + (-x64).exp()));
    }
}

fn what_is_not_finite_stays_so<S: Simd>() {
    let power = |x| apply::<S>(x, exp2::<S::Floats>);
    let silu = |x| apply::<S>(x, silu::<S::Floats>);
    assert!(power(f32::NAN).is_nan() && silu(f32::NAN).is_nan());
    assert_eq!(power(f32::NEG_INFINITY), 0.0);
    assert_eq!(power(-200.0), 0.0);
    assert_eq!(power(f32::INFINITY), f32::INFINITY);
    assert!(silu(-1e30).abs() < 1e-6);
    assert_eq!(silu(1e30), 1e30);
}

fn parts_of_vectors_leave_their_neighbours_alone<S: Simd>() {
    let lanes = S::Floats::LANES;
    for count in 0..=lanes + 1 {
        let there = count.min(lanes);
        let numbers: Vec<f32> = (1..=lanes).map(|i| i as f32).collect();
        let narrow: Vec<u16> = numbers.iter().map(|&x| bits(x)).collect();
        // The allocation ends where the numbers end: reading past them is an error.
        let (short, short_bits) = (numbers[..there].to_vec(), narrow[..there].to_vec());
        let mut expected = vec![9.0; lanes];
        expected[..there].copy_from_slice(&numbers[..there]);
        let (mut floats, mut words) = (vec![9.0; lanes], vec![9u16; lanes]);
        let (mut widened, mut zeros) = (vec![9.0; lanes], vec![9.0; lanes]);
        // SAFETY: as above.
        unsafe {
            S::vectorize(|| {
                let all = S::Floats::load(numbers.as_ptr(), lanes);
                S::Floats::store(floats.as_mut_ptr(), count, all);
                S::narrow(words.as_mut_ptr(), count, all);
                let part = S::Floats::widen(short_bits.as_ptr(), count);
                S::Floats::store(widened.as_mut_ptr(), lanes, part);
                let part = S::Floats::load(short.as_ptr(), count);
                S::Floats::store(zeros.as_mut_ptr(), lanes, part);
            });
        }
        assert_eq!(floats, expected);
        assert_eq!(words[..there], narrow[..there]);
        assert!(words[there..].iter().all(|&word| word == 9));
        for filled in [widened, zeros] {
            assert_eq!(filled[..there], numbers[..there]);
            assert!(filled[there..].iter().all(|&x| x == 0.0));
        }
    }
}

fn bfloat16_is_rounded_to_the_nearest<S: Simd>() {
    let tie = |upper: u32| f32::from_bits(upper << 16 | 0x8000);
    let mut numbers = vec![
        1.0,
        -1.0,
        0.1,
        3.4e38,
        1e-30,
        f32::INFINITY,
        tie(0x3f80),
        tie(0x3f81),
    ];
    let mut random = Numbers::new(11);
    numbers.extend((0..1000).map(|_| random.below(1 << 20) as f32 * 1e-3 - 500.0));
    let mut got = vec![0; numbers.len()];
    // SAFETY: as above.
    unsafe {
        S::vectorize(|| {
            for (at, left) in vectors::<S::Floats>(numbers.len()) {
                let x = S::Floats::load(numbers.as_ptr().add(at), left);
                S::narrow(got.as_mut_ptr().add(at), left, x);
            }
            let mut nan = vec![0; S::Floats::LANES];
            S::narrow(
                nan.as_mut_ptr(),
                S::Floats::LANES,
                S::Floats::splat(f32::NAN),
            );
            assert!(nan.into_iter().all(|bits| wide(bits).is_nan()));
        });
    }
    let expected: Vec<u16> = numbers.iter().map(|&x| bits(x)).collect();
    assert_eq!(got, expected);
}

fn every_int8_number_is_exact<S: Simd>() {
    let all: Vec<i8> = (i8::MIN..=i8::MAX).collect();
    let mut got = vec![0.0; all.len()];
    // SAFETY: as above.
    unsafe {
        S::vectorize(|| {
            for (at, left) in vectors::<S::Floats>(all.len()) {
                let x = S::Floats::int8(all.as_ptr().add(at));
                S::Floats::store(got.as_mut_ptr().add(at), left, x);
            }
        });
    }
    assert_eq!(got, all.iter().map(|&x| f32::from(x)).collect::<Vec<_>>());
}

/// Also the order that `ARCHITECTURE.md` promises: even inputs before odd ones.
fn a_dot_product_is_a_sum_of_terms<S: Simd>() {
    let lanes = S::Floats::LANES;
    let mut numbers = Numbers::new(12);
    let weights = numbers.bits(2 * lanes);
    let row: Vec<f32> = numbers.bits(2).into_iter().map(wide).collect();
    let mut sums = vec![0.0; lanes];
    // SAFETY: as above.
    unsafe {
        S::vectorize(|| {
            let mut stored = vec![S::Number::default(); lanes];
            S::put(stored.as_mut_ptr(), 2, S::Floats::load(row.as_ptr(), 2));
            let mut sum = S::Floats::splat(0.0);
            for index in 0..2 / S::INPUTS {
                let factor = S::factor(stored.as_ptr().add(index * S::INPUTS));
                sum = S::multiply_add(factor, S::term(weights.as_ptr(), index), sum);
            }
            S::Floats::store(sums.as_mut_ptr(), lanes, sum);
            let number = S::number(stored.as_ptr().add(1));
            assert_eq!(S::Floats::largest(number), row[1]);
        });
    }
    for (lane, &got) in sums.iter().enumerate() {
        let [even, odd] = [0, 1].map(|i| f64::from(wide(weights[2 * lane + i])));
        let expected = even * f64::from(row[0]) + odd * f64::from(row[1]);
        assert!(
            (f64::from(got) - expected).abs() < 1e-6,
            "{got}, {expected}"
        );
    }
}
