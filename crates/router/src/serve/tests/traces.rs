//! One trace over the router and its workers, as a collector gets it.

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

/// Every span is a child of the request's, of the same trace, and within it in time.
fn check_family(collector: &Collector) -> Span {
    let server = collector.span(SERVER);
    for span in collector.spans() {
        assert_eq!(span.trace_id, server.trace_id, "{}", span.name);
        if span.span_id != server.span_id {
            assert_eq!(span.parent_span_id, server.span_id, "{}", span.name);
            assert!(is_within(&span, &server), "{span:#?} {server:#?}");
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
        queue_s: 0.5,
        prefill_s: 0.25,
        ..Default::default()
    };
    prefill.ended(&id, R::LegEndHandedOff, timings);
    decode.output(&id, 0, &[97], F::FinishNone);
    decode.output(&id, 1, &[98, 99], F::FinishStop);
    let timings = LegTimings {
        transfer_s: 0.002,
        transfer_exposed_s: 0.001,
        transfer_bytes: 4_096,
        decode_s: 0.125,
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
    assert_eq!(float(&prefill, "tasuki.queue_s"), 0.5);
    assert_eq!(float(&prefill, "tasuki.prefill_s"), 0.25);
    assert!(value(&prefill.attributes, "tasuki.transfer_bytes").is_none());
    assert_eq!(float(&decode, "tasuki.transfer_s"), 0.002);
    assert_eq!(float(&decode, "tasuki.transfer_exposed_s"), 0.001);
    assert_eq!(number(&decode, "tasuki.transfer_bytes"), 4_096);
    assert_eq!(float(&decode, "tasuki.decode_s"), 0.125);

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

#[tokio::test]
async fn a_lost_workers_leg_has_an_error_and_the_next_attempt_is_in_the_trace() {
    let collector = Collector::start().await;
    let roles = [Role::Prefill, Role::Decode, Role::Decode];
    let (service, _workers, mut sessions) = serve(&roles, by_role).await;
    let app = app(service, &collector, None);
    let serving = async {
        let first = sessions[0].submit().await;
        let lost: usize = match first.peer.as_ref().expect("a peer").engine_id.as_str() {
            "e1" => 1,
            _ => 2,
        };
        sessions[0].output(&first.request_id, 0, &[97], F::FinishNone);
        sessions[lost].submit().await;
        sessions[lost].output(&first.request_id, 0, &[97, 98], F::FinishNone);
        let end = R::LegEndHandedOff;
        sessions[0].ended(&first.request_id, end, LegTimings::default());
        drop(sessions.remove(lost));
        let [prefill, left] = &mut sessions[..] else {
            unreachable!()
        };
        let id = prefill.submit().await.request_id;
        left.submit().await;
        prefill.output(&id, 2, &[99], F::FinishNone);
        prefill.ended(&id, end, LegTimings::default());
        left.output(&id, 2, &[99, 100], F::FinishStop);
        left.ended(&id, R::LegEndFinished, LegTimings::default());
        lost
    };
    let (status, lost) = tokio::join!(send(&app, None, prompt()), serving);
    assert_eq!(status, 200);
    flush(&app).await;
    let server = check_family(&collector);
    assert_eq!(number(&server, "tasuki.replacements"), 1);
    assert_eq!(error(&server), None, "its client has the whole answer");
    let [first, second] = &collector.spans_of("tasuki.decode")[..] else {
        panic!("{:?}", collector.names());
    };
    assert_eq!(text(first, "tasuki.worker.id"), lost.to_string());
    assert_eq!(text(first, "error.type"), "worker_lost");
    assert_eq!(text(first, "tasuki.failure.kind"), "device");
    assert_eq!(error(first), Some(format!("worker {lost} is gone")));
    assert_eq!(error(second), None);
    assert_eq!(number(second, "tasuki.attempt"), 1);
    assert_eq!(number(second, "tasuki.leg.resumed_tokens"), 2);
    let placements = collector.spans_of("tasuki.placement");
    assert_eq!(placements.len(), 2);
    assert_eq!(text(&placements[1], "tasuki.retry.reason"), "worker_lost");
    assert_eq!(number(&placements[1], "tasuki.attempt"), 1);
    let prefills = collector.spans_of("tasuki.prefill");
    assert!(prefills.len() == 2 && prefills.iter().all(|leg| error(leg).is_none()));
}

#[tokio::test]
async fn a_worker_that_stalls_has_the_error() {
    let collector = Collector::start().await;
    let (service, _workers, mut sessions) = serve(&[Role::Mixed, Role::Mixed], |tuning| {
        tuning.machine.stalled = Some(Duration::from_millis(150));
    })
    .await;
    let app = app(service, &collector, None);
    let serving = async {
        let [a, b] = &mut sessions[..] else {
            unreachable!()
        };
        let (first, stalled, other) = tokio::select! {
            submit = a.submit() => (submit, a, b),
            submit = b.submit() => (submit, b, a),
        };
        stalled.output(&first.request_id, 0, &[97, 98], F::FinishNone);
        let id = other.submit().await.request_id;
        other.output(&id, 2, &[99], F::FinishStop);
        other.ended(&id, R::LegEndFinished, LegTimings::default());
    };
    let (status, ()) = tokio::join!(send(&app, None, prompt()), serving);
    assert_eq!(status, 200);
    flush(&app).await;
    check_family(&collector);
    let [first, second] = &collector.spans_of("tasuki.colocated")[..] else {
        panic!("{:?}", collector.names());
    };
    let message = error(first).expect("it stalled");
    assert!(message.contains("sent no token for 150ms"), "{message}");
    assert_eq!(text(first, "error.type"), "failed");
    assert_eq!(error(second), None);
}

/// Ends a leg with an error that another worker may not have.
fn fail(session: &Session, id: &str) {
    session.report(v1::StepReport {
        ended: vec![v1::LegEnd {
            request_id: id.to_owned(),
            reason: R::LegEndFailed.into(),
            failure: v1::FailureKind::FailureDevice.into(),
            message: "the step raised an error".to_owned(),
            ..Default::default()
        }],
        ..Default::default()
    });
}

#[tokio::test]
async fn a_request_that_fails_has_the_error_of_its_answer() {
    for stream in [false, true] {
        let collector = Collector::start().await;
        let (service, _workers, mut sessions) = serve(&[Role::Mixed], |tuning| {
            tuning.machine.max_failures = 0;
        })
        .await;
        let app = app(service, &collector, None);
        let serving = async {
            let id = sessions[0].submit().await.request_id;
            sessions[0].output(&id, 0, &[97, 98], F::FinishNone);
            fail(&sessions[0], &id);
        };
        let body = json!({"prompt": "a prompt", "max_tokens": 9, "stream": stream});
        let (status, ()) = tokio::join!(send(&app, None, body), serving);
        flush(&app).await;
        let server = check_family(&collector);
        let code = number(&server, "http.response.status_code");
        assert_eq!(code, i64::from(status.as_u16()));
        let kind = text(&server, "error.type");
        match stream {
            // The status was sent with the first token.
            true => assert_eq!((code, kind.as_str()), (200, "failed")),
            false => assert_eq!((code, kind.as_str()), (500, "500")),
        }
        assert_eq!(text(&server, "tasuki.outcome"), "failed");
        assert!(error(&server).is_some_and(|reason| !reason.is_empty()));
        let leg = collector.span("tasuki.colocated");
        assert_eq!(error(&leg).as_deref(), Some("the step raised an error"));
        assert_eq!(text(&leg, "tasuki.leg.end"), "failed");
        assert_eq!(text(&leg, "tasuki.failure.kind"), "device");
    }
}

#[tokio::test]
async fn refusals_are_spans_and_only_the_servers_own_are_errors() {
    let collector = Collector::start().await;
    let (service, _workers, _sessions) = serve(&[Role::Mixed], |_| {}).await;
    let app = app(service, &collector, None);
    for (body, status) in [
        (json!({"prompt": 1.5}), 400),
        (json!({"prompt": "x", "model": "another"}), 404),
    ] {
        assert_eq!(send(&app, None, body).await, status);
    }
    app.gate.close();
    assert_eq!(send(&app, None, prompt()).await, 503);
    flush(&app).await;
    let spans = collector.spans_of(SERVER);
    let statuses = spans.iter();
    let statuses = statuses.map(|span| number(span, "http.response.status_code"));
    assert_eq!(statuses.collect::<Vec<_>>(), [400, 404, 503]);
    let errors: Vec<bool> = spans.iter().map(|span| error(span).is_some()).collect();
    assert_eq!(errors, [false, false, true]);
    for span in &spans {
        assert_eq!(text(span, "tasuki.outcome"), "refused");
    }
    assert_eq!(text(&spans[2], "error.type"), "503");
}

#[tokio::test]
async fn a_client_that_hangs_up_has_ended_its_trace() {
    let collector = Collector::start().await;
    let (service, _workers, mut sessions) = serve(&[Role::Mixed], |_| {}).await;
    let app = app(service, &collector, None);
    tokio::select! {
        _ = send(&app, None, prompt()) => panic!("there is no answer"),
        _ = sessions[0].submit() => {}
    }
    sessions[0].abort().await;
    until("the end of the request", || {
        app.generator
            .metrics_text()
            .contains("tasuki_requests_in_flight 0\n")
    })
    .await;
    flush(&app).await;
    let server = collector.span(SERVER);
    assert_eq!(text(&server, "tasuki.outcome"), "disconnected");
    assert!(value(&server.attributes, "http.response.status_code").is_none());
    let leg = collector.span("tasuki.colocated");
    assert_eq!(text(&leg, "tasuki.leg.end"), "aborted");
    assert_eq!(leg.parent_span_id, server.span_id);
}
