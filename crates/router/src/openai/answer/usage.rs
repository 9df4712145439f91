//! What a request cost: tokens, and where the time went.

use std::time::Duration;

use axum::http::HeaderValue;
use serde::Serialize;

use crate::serve::api::Timings;

/// OpenAI's `usage`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub total_tokens: u64,
    pub prompt_tokens_details: PromptTokensDetails,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    pub cached_tokens: u64,
}

impl Usage {
    pub fn new(prompt_tokens: u64, completion_tokens: u64, cached_tokens: u64) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens },
        }
    }
}

/// The phases of [`Timings`] under the names that clients see.
fn phases(timings: &Timings) -> [(&'static str, Duration); 13] {
    [
        ("queue", timings.queue),
        ("prefill", timings.prefill),
        ("first_token", timings.first_token),
        ("handshake", timings.handshake),
        ("transfer", timings.transfer),
        ("transfer_exposed", timings.transfer_exposed),
        ("transfer_tail", timings.transfer_tail),
        ("transfer_post", timings.transfer_post),
        ("first_decode", timings.first_decode),
        ("messages", timings.messages),
        ("decode", timings.decode),
        ("recovery", timings.recovery),
        ("total", timings.total),
    ]
}

pub fn milliseconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

/// The `timings` object of a response.
pub fn timings_json(timings: &Timings) -> serde_json::Value {
    let mut object = serde_json::Map::new();
    for (name, duration) in phases(timings) {
        object.insert(format!("{name}_ms"), milliseconds(duration).into());
    }
    object.insert("transfer_bytes".into(), timings.transfer_bytes.into());
    object.insert(
        "transfer_descriptors".into(),
        timings.transfer_descriptors.into(),
    );
    object.insert("transport".into(), timings.transport.clone().into());
    object.insert("replacements".into(), timings.replacements.into());
    object.insert(
        "prefill_worker".into(),
        timings.prefill_worker.clone().into(),
    );
    object.insert("decode_worker".into(), timings.decode_worker.clone().into());
    object.into()
}

/// The `Server-Timing` header: the same phases, in milliseconds.
pub fn server_timing(timings: &Timings) -> HeaderValue {
    let entries: Vec<String> = phases(timings)
        .into_iter()
        .map(|(name, duration)| format!("{name};dur={:.3}", milliseconds(duration)))
        .collect();
    HeaderValue::from_str(&entries.join(", ")).expect("ASCII")
}

/// Timings of several prompts of one request: the longest of each phase, the
/// sum of what was moved and repeated, workers and transport of the slowest.
pub fn merge(all: Vec<Timings>) -> Timings {
    all.into_iter()
        .reduce(|a, b| {
            let (prefill_worker, decode_worker, transport, why) = if b.total > a.total {
                (b.prefill_worker, b.decode_worker, b.transport, b.why)
            } else {
                (a.prefill_worker, a.decode_worker, a.transport, a.why)
            };
            Timings {
                queue: a.queue.max(b.queue),
                prefill: a.prefill.max(b.prefill),
                first_token: a.first_token.max(b.first_token),
                handshake: a.handshake.max(b.handshake),
                transfer: a.transfer.max(b.transfer),
                transfer_exposed: a.transfer_exposed.max(b.transfer_exposed),
                transfer_tail: a.transfer_tail.max(b.transfer_tail),
                transfer_post: a.transfer_post.max(b.transfer_post),
                first_decode: a.first_decode.max(b.first_decode),
                messages: a.messages.max(b.messages),
                decode: a.decode.max(b.decode),
                recovery: a.recovery.max(b.recovery),
                total: a.total.max(b.total),
                transfer_bytes: a.transfer_bytes + b.transfer_bytes,
                transfer_descriptors: a.transfer_descriptors + b.transfer_descriptors,
                transport,
                cached_prompt_tokens: a.cached_prompt_tokens + b.cached_prompt_tokens,
                replacements: a.replacements + b.replacements,
                prefill_worker,
                decode_worker,
                why,
            }
        })
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timings(total_ms: u64, worker: &str) -> Timings {
        Timings {
            queue: Duration::from_micros(1500),
            total: Duration::from_millis(total_ms),
            transfer_bytes: 10,
            transfer_descriptors: 2,
            transport: format!("tcp of {worker}"),
            prefill_worker: worker.to_owned(),
            ..Timings::default()
        }
    }

    #[test]
    fn header_and_object_tell_the_same() {
        let timings = timings(20, "p0");
        let header = server_timing(&timings);
        let header = header.to_str().unwrap();
        assert!(header.starts_with("queue;dur=1.500, prefill;dur=0.000, "));
        assert!(header.ends_with("total;dur=20.000"));
        let object = timings_json(&timings);
        assert_eq!(object["queue_ms"], 1.5);
        assert_eq!(object["total_ms"], 20.0);
        assert_eq!(object["prefill_worker"], "p0");
        assert_eq!(object["transport"], "tcp of p0");
    }

    #[test]
    fn merging_takes_the_longest_of_each_phase_and_sums_what_is_counted() {
        // Each phase is the longer one in one of the two.
        let of = |odd: u64| {
            let at =
                |number: u64| Duration::from_millis(number + 100 * u64::from(number % 2 == odd));
            Timings {
                queue: at(1),
                prefill: at(2),
                first_token: at(3),
                handshake: at(4),
                transfer: at(5),
                transfer_exposed: at(6),
                transfer_tail: at(7),
                transfer_post: at(8),
                first_decode: at(9),
                messages: at(10),
                decode: at(11),
                recovery: at(12),
                total: at(13),
                cached_prompt_tokens: 3,
                replacements: 1,
                ..Timings::default()
            }
        };
        let merged = merge(vec![of(0), of(1)]);
        for (number, (name, longest)) in (1..).zip(phases(&merged)) {
            assert_eq!(longest, Duration::from_millis(100 + number), "{name}");
        }
        assert_eq!((merged.cached_prompt_tokens, merged.replacements), (6, 2));
    }

    #[test]
    fn usage_adds_up() {
        let usage = Usage::new(5, 7, 4);
        assert_eq!((usage.prompt_tokens, usage.completion_tokens), (5, 7));
        assert_eq!(usage.total_tokens, 12);
        assert_eq!(usage.prompt_tokens_details.cached_tokens, 4);
    }

    #[test]
    fn merging_takes_the_longest_and_sums_the_bytes() {
        let merged = merge(vec![timings(20, "p0"), timings(30, "p1")]);
        assert_eq!(merged.total, Duration::from_millis(30));
        assert_eq!(merged.transfer_bytes, 20);
        assert_eq!(merged.transfer_descriptors, 4);
        assert_eq!(merged.prefill_worker, "p1");
        assert_eq!(merged.transport, "tcp of p1");
    }
}
