//! Lines of the log. Fields of records have names of one letter in the file and words here.

use serde::{Deserialize, Serialize};
use tasuki_core::Rates;

/// Of the format. A reader refuses others.
pub const VERSION: u32 = 1;

/// The first line of a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// [`VERSION`].
    pub tasuki_request_log: u32,
    /// Version of the router.
    pub tasuki: String,
    /// From which times count, in seconds since 1970. Files of one router's life have the same.
    pub began_unix_s: f64,
    pub router: Router,
}

/// How the router decides; names and meanings of its options.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Router {
    pub policy: String,
    pub strict_roles: bool,
    pub role_preference: f64,
    /// Requests may wait to be placed.
    pub admission: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_target_ms: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot_target_ms: Option<f64>,
}

/// What the router knows of its workers: a line when it changes.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Fleet {
    /// Seconds since the log began.
    pub t: f64,
    pub workers: Vec<Worker>,
    /// Kinds of hardware, and what steps take there.
    pub classes: Vec<Class>,
}

/// One worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Worker {
    pub id: u32,
    /// `prefill`, `decode` or `mixed`.
    pub role: String,
    /// Whether it takes new work.
    pub ready: bool,
    /// Equal on workers of one machine.
    pub machine: u32,
    /// Its place in [`Fleet::classes`].
    pub class: u32,
    pub num_blocks: u32,
    pub block_size_tokens: u32,
    pub max_model_len_tokens: u32,
    /// It reports what its prefix cache holds.
    pub reports_cache: bool,
    /// Of its model among those of the router.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub model: u32,
}

/// Workers that are equally fast.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Class {
    /// Such as `cpu` or the GPU's name.
    pub device: String,
    pub tensor_parallel: u32,
    /// Fitted to the steps that workers reported.
    pub step_ms: f64,
    pub sequence_us: f64,
    pub kv_token_ns: f64,
    pub prompt_step_ms: f64,
    pub prompt_token_us: f64,
    pub prompt_square_ns: f64,
}

impl Class {
    pub fn new(device: &str, tensor_parallel: u32, rates: &Rates) -> Self {
        Self {
            device: device.to_owned(),
            tensor_parallel,
            step_ms: significant(1e3 * rates.step_s),
            sequence_us: significant(1e6 * rates.sequence_s),
            kv_token_ns: significant(1e9 * rates.kv_token_s),
            prompt_step_ms: significant(1e3 * rates.prompt_step_s),
            prompt_token_us: significant(1e6 * rates.prompt_token_s),
            prompt_square_ns: significant(1e9 * rates.prompt_square_s),
        }
    }

    pub fn rates(&self) -> Rates {
        Rates {
            step_s: 1e-3 * self.step_ms,
            sequence_s: 1e-6 * self.sequence_us,
            kv_token_s: 1e-9 * self.kv_token_ns,
            prompt_step_s: 1e-3 * self.prompt_step_ms,
            prompt_token_s: 1e-6 * self.prompt_token_us,
            prompt_square_s: 1e-9 * self.prompt_square_ns,
        }
    }
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    #[default]
    Done,
    /// No worker could take it.
    Unavailable,
    /// Turned away before it was placed.
    Refused,
    /// It can never run here.
    Rejected,
    Failed,
    /// The client left.
    Cancelled,
    /// The client read too slowly, so its request was ended.
    TooSlow,
}

impl Outcome {
    pub const ALL: [Self; 7] = [
        Self::Done,
        Self::Unavailable,
        Self::Refused,
        Self::Rejected,
        Self::Failed,
        Self::Cancelled,
        Self::TooSlow,
    ];

    /// As in the file; the router's metrics use it too.
    pub fn as_str(self) -> &'static str {
        match self {
            Outcome::Done => "done",
            Outcome::Unavailable => "unavailable",
            Outcome::Refused => "refused",
            Outcome::Rejected => "rejected",
            Outcome::Failed => "failed",
            Outcome::Cancelled => "cancelled",
            Outcome::TooSlow => "too_slow",
        }
    }
}

/// How a request's KV came from its prefill worker to its decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Handoff(
    /// Bytes moved.
    pub u64,
    /// First block ordered to last block there, in milliseconds.
    pub f64,
    /// Of that, and of messages, what nothing hid, in milliseconds.
    pub f64,
);

/// One request. Milliseconds count from its arrival.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Record {
    /// When all of it was there, in seconds since the log began.
    #[serde(rename = "t")]
    pub arrived_s: f64,
    #[serde(rename = "i")]
    pub prompt_tokens: u32,
    /// Of its longest choice.
    #[serde(rename = "o")]
    pub output_tokens: u32,
    /// How many records before this one in the file another prompt is, and how many tokens the two
    /// begin with alike: the most of all records before.
    #[serde(rename = "s", default, skip_serializing_if = "Option::is_none")]
    pub shares: Option<(u32, u32)>,
    /// Of the prompt, in a prefix cache.
    #[serde(rename = "c", default, skip_serializing_if = "is_zero")]
    pub cached_tokens: u32,
    /// Workers that prefilled and decoded it, of the last attempt.
    #[serde(rename = "w", default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<(u32, u32)>,
    /// Let in by admission.
    #[serde(rename = "a", default, skip_serializing_if = "Option::is_none")]
    pub admitted_ms: Option<f64>,
    /// First scheduled by its prefill worker.
    #[serde(rename = "q", default, skip_serializing_if = "Option::is_none")]
    pub queue_ms: Option<f64>,
    #[serde(rename = "f", default, skip_serializing_if = "Option::is_none")]
    pub first_token_ms: Option<f64>,
    #[serde(rename = "g", default, skip_serializing_if = "Option::is_none")]
    pub second_token_ms: Option<f64>,
    /// Its last token; of a request without one, its end.
    #[serde(rename = "e")]
    pub end_ms: f64,
    /// Longest time between two tokens of a choice.
    #[serde(rename = "m", default, skip_serializing_if = "Option::is_none")]
    pub longest_gap_ms: Option<f64>,
    #[serde(rename = "h", default, skip_serializing_if = "Option::is_none")]
    pub handoff: Option<Handoff>,
    /// Times it was placed again.
    #[serde(rename = "r", default, skip_serializing_if = "is_zero")]
    pub retries: u32,
    /// Choices beyond the first.
    #[serde(rename = "k", default, skip_serializing_if = "is_zero")]
    pub more_choices: u32,
    #[serde(rename = "p", default, skip_serializing_if = "is_normal")]
    pub priority: i32,
    /// Of its model among those of the router.
    #[serde(rename = "v", default, skip_serializing_if = "is_zero")]
    pub model: u32,
    /// The tenant's name, hashed with a key that only the process has; equal within one `began_unix_s`.
    #[serde(rename = "u", default, skip_serializing_if = "is_zero")]
    pub tenant: u32,
    #[serde(rename = "z", default, skip_serializing_if = "is_done")]
    pub outcome: Outcome,
}

/// A line after the header.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Line {
    Fleet { fleet: Fleet },
    Record(Box<Record>),
}

/// Milliseconds with one digit after the point.
pub(crate) fn tenths(ms: f64) -> f64 {
    (10.0 * ms).round() / 10.0
}

/// With four digits that count.
fn significant(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's form")]
fn is_zero(value: &u32) -> bool {
    *value == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's form")]
fn is_normal(priority: &i32) -> bool {
    *priority == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's form")]
fn is_done(outcome: &Outcome) -> bool {
    *outcome == Outcome::Done
}

impl Record {
    /// Times with the digits that the file has.
    pub(crate) fn round(&mut self) {
        self.arrived_s = (1e4 * self.arrived_s).round() / 1e4;
        self.end_ms = tenths(self.end_ms);
        for ms in [
            &mut self.admitted_ms,
            &mut self.queue_ms,
            &mut self.first_token_ms,
            &mut self.second_token_ms,
            &mut self.longest_gap_ms,
        ] {
            *ms = ms.map(tenths);
        }
        if let Some(Handoff(_, transfer_ms, exposed_ms)) = &mut self.handoff {
            *transfer_ms = tenths(*transfer_ms);
            *exposed_ms = tenths(*exposed_ms);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_usual_is_left_out() {
        let mut record = Record {
            arrived_s: 12.345_678,
            prompt_tokens: 100,
            output_tokens: 7,
            end_ms: 45.678,
            first_token_ms: Some(12.0),
            ..Record::default()
        };
        record.round();
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(text, r#"{"t":12.3457,"i":100,"o":7,"f":12.0,"e":45.7}"#);
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), record);
    }

    #[test]
    fn the_metrics_name_outcomes_as_the_file_does() {
        for outcome in [
            Outcome::Done,
            Outcome::Unavailable,
            Outcome::Refused,
            Outcome::Rejected,
            Outcome::Failed,
            Outcome::Cancelled,
            Outcome::TooSlow,
        ] {
            let text = serde_json::to_string(&outcome).unwrap();
            assert_eq!(text, format!("{:?}", outcome.as_str()));
        }
    }

    #[test]
    fn rates_keep_four_digits() {
        let rates = Rates::default();
        let kept = Class::new("cpu", 1, &rates).rates();
        assert!((kept.kv_token_s / rates.kv_token_s - 1.0).abs() < 1e-3);
        assert!((kept.prompt_square_s / rates.prompt_square_s - 1.0).abs() < 1e-3);
    }
}
