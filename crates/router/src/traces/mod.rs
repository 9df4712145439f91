//! Traces of requests for an OpenTelemetry collector: one trace over the router, the prefill
//! worker and the decode worker.
//!
//! ```text
//!  routes ──Traces::request──▶ Trace, the server span     one for each request that generates
//!                                │
//!        intake, driver ──begin──┼──▶ Phase               tokenize, queue
//!        driver ──legs───────────┴──▶ LegTraces           placement, one span for each leg
//!                                            │ at its end
//!                                 queue of spans ──▶ export, one task ──OTLP──▶ collector
//! ```
//!
//! A request never waits for the collector. A build without the feature `otel` has none of it.

#[cfg_attr(feature = "otel", path = "otel/mod.rs")]
#[cfg_attr(not(feature = "otel"), path = "left_out.rs")]
mod build;
#[cfg(all(test, feature = "otel"))]
pub mod tests;

use clap::Args;
use tasuki_core::options::within;

pub use self::build::{LegTraces, Trace, Traces};

/// Where time is spent before a request has a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PhaseName {
    /// From the end of the body to the prompt's tokens.
    Tokenize,
    /// From then until the request may be placed.
    Queue,
}

/// Options of the command line.
#[derive(Debug, Clone, Default, Args)]
pub struct TraceArgs {
    /// OpenTelemetry collector that gets traces of requests, by OTLP over HTTP: spans are posted
    /// to /v1/traces there. Not given: requests are not traced.
    #[arg(long, value_name = "http://HOST:PORT", value_parser = endpoint)]
    pub otlp_endpoint: Option<String>,

    /// Share of the requests without a traceparent header that are traced, from 0 to 1. The
    /// sampled flag of a traceparent decides for the others. Default: 1.
    #[arg(long, value_name = "RATIO", requires = "otlp_endpoint", value_parser = ratio)]
    pub trace_sample_ratio: Option<f64>,
}

/// Why there are no traces.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[cfg(not(feature = "otel"))]
    #[error(
        "{0} requires the feature `otel`, which this build leaves out: `make setup FEATURES=otel` \
         adds it"
    )]
    LeftOut(&'static str),
    #[cfg(feature = "otel")]
    #[error("--otlp-endpoint {endpoint}: {source}")]
    Exporter {
        endpoint: String,
        source: opentelemetry_otlp::ExporterBuildError,
    },
}

/// An address whose host and port are known; without a slash at its end.
fn endpoint(given: &str) -> Result<String, String> {
    let trimmed = given.trim_end_matches('/');
    let uri: axum::http::Uri = trimmed.parse().map_err(|error| format!("{error}"))?;
    match (uri.scheme_str(), uri.host()) {
        (Some("http"), Some(host)) if !host.is_empty() && uri.query().is_none() => {
            Ok(trimmed.to_owned())
        }
        (Some("https"), _) => Err(
            "https is not supported: name a collector that takes http, such as one on this \
             machine that passes traces on over https"
                .to_owned(),
        ),
        _ => Err("it must be http://HOST:PORT, of OTLP over HTTP (port 4318)".to_owned()),
    }
}

fn ratio(given: &str) -> Result<f64, String> {
    within(given, 0.0, 1.0)
}
