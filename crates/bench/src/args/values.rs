//! Values of options, checked as they are parsed.

use tasuki_core::options::within;

/// Tokens that a prompt or an answer may have at most.
pub(crate) const MAX_TOKENS: i64 = 10_000_000;
/// A week: beyond it, a typing error is likelier than a benchmark.
const MAX_SECONDS: f64 = 604_800.0;
/// Requests per second.
const MAX_RATE: f64 = 1e6;
/// Of burstiness and speed-up; a gamma law of more is a constant.
const MAX_FACTOR: f64 = 1e6;
const MIN_FACTOR: f64 = 1e-3;

/// A share: 0 to 1.
pub(super) fn ratio(given: &str) -> Result<f64, String> {
    within(given, 0.0, 1.0)
}

/// A factor that is not 0.
pub(super) fn factor(given: &str) -> Result<f64, String> {
    within(given, MIN_FACTOR, MAX_FACTOR)
}

/// A time in seconds.
pub(super) fn seconds(given: &str) -> Result<f64, String> {
    within(given, 0.0, MAX_SECONDS)
}

/// Requests per second; `inf` is no limit.
pub(super) fn rate(given: &str) -> Result<f64, String> {
    match given {
        "inf" => Ok(f64::INFINITY),
        _ => match given.parse() {
            Ok(rate) if (MIN_FACTOR..=MAX_RATE).contains(&rate) => Ok(rate),
            _ => Err(format!(
                "it must be between {MIN_FACTOR} and {MAX_RATE} requests per second, or inf"
            )),
        },
    }
}

/// `ISL:OSL`.
pub(super) fn lengths(given: &str) -> Result<(u32, u32), String> {
    let tokens = |given: &str| {
        let tokens: u32 = given.parse().ok()?;
        (1..=MAX_TOKENS)
            .contains(&i64::from(tokens))
            .then_some(tokens)
    };
    given
        .split_once(':')
        .and_then(|(input, output)| Some((tokens(input)?, tokens(output)?)))
        .ok_or_else(|| {
            format!("it must be INPUT:OUTPUT, both 1 to {MAX_TOKENS} tokens, such as 5000:250")
        })
}
