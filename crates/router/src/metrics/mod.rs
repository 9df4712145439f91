//! What the router counts and measures, as OpenMetrics.

mod histogram;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry as MetricsRegistry;
use tasuki_core::FailureKind;
use tasuki_reqlog::Outcome;

use self::histogram::LockFreeHistogram;
use crate::dashboard::Recorder;
use crate::serve::api::Timings;
use crate::workers::{self, WorkerCollector};

type Label = [(&'static str, &'static str); 1];
/// By one label.
pub type Counters = Family<Label, Counter>;
/// Path, status and error code of an answer.
type Answered = [(&'static str, String); 3];

/// Paths of requests that workers serve, and the reasons why none does: watched by alerts.
const GENERATING: [&str; 4] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/generate",
];
const UNSERVED: [&str; 3] = ["no_worker", "too_many_requests", "overloaded"];

type Histograms = Family<Label, Histogram, fn() -> Histogram>;

/// Every metric of the serving layer.
pub struct Metrics {
    registry: Mutex<MetricsRegistry>,
    pub in_flight: Gauge,
    requests: Counters,
    retries: Family<[(&'static str, &'static str); 2], Counter>,
    failures: Counters,
    refusals: Counters,
    http_errors: Family<Answered, Counter>,
    pub output_tokens: Counter,
    pub prompt_tokens: Counter,
    transfer_bytes: Counter,
    /// Spans that the collector of traces does not get, by reason.
    pub trace_spans_dropped: Counters,
    /// Requests that are missing from the request log, by reason.
    pub request_log_dropped: Counters,
    /// Answers that went on with another worker's text.
    pub resumed: Counter,
    /// Received to let in, of requests that were.
    pub admission_wait: Histogram,
    /// Received to first token.
    pub first_token: Histogram,
    /// Received to second token.
    pub second_token: Histogram,
    /// From one token of a choice to its next.
    pub between_tokens: LockFreeHistogram,
    /// Received to end.
    pub total: Histogram,
    phases: Histograms,
    /// The same for the dashboard, of the last minutes.
    pub recorder: Recorder,
}

impl Metrics {
    pub fn new(workers: &Arc<workers::Registry>) -> Self {
        let phases: Histograms = Family::new_with_constructor(durations);
        let metrics = Self {
            registry: Mutex::new(MetricsRegistry::with_prefix("tasuki")),
            in_flight: Gauge::default(),
            requests: Family::default(),
            retries: Family::default(),
            failures: Family::default(),
            refusals: Family::default(),
            http_errors: Family::default(),
            output_tokens: Counter::default(),
            prompt_tokens: Counter::default(),
            transfer_bytes: Counter::default(),
            trace_spans_dropped: Counters::default(),
            request_log_dropped: Counters::default(),
            resumed: Counter::default(),
            admission_wait: durations(),
            first_token: durations(),
            second_token: durations(),
            between_tokens: LockFreeHistogram::default(),
            total: durations(),
            phases,
            recorder: Recorder::default(),
        };
        metrics.register(workers);
        metrics.begin_at_zero();
        metrics
    }

    /// A series that begins with its first event has no rate for it, so an alert misses the event.
    fn begin_at_zero(&self) {
        for outcome in Outcome::ALL {
            let labels = [("outcome", outcome.as_str())];
            self.requests.get_or_create(&labels).inc_by(0);
        }
        for kind in FailureKind::ALL {
            let labels = [("kind", kind.as_str())];
            self.failures.get_or_create(&labels).inc_by(0);
        }
        for path in GENERATING {
            for reason in UNSERVED {
                self.http_errors_of(path, 503, reason);
            }
        }
    }

    fn register(&self, workers: &Arc<workers::Registry>) {
        let mut to = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        to.register(
            "requests_in_flight",
            "Generations placed or waiting",
            self.in_flight.clone(),
        );
        to.register(
            "requests",
            "Generations ended, by outcome",
            self.requests.clone(),
        );
        to.register(
            "retries",
            "Attempts abandoned or retargeted, by reason (worker_lost, failed, kv_lost, returned, \
             refused, retargeted) and by kind of failure",
            self.retries.clone(),
        );
        to.register(
            "failures",
            "Generations that ended with an error, by kind of failure",
            self.failures.clone(),
        );
        to.register(
            "admission_refusals",
            "Generations turned away before they were placed, by reason (too_late, sequences, \
             tokens, waited)",
            self.refusals.clone(),
        );
        to.register(
            "http_errors",
            "Answers with an error status, by path, status, and the error's code in the answer as \
             reason, which is empty where it has none",
            self.http_errors.clone(),
        );
        to.register(
            "output_tokens",
            "Tokens sent to clients",
            self.output_tokens.clone(),
        );
        to.register(
            "prompt_tokens",
            "Prompt tokens received",
            self.prompt_tokens.clone(),
        );
        to.register(
            "transfer_bytes",
            "KV bytes moved for requests that ended well",
            self.transfer_bytes.clone(),
        );
        to.register(
            "resumed_answers",
            "Answers of vLLM and SGLang workers that another worker went on with after a loss",
            self.resumed.clone(),
        );
        to.register(
            "trace_spans_dropped",
            "Spans of traces that the collector did not get, by reason",
            self.trace_spans_dropped.clone(),
        );
        to.register(
            "request_log_dropped",
            "Requests that are missing from the request log, by reason",
            self.request_log_dropped.clone(),
        );
        for (name, help, histogram) in [
            (
                "admission_wait_seconds",
                "From a request's arrival until it may be placed",
                &self.admission_wait,
            ),
            (
                "time_to_first_token_seconds",
                "From a request's arrival to its first token",
                &self.first_token,
            ),
            (
                "time_to_second_token_seconds",
                "From a request's arrival to its second token",
                &self.second_token,
            ),
        ] {
            to.register(name, help, histogram.clone());
        }
        to.register(
            "inter_token_latency_seconds",
            "From a choice's token to its next one",
            self.between_tokens.clone(),
        );
        to.register(
            "request_duration_seconds",
            "From the arrival of a request that ended well to its end",
            self.total.clone(),
        );
        to.register(
            "phase_seconds",
            "Where the time of a request that ended well went, by phase as in docs/handoff.md",
            self.phases.clone(),
        );
        to.register_collector(Box::new(WorkerCollector(Arc::clone(workers))));
    }

    /// Counts an end.
    pub fn ended(&self, outcome: Outcome) {
        self.requests
            .get_or_create(&[("outcome", outcome.as_str())])
            .inc();
    }

    /// Counts an attempt that was abandoned or retargeted.
    pub fn retried(&self, reason: &'static str, kind: FailureKind) {
        let labels = [("reason", reason), ("kind", kind.as_str())];
        self.retries.get_or_create(&labels).inc();
        self.recorder.retried();
    }

    /// Counts a generation that ended with an error.
    pub fn failed(&self, kind: FailureKind) {
        self.failures
            .get_or_create(&[("kind", kind.as_str())])
            .inc();
    }

    /// Counts a generation that was turned away.
    pub fn refused(&self, reason: &'static str) {
        self.refusals.get_or_create(&[("reason", reason)]).inc();
    }

    /// Counts an answer with an error status; `path` is one of those that are served.
    /// `reason`: the error's code in the answer, or empty.
    pub fn http_error(&self, path: &str, status: u16, reason: &str) {
        self.http_errors_of(path, status, reason).inc();
    }

    fn http_errors_of(&self, path: &str, status: u16, reason: &str) -> Counter {
        let labels = [
            ("path", path.to_owned()),
            ("code", status.to_string()),
            ("reason", reason.to_owned()),
        ];
        self.http_errors.get_or_create(&labels).clone()
    }

    /// Counts a finished request's phases; those that did not occur are left out.
    pub fn finished(&self, timings: &Timings) {
        self.total.observe(timings.total.as_secs_f64());
        self.transfer_bytes.inc_by(timings.transfer_bytes);
        let moved = timings.transfer_bytes > 0;
        // A worker that was lost has not reported its times.
        let reported = !timings.prefill.is_zero();
        let placed_again = timings.replacements > 0;
        let phases: [(&str, Duration, bool); 10] = [
            ("queue", timings.queue, reported),
            ("prefill", timings.prefill, reported),
            ("first_token", timings.first_token, true),
            ("handshake", timings.handshake, moved),
            ("transfer", timings.transfer, moved),
            ("transfer_exposed", timings.transfer_exposed, moved),
            (
                "first_decode",
                timings.first_decode,
                !timings.first_decode.is_zero(),
            ),
            ("messages", timings.messages, moved && !placed_again),
            ("decode", timings.decode, !timings.decode.is_zero()),
            ("recovery", timings.recovery, placed_again),
        ];
        for (phase, time, _) in phases.into_iter().filter(|(.., occurred)| *occurred) {
            self.phases
                .get_or_create(&[("phase", phase)])
                .observe(time.as_secs_f64());
        }
    }

    /// The exposition, in the OpenMetrics text format.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &registry);
        text
    }
}

/// Upper bounds of the buckets of durations: 0.5 ms to two minutes.
const DURATIONS_S: [f64; 16] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    120.0,
];

fn durations() -> Histogram {
    Histogram::new(DURATIONS_S)
}

#[cfg(test)]
mod tests {
    use tasuki_flow::Fleet as _;

    use super::*;
    use crate::workers::testing::registry;

    #[test]
    fn a_phase_that_was_not_reported_is_not_counted() {
        let none = registry(0);
        let metrics = Metrics::new(&none);
        metrics.finished(&Timings::default());
        let text = metrics.text();
        assert!(text.contains("phase=\"first_token\""), "{text}");
        assert!(!text.contains("phase=\"prefill\"") && !text.contains("phase=\"queue\""));
    }

    #[test]
    fn what_alerts_watch_begins_at_zero() {
        let none = registry(0);
        let text = Metrics::new(&none).text();
        for series in [
            "tasuki_requests_total{outcome=\"failed\"}",
            "tasuki_requests_total{outcome=\"unavailable\"}",
            "tasuki_failures_total{kind=\"device\"}",
            "tasuki_http_errors_total{path=\"/generate\",code=\"503\",reason=\"no_worker\"}",
            "tasuki_http_errors_total{path=\"/v1/completions\",code=\"503\",reason=\"too_many_requests\"}",
        ] {
            assert!(text.contains(&format!("{series} 0\n")), "{series}: {text}");
        }
    }

    #[test]
    fn the_budget_of_retries_is_exported() {
        let none = registry(0);
        let metrics = Metrics::new(&none);
        assert!(metrics.text().contains("tasuki_retry_waits_total 0\n"));
        while (&*none).may_retry() {}
        let text = metrics.text();
        let line = text
            .lines()
            .find_map(|l| l.strip_prefix("tasuki_retry_budget "));
        assert!(line.unwrap().parse::<f64>().unwrap() < 1.0, "{text}");
        assert!(text.contains("tasuki_retry_waits_total 1\n"), "{text}");
    }
}
