//! Traces as a collector gets them, and a collector that takes none.

pub mod collector;
mod export;

use axum::body::Body;
use axum::http::Request;

use self::collector::Collector;
use super::{TraceArgs, Traces, endpoint, ratio};
use crate::metrics::Counters;

/// Traces for a collector. `ratio`: see [`TraceArgs`].
pub fn traces(collector: &Collector, ratio: Option<f64>, dropped: &Counters) -> Traces {
    let args = TraceArgs {
        otlp_endpoint: Some(collector.endpoint()),
        trace_sample_ratio: ratio,
    };
    let traces = Traces::start(&args, dropped).expect("a fit environment");
    traces.expect("a collector is given")
}

/// Ends so many traces of one span each.
fn end_traces(traces: &Traces, count: usize) {
    for _ in 0..count {
        let request = Request::post("/v1/completions");
        let request = request.body(Body::empty()).unwrap();
        drop(traces.request(&request).expect("it generates"));
    }
}

#[test]
fn addresses_of_collectors_are_checked() {
    for (given, read) in [
        ("http://a:4318", "http://a:4318"),
        ("http://a:4318/", "http://a:4318"),
        ("http://[::1]:4318/prefix", "http://[::1]:4318/prefix"),
    ] {
        assert_eq!(endpoint(given).as_deref(), Ok(read));
    }
    for (given, remedy) in [
        ("a:4318", "http://HOST:PORT"),
        ("/a", "http://HOST:PORT"),
        ("grpc://a:4317", "http://HOST:PORT"),
        ("http://a:4318/?b=c", "http://HOST:PORT"),
        ("https://a:4318", "https is not supported"),
        ("", "empty"),
    ] {
        let error = endpoint(given).expect_err(given);
        assert!(error.contains(remedy), "{given}: {error}");
    }
    assert_eq!(ratio("0.25"), Ok(0.25));
    for given in ["-0.1", "1.1", "nan", "x"] {
        assert!(ratio(given).is_err(), "{given}");
    }
}

#[tokio::test]
async fn only_requests_that_generate_are_traced() {
    let collector = Collector::start().await;
    let traces = traces(&collector, None, &Counters::default());
    for (method, path, traced) in [
        ("POST", "/v1/chat/completions", true),
        ("POST", "/generate", true),
        ("GET", "/v1/completions", false),
        ("POST", "/tokenize", false),
        ("GET", "/metrics", false),
    ] {
        let request = Request::builder().method(method).uri(path);
        let request = request.body(Body::empty()).unwrap();
        assert_eq!(traces.request(&request).is_some(), traced, "{path}");
    }
}
