//! A build without traces.

use std::time::Instant;

use axum::extract::Request;
use axum::http::HeaderMap;
use axum::response::Response;
use tasuki_flow::{Input, LegId, LegSpec, RetryReason, Timings};

use super::{PhaseName, TraceArgs, TraceError};
use crate::access_log::{Ended, RequestLog};
use crate::metrics::Counters;

/// There are none.
pub enum Traces {}

/// There is none.
#[derive(Debug, Clone)]
pub enum Trace {}

/// There is none.
pub enum Phase {}

/// There are none.
pub enum LegTraces {}

impl Traces {
    /// # Errors
    /// [`TraceError::LeftOut`] where a collector is given.
    pub fn start(args: &TraceArgs, _: &Counters) -> Result<Option<Self>, TraceError> {
        match args.otlp_endpoint {
            Some(_) => Err(TraceError::LeftOut("--otlp-endpoint")),
            None => Ok(None),
        }
    }

    pub fn request(&self, _: &Request) -> Option<Trace> {
        match *self {}
    }

    pub async fn end(&self) {
        match *self {}
    }
}

impl Trace {
    pub fn is_sampled(&self) -> bool {
        match *self {}
    }

    pub fn begin(&self, _: PhaseName, _: Instant) -> Phase {
        match *self {}
    }

    pub fn legs(&self, _: &str) -> LegTraces {
        match *self {}
    }

    pub fn hand_on(&self, _: &mut HeaderMap) {
        match *self {}
    }

    pub fn answered(&self, _: &Response) {
        match *self {}
    }

    pub fn end(&self, _: &RequestLog, _: &Ended) {
        match *self {}
    }
}

impl Phase {
    pub fn end(self) {
        match self {}
    }
}

impl LegTraces {
    pub fn place(&mut self) {
        match *self {}
    }

    pub fn dispatch(&mut self, _: LegId, _: &mut LegSpec, _: &Timings) {
        match *self {}
    }

    pub fn observe(&mut self, _: &Input) {
        match *self {}
    }

    pub fn retry(&mut self, _: u32, _: RetryReason, _: &str) {
        match *self {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_is_refused_by_name() {
        let mut args = TraceArgs::default();
        assert!(Traces::start(&args, &Counters::default()).is_ok_and(|traces| traces.is_none()));
        args.otlp_endpoint = Some("http://a:4318".to_owned());
        let error = Traces::start(&args, &Counters::default()).err();
        let error = error.expect("a refusal").to_string();
        assert!(
            error.starts_with("--otlp-endpoint requires the feature `otel`"),
            "{error}"
        );
        assert!(
            error.ends_with("`make setup FEATURES=otel` adds it"),
            "{error}"
        );
    }
}
