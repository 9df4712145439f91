//! Fuzzing: cases made from valid ones by mutation.
//!
//! Each case follows from its seed alone: it takes one of the corpus and changes it a few times,
//! by bytes or by whole values (strings, numbers, brackets with what is in them). A failure
//! prints its seed and the case itself, ready to be kept in the corpus.

use std::panic::{self, AssertUnwindSafe};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::{COUNT_VARIABLE, SEED_VARIABLE, count, seed};

const SECONDS_VARIABLE: &str = "TASUKI_FUZZ_S";
/// A file to which each target adds a line of JSON with its counts.
const COUNTS_VARIABLE: &str = "TASUKI_FUZZ_COUNTS";

/// Mutations of a case, at most. None now and then: what is valid must work.
const MOST_MUTATIONS: u32 = 6;
const MOST_BYTES: usize = 1 << 16;
/// Of the process, at its largest: a case that needs more is a defect.
const MOST_RESIDENT_BYTES: u64 = 2 << 30;

/// Between two cases of a corpus file.
const SEPARATOR: &str = "\n====\n";

const VALUES: [&str; 34] = [
    "null",
    "true",
    "false",
    "0",
    "-0",
    "-1",
    "1",
    "0.5",
    "1e308",
    "-1e308",
    "1e-400",
    "1E9999",
    "2147483648",
    "4294967296",
    "9007199254740993",
    "9223372036854775808",
    "18446744073709551616",
    "\"\"",
    "\"a\"",
    "\"\\u0000\"",
    "\"\\ud83d\\ude00\"",
    "\"\\ud800\"",
    "\"wörd\"",
    "[]",
    "{}",
    "[[[[]]]]",
    "[null]",
    "{\"\":0}",
    "[0,0]",
    "\"<|m|>\"",
    "<think>",
    "</think>",
    "{{",
    "%}",
];

/// The cases of a corpus file, one after another.
pub fn corpus(file: &str) -> Vec<Vec<u8>> {
    let cases = file.trim_end_matches('\n').split(SEPARATOR);
    cases.map(|case| case.as_bytes().to_vec()).collect()
}

/// What a case may draw from beside its bytes, such as where to cut them.
pub type Random = StdRng;

/// Runs cases of a target: for `TASUKI_FUZZ_S` seconds, otherwise `default` of them or as many as
/// `TASUKI_TEST_SCHEDULES` says. The corpus as it is comes first.
///
/// # Panics
/// When a case does; when the process needs more memory than it should; `TASUKI_FUZZ_S` is no
/// number.
pub fn fuzz(target: &str, corpus: &[Vec<u8>], default: u32, case: impl Fn(&[u8], &mut Random)) {
    let limit = std::env::var(SECONDS_VARIABLE).ok().map(|text| {
        let seconds = text.parse().map(Duration::from_secs_f64);
        seconds.unwrap_or_else(|_| panic!("{SECONDS_VARIABLE}={text}: must be a number"))
    });
    for (at, bytes) in corpus.iter().enumerate() {
        let mut random = StdRng::seed_from_u64(at as u64);
        run(target, &format!("case {at} of the corpus"), bytes, || {
            case(bytes, &mut random)
        });
    }
    let (first, started) = (seed(0), Instant::now());
    let mut cases = 0;
    while match limit {
        Some(limit) => started.elapsed() < limit,
        None => cases < u64::from(count(default)),
    } {
        let seed = first + cases;
        let mut random = StdRng::seed_from_u64(seed);
        let bytes = mutated(corpus, &mut random);
        let alone = format!("seed {seed}; it alone: {SEED_VARIABLE}={seed} {COUNT_VARIABLE}=1");
        run(target, &alone, &bytes, || case(&bytes, &mut random));
        cases += 1;
    }
    report(
        target,
        corpus.len() as u64 + cases,
        first,
        started.elapsed(),
    );
}

fn run(target: &str, name: &str, bytes: &[u8], case: impl FnOnce()) {
    let Err(panic) = panic::catch_unwind(AssertUnwindSafe(case)) else {
        return;
    };
    eprintln!(
        "fuzz {target}: {name}; to test it always, add it to the corpus:\n{}",
        String::from_utf8_lossy(bytes)
    );
    eprintln!("its bytes: b\"{}\"", bytes.escape_ascii());
    panic::resume_unwind(panic);
}

fn report(target: &str, cases: u64, seed: u64, elapsed: Duration) {
    let peak = peak_resident_bytes();
    let counts = format!(
        "{{\"target\":\"{target}\",\"cases\":{cases},\"seed\":{seed},\"seconds\":{:.1},\
         \"peak_resident_bytes\":{}}}",
        elapsed.as_secs_f64(),
        peak.unwrap_or(0),
    );
    println!("fuzz {counts}");
    if let Ok(path) = std::env::var(COUNTS_VARIABLE) {
        use std::io::Write;
        let file = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(path);
        writeln!(file.expect("the file of counts"), "{counts}").expect("a line of counts");
    }
    if let Some(peak) = peak {
        assert!(
            peak <= MOST_RESIDENT_BYTES,
            "{target}: {peak} bytes of memory, the limit is {MOST_RESIDENT_BYTES}"
        );
    }
}

/// Linux alone says.
fn peak_resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kibibytes << 10)
}

fn mutated(corpus: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let any = |random: &mut Random| corpus.choose(random).cloned().unwrap_or_default();
    let mut bytes = any(random);
    for _ in 0..random.random_range(0..=MOST_MUTATIONS) {
        match random.random_range(0..10) {
            0 => flip(&mut bytes, random),
            1 => {
                let at = range(bytes.len(), 32, random);
                bytes.drain(at);
            }
            2 => {
                let from = range(bytes.len(), 64, random);
                let copy = bytes[from].to_vec();
                insert(&mut bytes, &copy, random);
            }
            3 => insert(
                &mut bytes,
                VALUES.choose(random).unwrap_or(&"").as_bytes(),
                random,
            ),
            4 => {
                let other = any(random);
                let part = range(other.len(), 256, random);
                insert(&mut bytes, &other[part], random);
            }
            5 => bytes.truncate(random.random_range(0..=bytes.len())),
            6 => nest(&mut bytes, random),
            7 => {
                let other = any(random);
                let value = value(&other, random);
                replace(&mut bytes, &other[value], random);
            }
            _ => replace(
                &mut bytes,
                VALUES.choose(random).unwrap_or(&"").as_bytes(),
                random,
            ),
        }
        bytes.truncate(MOST_BYTES);
    }
    bytes
}

fn flip(bytes: &mut [u8], random: &mut Random) {
    if !bytes.is_empty() {
        let at = random.random_range(0..bytes.len());
        bytes[at] ^= 1 << random.random_range(0..8);
    }
}

/// A part of at most so many bytes.
fn range(length: usize, most: usize, random: &mut Random) -> std::ops::Range<usize> {
    let start = random.random_range(0..=length);
    start..random.random_range(start..=length.min(start + most))
}

fn insert(bytes: &mut Vec<u8>, part: &[u8], random: &mut Random) {
    let at = random.random_range(0..=bytes.len());
    bytes.splice(at..at, part.iter().copied());
}

/// Puts a value in brackets, many of them now and then.
fn nest(bytes: &mut Vec<u8>, random: &mut Random) {
    let value = value(bytes, random);
    let depth = if random.random_bool(0.1) { 300 } else { 1 };
    let (open, close) = *[("[", "]"), ("{\"a\":", "}")]
        .choose(random)
        .unwrap_or(&("", ""));
    let inner = String::from_utf8_lossy(&bytes[value.clone()]).into_owned();
    let nested = format!("{}{inner}{}", open.repeat(depth), close.repeat(depth));
    bytes.splice(value, nested.into_bytes());
}

fn replace(bytes: &mut Vec<u8>, by: &[u8], random: &mut Random) {
    let value = value(bytes, random);
    bytes.splice(value, by.iter().copied());
}

/// Where a value is, read as in JSON: a string, a word or number, or brackets with what is in
/// them. What begins like none of these is a byte.
fn value(bytes: &[u8], random: &mut Random) -> std::ops::Range<usize> {
    if bytes.is_empty() {
        return 0..0;
    }
    let word = |byte: &u8| byte.is_ascii_alphanumeric() || b"+-._".contains(byte);
    let mut start = random.random_range(0..bytes.len());
    while start > 0 && word(&bytes[start]) && word(&bytes[start - 1]) {
        start -= 1;
    }
    let rest = &bytes[start..];
    let length = match rest[0] {
        b'"' => {
            let mut escaped = false;
            let end = rest[1..].iter().position(|&byte| {
                let ends = byte == b'"' && !escaped;
                escaped = byte == b'\\' && !escaped;
                ends
            });
            end.map_or(rest.len(), |end| end + 2)
        }
        b'[' | b'{' => {
            let mut depth = 0_i32;
            let end = rest.iter().position(|byte| {
                depth += i32::from(b"[{".contains(byte)) - i32::from(b"]}".contains(byte));
                depth == 0
            });
            end.map_or(rest.len(), |end| end + 1)
        }
        _ => rest.iter().take_while(|byte| word(byte)).count().max(1),
    };
    start..start + length
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    #[test]
    fn cases_follow_from_their_seed_and_differ() {
        let valid = corpus("{\"a\": [1, \"b\"]}\n====\ntext\n");
        assert_eq!(valid, [b"{\"a\": [1, \"b\"]}".to_vec(), b"text".to_vec()]);
        let drawn = |_| {
            let seen = RefCell::new(Vec::new());
            fuzz("test", &valid, 500, |bytes, _| {
                seen.borrow_mut().push(bytes.to_vec())
            });
            seen.into_inner()
        };
        let [one, other] = [0, 1].map(drawn);
        if std::env::var(SECONDS_VARIABLE).is_ok() {
            return;
        }
        assert_eq!(one, other);
        assert_eq!(&one[..2], &valid[..]);
        let different: BTreeSet<_> = one.iter().collect();
        assert!(different.len() > one.len() / 2, "{}", different.len());
    }

    #[test]
    #[should_panic(expected = "found")]
    fn a_planted_defect_is_found() {
        // Only by a whole value in place of another.
        fuzz("planted", &corpus("{\"n\": 1}"), 20_000, |bytes, _| {
            assert!(bytes != b"{\"n\": 4294967296}", "found");
        });
    }
}
