//! The spans of one generation: each placement, and each leg on a worker.
//!
//! Owned by the task of the generation, which shows it what its state machine gets and does.

use std::time::SystemTime;

use axum::http::HeaderMap;
use opentelemetry::KeyValue;
use opentelemetry::trace::{Span as _, SpanKind, Status};
use opentelemetry_sdk::trace::Span;
use tasuki_core::FailureKind;
use tasuki_flow::{Input, LegEnd, LegEndReason, LegId, LegKind, LegSpec, LegTimings};
use tasuki_flow::{Opaque, RetryReason, Timings, WorkerKey};

use super::phases::EndedLeg;
use super::request::Trace;
use super::{context, names};

/// Dropped, it ends what is open: the router aborts these legs.
pub struct LegTraces {
    trace: Trace,
    request_id: String,
    /// Until the next leg is dispatched.
    placing: Option<Span>,
    open: Vec<OpenLeg>,
    /// Attempts of which a leg's span has an error.
    failed: Vec<u32>,
}

struct OpenLeg {
    id: LegId,
    kind: LegKind,
    span: Span,
    begin: SystemTime,
    has_output: bool,
}

impl Drop for LegTraces {
    fn drop(&mut self) {
        let now = self.trace.now();
        for leg in &mut self.open {
            let aborted = LegEndReason::Aborted.as_str();
            leg.span
                .set_attribute(KeyValue::new(names::LEG_END, aborted));
            leg.span.end_with_timestamp(now);
        }
        if let Some(placing) = &mut self.placing {
            placing.end_with_timestamp(now);
        }
    }
}

impl LegTraces {
    pub fn new(trace: Trace, request_id: &str) -> Self {
        Self {
            trace,
            request_id: request_id.to_owned(),
            placing: None,
            open: Vec::new(),
            failed: Vec::new(),
        }
    }

    /// From now on the generation is to be placed.
    pub fn place(&mut self) {
        self.place_with(Vec::new());
    }

    /// An attempt is abandoned or retargeted.
    pub fn retry(&mut self, attempt: u32, reason: RetryReason, detail: &str) {
        // A leg whose worker did not end it itself: it sent nothing for too long.
        if !self.failed.contains(&attempt) {
            let mut open = self.open.iter_mut();
            let stalled =
                open.find(|leg| leg.id.attempt == attempt && leg.kind != LegKind::Prefill);
            if let Some(leg) = stalled {
                fail(&mut leg.span, reason.as_str(), reason.kind(), detail);
                self.failed.push(attempt);
            }
        }
        self.place_with(vec![
            KeyValue::new(names::RETRY_REASON, reason.as_str()),
            KeyValue::new(names::RETRY_DETAIL, detail.to_owned()),
        ]);
    }

    fn place_with(&mut self, attributes: Vec<KeyValue>) {
        let now = self.trace.now();
        if self.placing.is_none() {
            let span = self
                .trace
                .child(names::PLACEMENT, SpanKind::Internal, now, attributes);
            self.placing = Some(span);
        }
    }

    /// A leg begins. `timings`: of the generation, with the costs of its placement. Gives a
    /// worker of another engine the headers that make its spans children of the leg's.
    pub fn dispatch(&mut self, leg: LegId, spec: &mut LegSpec, timings: &Timings) {
        let now = self.trace.now();
        let attempt = KeyValue::new(names::ATTEMPT, i64::from(leg.attempt));
        if let Some(mut placing) = self.placing.take() {
            placing.set_attribute(attempt.clone());
            if let Some(why) = &timings.why {
                placing.set_attribute(KeyValue::new(names::WHY, why.to_string()));
            }
            placing.end_with_timestamp(now);
        }
        let name = match spec.kind {
            LegKind::Colocated => "tasuki.colocated",
            LegKind::Prefill => "tasuki.prefill",
            LegKind::Decode => "tasuki.decode",
        };
        let count = |tokens: usize| i64::try_from(tokens).unwrap_or(i64::MAX);
        let name_of_leg = format!("{}.{}", self.request_id, leg.attempt);
        let mut attributes = vec![
            attempt,
            KeyValue::new(names::REQUEST_ID, name_of_leg),
            KeyValue::new(names::WORKER, leg.worker.worker.to_string()),
            KeyValue::new(names::PROMPT_TOKENS, count(spec.prompt.len())),
        ];
        if !spec.resumed.is_empty() {
            let resumed = count(spec.resumed.len());
            attributes.push(KeyValue::new(names::RESUMED_TOKENS, resumed));
        }
        let span = self.trace.child(name, SpanKind::Client, now, attributes);
        if spec.opaque.is_some() {
            let mut headers = HeaderMap::new();
            context::inject(span.span_context(), &mut headers);
            spec.trace = Some(Opaque::new(headers));
        }
        self.open.push(OpenLeg {
            id: leg,
            kind: spec.kind,
            span,
            begin: now,
            has_output: false,
        });
    }

    /// What the workers report.
    pub fn observe(&mut self, input: &Input) {
        match input {
            Input::Output(id, _) => self.on_output(*id),
            Input::Ended(id, end) => self.on_ended(*id, end),
            Input::Lost(worker) => self.on_lost(*worker),
            _ => {}
        }
    }

    fn on_output(&mut self, id: LegId) {
        let now = self.trace.now();
        if let Some(leg) = self.open.iter_mut().find(|leg| leg.id == id)
            && !std::mem::replace(&mut leg.has_output, true)
        {
            let none = Vec::new();
            leg.span
                .add_event_with_timestamp(names::FIRST_OUTPUT, now, none);
        }
    }

    fn on_ended(&mut self, id: LegId, end: &LegEnd) {
        let Some(at) = self.open.iter().position(|leg| leg.id == id) else {
            return;
        };
        let now = self.trace.now();
        let OpenLeg {
            kind,
            mut span,
            begin,
            ..
        } = self.open.swap_remove(at);
        let reason = end.reason.as_str();
        span.set_attribute(KeyValue::new(names::LEG_END, reason));
        if end.reason.is_failure() {
            // A worker that rejects a request may quote it.
            let message = match end.reason {
                LegEndReason::Rejected => "",
                _ => &end.message,
            };
            fail(&mut span, reason, end.failure, message);
            self.failed.push(id.attempt);
        }
        if let Some(timings) = &end.timings {
            set_timings(&mut span, timings);
            let leg = EndedLeg {
                span: span.span_context(),
                kind,
                handed_off: end.reason == LegEndReason::HandedOff,
                begin,
                end: now,
            };
            let attributes = [
                KeyValue::new(names::WORKER, id.worker.worker.to_string()),
                KeyValue::new(names::ATTEMPT, i64::from(id.attempt)),
            ];
            leg.record(&self.trace, timings, &attributes);
        }
        span.end_with_timestamp(now);
    }

    fn on_lost(&mut self, worker: WorkerKey) {
        let now = self.trace.now();
        let lost = self.open.extract_if(.., |leg| leg.id.worker == worker);
        for mut leg in lost {
            let reason = RetryReason::WorkerLost;
            let message = format!("worker {} is gone", worker.worker);
            fail(&mut leg.span, reason.as_str(), reason.kind(), &message);
            leg.span.end_with_timestamp(now);
            self.failed.push(leg.id.attempt);
        }
    }
}

fn fail(span: &mut Span, reason: &'static str, kind: FailureKind, message: &str) {
    span.set_attribute(KeyValue::new(names::ERROR_TYPE, reason));
    span.set_attribute(KeyValue::new(names::FAILURE, kind.as_str()));
    span.set_status(Status::error(message.to_owned()));
}

/// By the worker's clock; phases that did not occur are left out.
fn set_timings(span: &mut Span, timings: &LegTimings) {
    for (name, duration) in [
        ("tasuki.queue_s", timings.queue),
        ("tasuki.prefill_s", timings.prefill),
        ("tasuki.handshake_s", timings.handshake),
        ("tasuki.transfer_s", timings.transfer),
        ("tasuki.transfer_exposed_s", timings.transfer_exposed),
        ("tasuki.transfer_tail_s", timings.transfer_tail),
        ("tasuki.transfer_post_s", timings.transfer_post),
        ("tasuki.first_decode_s", timings.first_decode),
        ("tasuki.decode_s", timings.decode),
    ] {
        if !duration.is_zero() {
            span.set_attribute(KeyValue::new(name, duration.as_secs_f64()));
        }
    }
    for (name, number) in [
        (names::TRANSFER_BYTES, timings.transfer_bytes),
        (names::TRANSFER_DESCRIPTORS, timings.transfer_descriptors),
    ] {
        if number > 0 {
            let number = i64::try_from(number).unwrap_or(i64::MAX);
            span.set_attribute(KeyValue::new(name, number));
        }
    }
    if !timings.transport.is_empty() {
        span.set_attribute(KeyValue::new(names::TRANSPORT, timings.transport.clone()));
    }
}
