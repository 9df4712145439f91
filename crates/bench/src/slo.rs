//! Service-level objectives: the latencies that a request must not exceed to
//! count as good.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Limits in seconds; None: no limit. Written `ttft=2s,tpot=50ms`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Slo {
    /// Time to first token, from the moment the request was due.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_s: Option<f64>,
    /// Time to second token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttst_s: Option<f64>,
    /// Mean time per token after the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tpot_s: Option<f64>,
    /// The longest gap between two tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub itl_s: Option<f64>,
    /// Until the last token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub e2e_s: Option<f64>,
}

/// What one successful request took; None where its answer was too short to have it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seen {
    pub ttft_s: f64,
    pub ttst_s: Option<f64>,
    pub tpot_s: Option<f64>,
    pub itl_max_s: Option<f64>,
    pub e2e_s: f64,
}

/// Why an objective cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SloError {
    #[error("{0:?} is no objective; write NAME=TIME, such as ttft=2s")]
    NoPair(String),
    #[error("{0:?} is unknown; the objectives are ttft, ttst, tpot, itl and e2e")]
    UnknownName(String),
    #[error("{0} is given twice; keep one")]
    Twice(String),
    #[error(
        "the time {time:?} of {name} is not understood; write a number above 0 with its unit: 2s, 50ms or 800us"
    )]
    BadTime { name: String, time: String },
}

impl Slo {
    /// Whether no limit is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether a limit is of later tokens than the first, which somebody must count.
    #[must_use]
    pub fn is_of_tokens(&self) -> bool {
        self.ttst_s.is_some() || self.tpot_s.is_some() || self.itl_s.is_some()
    }

    /// Whether a successful request kept every limit. What an answer is too
    /// short to have keeps its limit.
    #[must_use]
    pub fn is_met(&self, seen: &Seen) -> bool {
        let within = |limit: Option<f64>, seen: Option<f64>| match (limit, seen) {
            (Some(limit), Some(seen)) => seen <= limit,
            _ => true,
        };
        within(self.ttft_s, Some(seen.ttft_s))
            && within(self.ttst_s, seen.ttst_s)
            && within(self.tpot_s, seen.tpot_s)
            && within(self.itl_s, seen.itl_max_s)
            && within(self.e2e_s, Some(seen.e2e_s))
    }
}

impl FromStr for Slo {
    type Err = SloError;

    fn from_str(given: &str) -> Result<Self, SloError> {
        let mut slo = Self::default();
        for objective in given.split(',').map(str::trim) {
            let (name, time) = objective
                .split_once('=')
                .ok_or_else(|| SloError::NoPair(objective.to_owned()))?;
            let (name, time) = (name.trim().to_ascii_lowercase(), time.trim());
            let limit = match name.as_str() {
                "ttft" => &mut slo.ttft_s,
                "ttst" => &mut slo.ttst_s,
                "tpot" => &mut slo.tpot_s,
                "itl" => &mut slo.itl_s,
                "e2e" => &mut slo.e2e_s,
                _ => return Err(SloError::UnknownName(name)),
            };
            if limit.is_some() {
                return Err(SloError::Twice(name));
            }
            match seconds(time) {
                Some(seconds) => *limit = Some(seconds),
                None => {
                    let time = time.to_owned();
                    return Err(SloError::BadTime { name, time });
                }
            }
        }
        Ok(slo)
    }
}

/// `2s`, `50ms` or `800us` in seconds.
fn seconds(time: &str) -> Option<f64> {
    let (number, per_second) = if let Some(number) = time.strip_suffix("us") {
        (number, 1e6)
    } else if let Some(number) = time.strip_suffix("ms") {
        (number, 1e3)
    } else {
        (time.strip_suffix('s')?, 1.0)
    };
    let number: f64 = number.trim_end().parse().ok()?;
    (number.is_finite() && number > 0.0).then_some(number / per_second)
}

#[cfg(test)]
mod tests {
    use super::{Seen, Slo, SloError};

    #[test]
    fn units_and_spaces() {
        let slo: Slo = "ttft=2s, TPOT = 50ms,itl=800us,e2e=1.5s,ttst=2.5 s"
            .parse()
            .unwrap();
        let expected = Slo {
            ttft_s: Some(2.0),
            ttst_s: Some(2.5),
            tpot_s: Some(0.05),
            itl_s: Some(0.0008),
            e2e_s: Some(1.5),
        };
        assert_eq!(slo, expected);
        let slo: Slo = "ttft=2s,tpot=50ms".parse().unwrap();
        assert_eq!(
            serde_json::to_string(&slo).unwrap(),
            r#"{"ttft_s":2.0,"tpot_s":0.05}"#
        );
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let error = |given: &str| given.parse::<Slo>().unwrap_err();
        assert_eq!(error("ttft"), SloError::NoPair("ttft".to_owned()));
        assert_eq!(error(""), SloError::NoPair(String::new()));
        assert_eq!(error("p99=2s"), SloError::UnknownName("p99".to_owned()));
        assert_eq!(error("ttft=2s,ttft=3s"), SloError::Twice("ttft".to_owned()));
        for time in ["2", "50 m", "-1s", "0ms", "nans", "infs", "s", "1e999s"] {
            let message = error(&format!("tpot={time}")).to_string();
            assert!(
                message.contains("tpot") && message.contains(time),
                "{message}"
            );
        }
    }

    #[test]
    fn every_limit_counts_and_a_missing_latency_keeps_its_own() {
        let seen = Seen {
            ttft_s: 1.0,
            ttst_s: Some(1.5),
            tpot_s: Some(0.05),
            itl_max_s: Some(0.2),
            e2e_s: 3.0,
        };
        let met = |given: &str, seen: &Seen| given.parse::<Slo>().unwrap().is_met(seen);
        assert!(met("ttft=1s,ttst=1.5s,tpot=50ms,itl=200ms,e2e=3s", &seen));
        for broken in [
            "ttft=999ms",
            "ttst=1s",
            "tpot=49ms",
            "itl=199ms",
            "e2e=2.9s",
        ] {
            assert!(!met(broken, &seen), "{broken}");
        }
        let short = Seen {
            ttst_s: None,
            tpot_s: None,
            itl_max_s: None,
            ..seen
        };
        assert!(met("ttst=1us,tpot=1us,itl=1us", &short));
        assert!(Slo::default().is_empty() && Slo::default().is_met(&seen));
    }
}
