//! One trace over the router and its workers, as a collector gets it.

mod failures;

use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::*;
use crate::app::App;
use crate::metrics::Counters;
use crate::routes::routes;
use crate::testing::{MODEL, TestModel, settings};
use crate::traces::tests::collector::{
    Collector, error, float, is_within, number, text, texts, value,
};
use crate::traces::tests::traces;

const PATH: &str = "/v1/completions";
const SERVER: &str = "POST /v1/completions";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn app(service: Service, collector: &Collector, ratio: Option<f64>) -> Arc<App> {
    let counters = Counters::default();
    Arc::new(App {
        traces: Some(traces(collector, ratio, &counters)),
        ..App::new(Arc::new(service), TestModel::new().only(), settings())
    })
}

/// Sends a request, and reads the answer to its end.
async fn send(app: &Arc<App>, traceparent: Option<&str>, body: Value) -> StatusCode {
    let mut request = Request::post(PATH);
    if let Some(parent) = traceparent {
        request = request.header("traceparent", parent);
    }
    let request = request.body(Body::from(body.to_string())).unwrap();
    let response = routes(Arc::clone(app)).oneshot(request).await.unwrap();
    let (head, body) = response.into_parts();
    to_bytes(body, usize::MAX).await.unwrap();
    head.status
}

async fn flush(app: &App) {
    let traces = app.traces.as_ref().expect("they are on");
    traces.end().await;
}

fn prompt() -> Value {
    json!({"prompt": "a prompt", "max_tokens": 9, "user": "team"})
}

/// Every span is of the same trace and within its parent in time: phases of workers in a leg, the others
/// in the request.
fn check_family(collector: &Collector) -> Span {
    let server = collector.span(SERVER);
    let spans = collector.spans();
    for span in &spans {
        assert_eq!(span.trace_id, server.trace_id, "{}", span.name);
        if span.span_id == server.span_id {
            continue;
        }
        let mut others = spans.iter();
        let parent = others.find(|other| other.span_id == span.parent_span_id);
        let parent = parent.unwrap_or_else(|| panic!("{} has no parent", span.name));
        assert!(is_within(span, parent), "{span:#?} {parent:#?}");
        if !span.name.starts_with("tasuki.worker.") {
            assert_eq!(parent.span_id, server.span_id, "{}", span.name);
            continue;
        }
        for attribute in ["tasuki.worker.id", "tasuki.attempt"] {
            let of = |span: &Span| value(&span.attributes, attribute);
            assert!(of(span).is_some() && of(span) == of(parent), "{span:#?}");
        }
    }
    server
}

/// Serves a request on a prefill and a decode worker.
async fn split(sessions: &mut [Session]) {
    let [prefill, decode] = sessions else {
        unreachable!()
    };
    let id = prefill.submit().await.request_id;
    decode.submit().await;
    prefill.output(&id, 0, &[97], F::FinishNone);
    let timings = LegTimings {
        queue_s: 500.0,
        prefill_s: 0.25,
        ..Default::default()
    };
    prefill.ended(&id, R::LegEndHandedOff, timings);
    decode.output(&id, 0, &[97], F::FinishNone);
    decode.output(&id, 1, &[98, 99], F::FinishStop);
    let timings = LegTimings {
        transfer_s: 0.002,
        transfer_exposed_s: 0.001,
        transfer_post_s: 0.0005,
        transfer_bytes: 4_096,
        transfer_descriptors: 3,
        transport: "nixl-ucx/tcp".to_owned(),
        decode_s: 125.0,
        ..Default::default()
    };
    decode.ended(&id, R::LegEndFinished, timings);
}

#[tokio::test]
async fn a_split_request_is_one_trace_of_the_clients() {
    let collector = Collector::start().await;
    let (service, _workers, mut sessions) = serve(&[Role::Prefill, Role::Decode], by_role).await;
    let app = app(service, &collector, Some(0.0));
    let parent = format!("00-{TRACE}-{PARENT}-01");
    let (status, ()) = tokio::join!(
        send(&app, Some(&parent), prompt()),
        split(&mut sessions[..])
    );
    assert_eq!(status, 200);
    flush(&app).await;
    let expected = [
        SERVER,
        "tasuki.decode",
        "tasuki.placement",
        "tasuki.prefill",
        "tasuki.queue",
        "tasuki.tokenize",
        // They took longer, by the workers' clocks, than the router saw.
        "tasuki.worker.decode",
        "tasuki.worker.queue",
    ];
    assert_eq!(collector.names(), expected);
    let server = check_family(&collector);
    assert_eq!(hex(&server.trace_id), TRACE);
    assert_eq!(hex(&server.parent_span_id), PARENT);
    check_request(&server);

    let [prefill, decode] = ["tasuki.prefill", "tasuki.decode"].map(|name| collector.span(name));
    for (leg, worker, end) in [(&prefill, "0", "handed off"), (&decode, "1", "finished")] {
        assert_eq!(leg.kind(), SpanKind::Client);
        assert_eq!(text(leg, "tasuki.worker.id"), worker);
        assert_eq!(text(leg, "tasuki.leg.end"), end);
        assert_eq!(number(leg, "tasuki.attempt"), 0);
        assert_eq!(number(leg, "tasuki.leg.prompt_tokens"), 8);
        let id = text(&server, "gen_ai.response.id");
        assert_eq!(text(leg, "tasuki.request.id"), format!("{id}.0"));
        assert_eq!(leg.events[0].name, "first_output");
        assert_eq!(error(leg), None);
    }
    assert_eq!(float(&prefill, "tasuki.queue_s"), 500.0);
    assert_eq!(float(&prefill, "tasuki.prefill_s"), 0.25);
    assert!(value(&prefill.attributes, "tasuki.transfer_bytes").is_none());
    assert_eq!(float(&decode, "tasuki.transfer_s"), 0.002);
    assert_eq!(float(&decode, "tasuki.transfer_exposed_s"), 0.001);
    assert_eq!(float(&decode, "tasuki.transfer_post_s"), 0.0005);
    assert_eq!(number(&decode, "tasuki.transfer_bytes"), 4_096);
    assert_eq!(number(&decode, "tasuki.transfer_descriptors"), 3);
    assert_eq!(text(&decode, "tasuki.transport"), "nixl-ucx/tcp");
    assert!(value(&prefill.attributes, "tasuki.transport").is_none());
    assert_eq!(float(&decode, "tasuki.decode_s"), 125.0);

    let placement = collector.span("tasuki.placement");
    let why = text(&placement, "tasuki.placement.why");
    assert!(why.contains("split "), "{why}");
    // One after another.
    let steps = ["tasuki.tokenize", "tasuki.queue", "tasuki.placement"];
    let steps = steps.map(|name| collector.span(name));
    let times = steps.map(|span| [span.start_time_unix_nano, span.end_time_unix_nano]);
    let times = times.concat();
    assert!(times.is_sorted() && times[5] <= prefill.start_time_unix_nano);
}

fn check_request(server: &Span) {
    assert_eq!(server.kind(), SpanKind::Server);
    for (name, expected) in [
        ("http.request.method", "POST"),
        ("http.route", PATH),
        ("gen_ai.operation.name", "text_completion"),
        ("gen_ai.request.model", MODEL),
        ("tasuki.outcome", "finished"),
        ("tasuki.tenant", "team"),
    ] {
        assert_eq!(text(server, name), expected, "{name}");
    }
    for (name, expected) in [
        ("http.response.status_code", 200),
        ("gen_ai.usage.input_tokens", 8),
        ("gen_ai.usage.output_tokens", 3),
        ("gen_ai.usage.cache_read.input_tokens", 0),
        ("tasuki.replacements", 0),
    ] {
        assert_eq!(number(server, name), expected, "{name}");
    }
    assert_eq!(texts(server, "gen_ai.response.finish_reasons"), ["stop"]);
    assert!(float(server, "gen_ai.response.time_to_first_chunk") > 0.0);
    assert_eq!(error(server), None);
}

/// Serves a request on one worker.
async fn colocated(session: &mut Session) {
    let id = session.submit().await.request_id;
    session.output(&id, 0, &[97, 98], F::FinishLength);
    session.ended(&id, R::LegEndFinished, LegTimings::default());
}

#[tokio::test]
async fn a_colocated_request_without_a_parent_is_a_trace_of_its_own() {
    for parent in [
        None,
        Some("00-xyz-1-01".to_owned()),
        Some(format!("00-{TRACE}-{PARENT}")),
    ] {
        let collector = Collector::start().await;
        let (service, _workers, mut sessions) = serve(&[Role::Mixed], |_| {}).await;
        let app = app(service, &collector, None);
        let body = json!({"prompt": "a prompt", "max_tokens": 2, "stream": true});
        let (status, ()) = tokio::join!(
            send(&app, parent.as_deref(), body),
            colocated(&mut sessions[0])
        );
        assert_eq!(status, 200);
        flush(&app).await;
        let server = check_family(&collector);
        assert!(server.parent_span_id.is_empty(), "{parent:?}");
        assert_ne!(hex(&server.trace_id), TRACE);
        let finishes = texts(&server, "gen_ai.response.finish_reasons");
        assert_eq!(finishes, ["length"]);
        let leg = collector.span("tasuki.colocated");
        assert_eq!(text(&leg, "tasuki.leg.end"), "finished");
        assert_eq!(collector.names().len(), 5, "{:?}", collector.names());
    }
}

#[tokio::test]
async fn what_is_not_sampled_is_served_and_not_sent() {
    let collector = Collector::start().await;
    let (service, _workers, mut sessions) = serve(&[Role::Mixed], |_| {}).await;
    let app_all = app(service.clone(), &collector, None);
    let app_none = app(service, &collector, Some(0.0));
    let unsampled = format!("00-{TRACE}-{PARENT}-00");
    for (app, parent) in [(&app_all, Some(unsampled.as_str())), (&app_none, None)] {
        let (status, ()) = tokio::join!(send(app, parent, prompt()), colocated(&mut sessions[0]));
        assert_eq!(status, 200);
        flush(app).await;
    }
    assert_eq!((collector.posts(), collector.names().len()), (0, 0));
}
