//! Trace contexts in the headers of HTTP, by the W3C's recommendation.

use std::collections::HashMap;

use axum::http::HeaderMap;
use opentelemetry::Context;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{SpanContext, TraceContextExt};
use opentelemetry_http::HeaderInjector;
use opentelemetry_sdk::propagation::TraceContextPropagator;

const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";

/// Of a traceparent of version 00, in bytes.
const LENGTH: usize = 55;

/// The client's span, if its headers name one. A malformed traceparent is ignored, and with it
/// the tracestate.
pub fn parent(headers: &HeaderMap) -> Context {
    let mut given = headers.get_all(TRACEPARENT).iter();
    let (Some(value), None) = (given.next(), given.next()) else {
        return Context::new();
    };
    let Some(value) = value.to_str().ok().filter(|value| is_well_formed(value)) else {
        return Context::new();
    };
    // A list may be spread over several headers.
    let states = headers.get_all(TRACESTATE).iter();
    let states: Vec<&str> = states.filter_map(|state| state.to_str().ok()).collect();
    let carrier = HashMap::from([
        (TRACEPARENT.to_owned(), value.to_owned()),
        (TRACESTATE.to_owned(), states.join(",")),
    ]);
    TraceContextPropagator::new().extract_with_context(&Context::new(), &carrier)
}

/// Puts a span into headers, in place of the one that is there.
pub fn inject(span: &SpanContext, headers: &mut HeaderMap) {
    let context = Context::new().with_remote_span_context(span.clone());
    TraceContextPropagator::new().inject_context(&context, &mut HeaderInjector(headers));
    if span.trace_state().header().is_empty() {
        headers.remove(TRACESTATE);
    }
}

/// Whether each field has its length and its digits. What they must not be besides, such as
/// all zero, the propagator knows.
fn is_well_formed(traceparent: &str) -> bool {
    let bytes = traceparent.as_bytes();
    if bytes.len() < LENGTH {
        return false;
    }
    let is_digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let mut fields = bytes[..LENGTH].split(|byte| *byte == b'-');
    let has_fields = [2, 32, 16, 2].into_iter().all(|length| {
        let field = fields.next().unwrap_or_default();
        field.len() == length && field.iter().all(is_digit)
    });
    // Later versions may have more after a further dash.
    let ends = match &bytes[..2] {
        b"00" => bytes.len() == LENGTH,
        b"ff" => false,
        _ => bytes.get(LENGTH).is_none_or(|byte| *byte == b'-'),
    };
    has_fields && ends
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const SPAN: &str = "00f067aa0ba902b7";

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let pairs = pairs.iter();
        let mut headers = HeaderMap::new();
        pairs.for_each(|(name, value)| {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        });
        headers
    }

    fn span_of(headers: &HeaderMap) -> SpanContext {
        parent(headers).span().span_context().clone()
    }

    #[test]
    fn a_well_formed_parent_is_read_and_handed_on() {
        for (version, rest, flags) in [
            ("00", "", "01"),
            ("00", "", "00"),
            ("cc", "", "01"),
            ("01", "-what-follows", "01"),
        ] {
            let value = format!("{version}-{TRACE}-{SPAN}-{flags}{rest}");
            let span = span_of(&headers(&[
                (TRACEPARENT, &value),
                (TRACESTATE, "a=1"),
                (TRACESTATE, "b=2"),
            ]));
            assert_eq!(span.trace_id().to_string(), TRACE, "{value}");
            assert_eq!(span.span_id().to_string(), SPAN);
            assert_eq!(span.is_sampled(), flags == "01");
            let mut handed = headers(&[(TRACEPARENT, "x"), (TRACESTATE, "y=1")]);
            inject(&span, &mut handed);
            assert_eq!(handed[TRACEPARENT], format!("00-{TRACE}-{SPAN}-{flags}"));
            assert_eq!(handed[TRACESTATE], "a=1,b=2");
        }
    }

    #[test]
    fn a_malformed_parent_is_ignored() {
        let zeros = "0".repeat(32);
        for value in [
            String::new(),
            "00".to_owned(),
            format!("00-{TRACE}-{SPAN}-01-"),
            format!("00-{TRACE}-{SPAN}-01-more"),
            format!("cc-{TRACE}-{SPAN}-01more"),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("00-{zeros}-{SPAN}-01"),
            format!("00-{TRACE}-0000000000000000-01"),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-+{}-{SPAN}-01", &TRACE[1..]),
            format!("00-{}-{SPAN}-001", &TRACE[1..]),
            format!("00-{TRACE}-{SPAN}-0g"),
            format!("00_{TRACE}_{SPAN}_01"),
        ] {
            let span = span_of(&headers(&[(TRACEPARENT, &value), (TRACESTATE, "a=1")]));
            assert!(!span.is_valid(), "{value}");
            assert!(span.trace_state().header().is_empty());
        }
        let value = format!("00-{TRACE}-{SPAN}-01");
        let twice = headers(&[(TRACEPARENT, &value), (TRACEPARENT, &value)]);
        assert!(!span_of(&twice).is_valid(), "there is one at most");
    }
}
