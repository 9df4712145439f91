//! How the values of options are read.

/// More than a day is no deadline.
const MAX_SECONDS: f64 = 86_400.0;

/// Roles outweigh every cost long before.
const MAX_SHARE: f64 = 1e6;

pub fn share(given: &str) -> Result<f64, String> {
    match given.parse::<f64>() {
        Ok(share) if (0.0..=MAX_SHARE).contains(&share) => Ok(share),
        _ => Err(format!("it must be between 0 and {MAX_SHARE}")),
    }
}

pub fn seconds(given: &str) -> Result<f64, String> {
    match given.parse::<f64>() {
        Ok(seconds) if (0.0..=MAX_SECONDS).contains(&seconds) => Ok(seconds),
        _ => Err(format!("it must be between 0 and {MAX_SECONDS}")),
    }
}

pub fn milliseconds(given: &str) -> Result<f64, String> {
    match given.parse::<f64>() {
        Ok(ms) if ms > 0.0 && ms <= 1e3 * MAX_SECONDS => Ok(ms),
        _ => Err(format!(
            "it must be more than 0 and at most {}",
            1e3 * MAX_SECONDS
        )),
    }
}

/// A limit that nothing could keep to is a mistake.
pub fn positive_seconds(given: &str) -> Result<f64, String> {
    match seconds(given)? {
        0.0 => Err("it must be more than 0".to_owned()),
        seconds => Ok(seconds),
    }
}
