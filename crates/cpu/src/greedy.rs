//! The likeliest token of a row of logits.

const LANES: usize = 32;

/// The index of the largest number, the first of several; `None` where that is not finite,
/// a number is NaN, or there is none.
pub fn greedy(logits: &[f32]) -> Option<usize> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has it.
        return unsafe { find_avx2(logits) };
    }
    find(logits)
}

/// `find`, compiled for longer vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn find_avx2(logits: &[f32]) -> Option<usize> {
    find(logits)
}

/// Lane by lane and without early ends, so that the compiler makes vectors of it.
#[inline(always)]
fn find(logits: &[f32]) -> Option<usize> {
    let (mut most, mut nan) = ([f32::NEG_INFINITY; LANES], [0u32; LANES]);
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            let x = chunk[lane];
            most[lane] = if x > most[lane] { x } else { most[lane] };
            nan[lane] |= u32::from(x.is_nan());
        }
    }
    let nan = nan != [0; LANES] || rest.iter().any(|x| x.is_nan());
    let most = most
        .iter()
        .chain(rest)
        .fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    if nan || !most.is_finite() {
        return None;
    }
    let holds = |chunk: &[f32; LANES]| chunk.iter().fold(false, |found, &x| found | (x == most));
    let begin = chunks.iter().position(holds).unwrap_or(chunks.len()) * LANES;
    Some(begin + logits[begin..].iter().position(|&x| x == most)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_the_largest() {
        for len in [1, 31, 32, 33, 100] {
            for at in 0..len {
                let mut logits = vec![-3.0; len];
                logits[at] = -1.0;
                logits[len - 1] = -1.0;
                assert_eq!(greedy(&logits), Some(at));
            }
        }
    }

    #[test]
    fn rows_that_are_not_finite_have_none() {
        for len in [3, 32, 40, 70] {
            for at in 0..len {
                for bad in [f32::NAN, f32::INFINITY] {
                    let mut logits = vec![1.0; len];
                    logits[at] = bad;
                    assert_eq!(greedy(&logits), None, "{bad} at {at} of {len}");
                }
                let mut logits = vec![f32::NEG_INFINITY; len];
                assert_eq!(greedy(&logits), None);
                logits[at] = -7.0;
                assert_eq!(greedy(&logits), Some(at));
            }
        }
        assert_eq!(greedy(&[]), None);
    }
}
