//! Steps of one row, or one row's heads, between the GEMMs.

use crate::simd::functions::silu;
use crate::simd::{Floats, Simd, vectors};

/// Normalise by the root of the mean square, times `weight`.
///
/// # Safety
/// The processor runs the instance. `to` holds `weight.len()` numbers, and so does `x`.
pub unsafe fn norm<S: Simd>(x: *const f32, weight: &[f32], eps: f32, to: *mut S::Number) {
    // SAFETY: the caller's promise; so in all functions here.
    let run = || unsafe {
        let factor = S::Floats::splat(norm_factor::<S>(x, weight.len(), eps));
        for (at, left) in vectors::<S::Floats>(weight.len()) {
            let x = S::Floats::mul(S::Floats::load(x.add(at), left), factor);
            let weight = S::Floats::load(weight.as_ptr().add(at), left);
            S::put(to.add(at), left, S::Floats::mul(x, weight));
        }
    };
    // SAFETY: see above.
    unsafe { S::vectorize(run) };
}

/// One over the root of the mean square of `len` numbers.
///
/// # Safety
/// As `norm`; called inside of `vectorize`.
#[inline(always)]
unsafe fn norm_factor<S: Simd>(x: *const f32, len: usize, eps: f32) -> f32 {
    // SAFETY: see above.
    unsafe {
        let mut squares = S::Floats::splat(0.0);
        for (at, left) in vectors::<S::Floats>(len) {
            let x = S::Floats::load(x.add(at), left);
            squares = S::Floats::fma(x, x, squares);
        }
        1.0 / (S::Floats::sum(squares) / len as f32 + eps).sqrt()
    }
}

/// `to = from`, widened to float32.
///
/// # Safety
/// As `norm`; `to` holds as many numbers as `from`.
pub unsafe fn widen_row<S: Simd>(from: &[u16], to: *mut f32) {
    // SAFETY: see above.
    let run = || unsafe {
        for (at, left) in vectors::<S::Floats>(from.len()) {
            let x = S::Floats::widen(from.as_ptr().add(at), left);
            S::Floats::store(to.add(at), left, x);
        }
    };
    // SAFETY: see above.
    unsafe { S::vectorize(run) };
}

/// `to = x`, rounded to bfloat16.
///
/// # Safety
/// As `norm`; both hold `len` numbers.
pub unsafe fn narrow_row<S: Simd>(x: *const f32, len: usize, to: *mut u16) {
    // SAFETY: see above.
    let run = || unsafe {
        for (at, left) in vectors::<S::Floats>(len) {
            S::narrow(to.add(at), left, S::Floats::load(x.add(at), left));
        }
    };
    // SAFETY: see above.
    unsafe { S::vectorize(run) };
}

/// `to = x * factor`.
///
/// # Safety
/// As `norm`; both hold `len` numbers.
pub unsafe fn scale_row<S: Simd>(x: *const f32, len: usize, factor: f32, to: *mut S::Number) {
    // SAFETY: see above.
    let run = || unsafe {
        let factor = S::Floats::splat(factor);
        for (at, left) in vectors::<S::Floats>(len) {
            let x = S::Floats::load(x.add(at), left);
            S::put(to.add(at), left, S::Floats::mul(x, factor));
        }
    };
    // SAFETY: see above.
    unsafe { S::vectorize(run) };
}

/// How one head of a query or key is rotated.
#[derive(Clone, Copy)]
pub struct Rotation<'a> {
    /// Weight of the head's norm, and its epsilon.
    pub norm: Option<(&'a [f32], f32)>,
    /// Cosines, then sines, of the row's position.
    pub table: &'a [f32],
    /// On the result.
    pub factor: f32,
}

/// Norm and rotate one head. `store(place, count, numbers)` takes each vector of the result.
///
/// The first half of the numbers and the second are the two coordinates.
///
/// # Safety
/// As `norm`; `x` holds as many numbers as the table, the norm's weight too.
pub unsafe fn rotate<S: Simd>(
    x: *const f32,
    rotation: Rotation<'_>,
    store: impl Fn(usize, usize, crate::simd::Vector<S>),
) {
    let half = rotation.table.len() / 2;
    let (cos, sin) = rotation.table.split_at(half);
    // SAFETY: see above.
    let run = || unsafe {
        let mut factor = rotation.factor;
        if let Some((weight, eps)) = rotation.norm {
            factor *= norm_factor::<S>(x, weight.len(), eps);
        }
        let factor = S::Floats::splat(factor);
        for (at, left) in vectors::<S::Floats>(half) {
            let load = |from: *const f32| S::Floats::load(from.add(at), left);
            let (mut low, mut high) = (load(x), load(x.add(half)));
            if let Some((weight, _)) = rotation.norm {
                low = S::Floats::mul(low, load(weight.as_ptr()));
                high = S::Floats::mul(high, load(weight.as_ptr().add(half)));
            }
            let cos = S::Floats::mul(load(cos.as_ptr()), factor);
            let sin = S::Floats::mul(load(sin.as_ptr()), factor);
            let new_low = S::Floats::sub(S::Floats::mul(low, cos), S::Floats::mul(high, sin));
            store(at, left, new_low);
            store(
                half + at,
                left,
                S::Floats::fma(high, cos, S::Floats::mul(low, sin)),
            );
        }
    };
    // SAFETY: see above.
    unsafe { S::vectorize(run) };
}

/// `to = silu(gate) * up`.
///
/// # Safety
/// As `norm`; `to` holds as many numbers as the slices, which are equally long.
pub unsafe fn gated<S: Simd>(gate: &[f32], up: &[f32], to: *mut S::Number) {
    debug_assert!(gate.len() == up.len());
    // SAFETY: see above.
    let run = || unsafe {
        for (at, left) in vectors::<S::Floats>(gate.len()) {
            let gate = silu::<S::Floats>(S::Floats::load(gate.as_ptr().add(at), left));
            let up = S::Floats::load(up.as_ptr().add(at), left);
            S::put(to.add(at), left, S::Floats::mul(gate, up));
        }
    };
    // SAFETY: see above.
    unsafe { S::vectorize(run) };
}

/// `to = x + bias`, or `to += x + bias`.
///
/// # Safety
/// As `norm`; all hold as many numbers as `x`; `bias` may be null: none.
pub unsafe fn add_row<S: Simd>(x: &[f32], bias: *const f32, to: *mut f32, add: bool) {
    // SAFETY: see above.
    let run = || unsafe {
        for (at, left) in vectors::<S::Floats>(x.len()) {
            let mut x = S::Floats::load(x.as_ptr().add(at), left);
            if !bias.is_null() {
                x = S::Floats::add(x, S::Floats::load(bias.add(at), left));
            }
            if add {
                x = S::Floats::add(x, S::Floats::load(to.add(at), left));
            }
            S::Floats::store(to.add(at), left, x);
        }
    };
    // SAFETY: see above.
    unsafe { S::vectorize(run) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Numbers, each_instance, wide, widened};

    each_instance!(
        norms_of_any_length,
        heads_turn_with_and_without_a_norm,
        gates_sums_and_widths,
    );

    const EPS: f32 = 1e-5;

    fn floats(numbers: &mut Numbers, len: usize) -> Vec<f32> {
        numbers.bits(len).into_iter().map(wide).collect()
    }

    /// As close as rounding to 8 bits leaves it.
    fn assert_close<S: Simd>(got: &[S::Number], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        for (got, &expected) in widened::<S>(got).into_iter().zip(expected) {
            let error = (f64::from(got) - expected).abs();
            assert!(error <= expected.abs() / 250.0 + 1e-6, "{got}, {expected}");
        }
    }

    fn normed(x: &[f32], weight: &[f32]) -> Vec<f64> {
        let squares: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
        let root = (squares / x.len() as f64 + f64::from(EPS)).sqrt();
        let pairs = x.iter().zip(weight);
        pairs
            .map(|(&x, &w)| f64::from(x) / root * f64::from(w))
            .collect()
    }

    fn norms_of_any_length<S: Simd>() {
        let mut numbers = Numbers::new(5);
        for len in [1, 15, 16, 17, 48, 100, 576] {
            let (x, weight) = (floats(&mut numbers, len), floats(&mut numbers, len));
            let mut to = vec![S::Number::default(); len + 1];
            // SAFETY: the machine can, the lengths agree.
            unsafe { norm::<S>(x.as_ptr(), &weight, EPS, to.as_mut_ptr()) };
            assert_close::<S>(&to[..len], &normed(&x, &weight));
            let behind = widened::<S>(&to)[len];
            assert_eq!(behind, 0.0, "something is written behind the end");
        }
    }

    fn heads_turn_with_and_without_a_norm<S: Simd>() {
        let mut numbers = Numbers::new(6);
        for dim in [2, 12, 64, 80, 128] {
            let (x, weight) = (floats(&mut numbers, dim), floats(&mut numbers, dim));
            let rotation = floats(&mut numbers, dim);
            for norm in [None, Some((&weight[..], EPS))] {
                let factor = 0.7;
                let how = Rotation {
                    norm,
                    table: &rotation,
                    factor,
                };
                let mut to = vec![0; dim];
                let place = to.as_mut_ptr();
                // SAFETY: as above.
                unsafe {
                    rotate::<S>(x.as_ptr(), how, |at, left, x| {
                        S::narrow(place.add(at), left, x);
                    });
                }
                let plain = || x.iter().map(|&x| f64::from(x)).collect();
                let y: Vec<f64> = norm.map_or_else(plain, |(weight, _)| normed(&x, weight));
                let half = dim / 2;
                let expected: Vec<f64> = (0..dim)
                    .map(|i| {
                        let (cos, sin) = (rotation[i % half], rotation[half + i % half]);
                        let (low, high) = (y[i % half], y[half + i % half]);
                        let (a, b) = if i < half { (low, -high) } else { (high, low) };
                        (a * f64::from(cos) + b * f64::from(sin)) * f64::from(factor)
                    })
                    .collect();
                for (&got, &expected) in to.iter().zip(&expected) {
                    let error = (f64::from(wide(got)) - expected).abs();
                    assert!(error < 0.02, "{dim}: {error}"); // terms of up to 3 may cancel
                }
            }
        }
    }

    fn gates_sums_and_widths<S: Simd>() {
        let mut numbers = Numbers::new(7);
        let (gate, up) = (floats(&mut numbers, 48), floats(&mut numbers, 48));
        let mut to = vec![S::Number::default(); 48];
        // SAFETY: as above.
        unsafe { gated::<S>(&gate, &up, to.as_mut_ptr()) };
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let pairs = gate.iter().zip(&up);
        let expected: Vec<f64> = pairs
            .map(|(&g, &u)| silu(f64::from(g)) * f64::from(u))
            .collect();
        assert_close::<S>(&to, &expected);

        let mut sums = up[..37].to_vec();
        // SAFETY: as above; no bias, then one.
        unsafe {
            add_row::<S>(&gate[..37], std::ptr::null(), sums.as_mut_ptr(), true);
            add_row::<S>(&gate[..37], up.as_ptr(), sums.as_mut_ptr(), true);
        }
        for (i, got) in sums.iter().enumerate() {
            assert_eq!(*got, (up[i] + gate[i]) + (gate[i] + up[i]));
        }

        let bits = numbers.bits(37);
        let (mut floats, mut back) = (vec![0.0; 37], vec![0; 37]);
        // SAFETY: as above.
        unsafe {
            widen_row::<S>(&bits, floats.as_mut_ptr());
            narrow_row::<S>(floats.as_ptr(), 37, back.as_mut_ptr());
        }
        assert_eq!(back, bits);
    }
}
