//! How the programs read numbers from their command lines.

/// Parses a number from `least` to `most`, both included.
///
/// # Errors
/// The limits, for a person: the command line parser names the option and what was given.
pub fn within(given: &str, least: f64, most: f64) -> Result<f64, String> {
    match given.parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(format!("it must be between {least} and {most}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_in_the_limits_are_taken() {
        assert_eq!(within("0", 0.0, 2.5), Ok(0.0));
        assert_eq!(within("2.5", 0.0, 2.5), Ok(2.5));
        for bad in ["-1", "2.6", "nan", "inf", "", "1s"] {
            let error = within(bad, 0.0, 2.5).unwrap_err();
            assert_eq!(error, "it must be between 0 and 2.5");
        }
    }
}
