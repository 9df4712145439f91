//! How many random cases a search of the tests runs, and from which seed it draws them.
//!
//! By default every run has the same cases. `TASUKI_TEST_SEED` (a number, or `random`) and
//! `TASUKI_TEST_SCHEDULES` (cases of each search) change that, as they do for the Python
//! tests (`tests/support/searches.py`).

mod fuzz;

use std::panic::{self, AssertUnwindSafe};
use std::sync::OnceLock;

pub use fuzz::{Random, corpus, fuzz};

const SEED_VARIABLE: &str = "TASUKI_TEST_SEED";
const COUNT_VARIABLE: &str = "TASUKI_TEST_SCHEDULES";

/// The seed of this run's searches; `default` unless the environment has one, which is printed.
///
/// # Panics
///
/// `TASUKI_TEST_SEED` is neither a whole number nor `random`.
pub fn seed(default: u64) -> u64 {
    static CHOSEN: OnceLock<Option<u64>> = OnceLock::new();
    let chosen = CHOSEN.get_or_init(|| match std::env::var(SEED_VARIABLE).ok()?.as_str() {
        "" => None,
        "random" => Some(u64::from(rand::random::<u32>())),
        text => Some(text.parse().unwrap_or_else(|_| {
            panic!("{SEED_VARIABLE}={text}: must be a whole number or 'random'")
        })),
    });
    if let Some(seed) = chosen {
        eprintln!("{SEED_VARIABLE}={seed}");
    }
    chosen.unwrap_or(default)
}

/// How many cases a search runs that runs `default` of them unless told otherwise.
///
/// # Panics
///
/// `TASUKI_TEST_SCHEDULES` is not a positive whole number.
pub fn count(default: u32) -> u32 {
    match std::env::var(COUNT_VARIABLE) {
        Ok(text) if !text.is_empty() => match text.parse() {
            Ok(count) if count > 0 => count,
            _ => panic!("{COUNT_VARIABLE}={text}: must be a positive whole number"),
        },
        _ => default,
    }
}

/// Runs `case` with each seed: 0 to `default` - 1 unless told otherwise, and the `regressions`.
///
/// A failure says how to run its case alone, and how to keep it.
///
/// # Panics
///
/// When a case does.
pub fn run(default: u32, regressions: &[u64], case: impl Fn(u64)) {
    let first = seed(0);
    let drawn = first..first + u64::from(count(default));
    for seed in drawn.chain(regressions.iter().copied()) {
        if let Err(panic) = panic::catch_unwind(AssertUnwindSafe(|| case(seed))) {
            eprintln!(
                "seed {seed}; this case alone: {SEED_VARIABLE}={seed} {COUNT_VARIABLE}=1 \
                 (to test it always, add {seed} to this search's REGRESSIONS)"
            );
            panic::resume_unwind(panic);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn every_seed_runs_and_then_the_regressions() {
        let seen = RefCell::new(Vec::new());
        run(3, &[77], |seed| seen.borrow_mut().push(seed));
        let first = seed(0);
        let mut expected: Vec<u64> = (first..first + u64::from(count(3))).collect();
        expected.push(77);
        assert_eq!(seen.into_inner(), expected);
    }

    #[test]
    #[should_panic(expected = "case 77")]
    fn a_failure_is_the_tests() {
        run(1, &[77], |seed| assert_ne!(seed, 77, "case 77"));
    }
}
