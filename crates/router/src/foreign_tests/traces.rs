//! Workers of other engines are told of the trace: their spans become children of their leg's.

use std::collections::HashSet;

use super::fake::{Fabric, FakeWorker};
use super::vllm::{CHAT, fleet};
use super::{Router, read, sglang};
use crate::app::App;
use crate::metrics::Counters;
use crate::models::Models;
use crate::testing::settings;
use crate::traces::tests::collector::{Collector, error, text};
use crate::traces::tests::traces;
use crate::workers::testing::until;
use std::sync::Arc;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";
const BODY: &str = r#"{"model":"theirs","messages":[],"stream":true}"#;

/// The same workers behind a router that traces.
fn traced(router: Router, collector: &Collector, ratio: Option<f64>) -> Router {
    let Router { service, .. } = router;
    let app = App {
        traces: Some(traces(collector, ratio, &Counters::default())),
        ..App::new(
            Arc::new(service.clone()),
            Models::new(Vec::new()),
            settings(),
        )
    };
    let app = Arc::new(app);
    Router { service, app }
}

async fn flush(router: &Router) {
    until("the requests' ends", || {
        router.metric("tasuki_requests_in_flight") == 0.0
    })
    .await;
    let traces = router.app.traces.as_ref().expect("they are on");
    traces.end().await;
}

/// What a worker's last request had in a header.
fn header(worker: &FakeWorker, name: &str) -> Option<String> {
    let seen = worker.worker.seen.lock().unwrap();
    let value = seen.last().expect("a request").headers.get(name)?;
    Some(value.to_str().unwrap().to_owned())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn check_split(router: Router, workers: &[FakeWorker], fabric: &Fabric) {
    let collector = Collector::start().await;
    let router = traced(router, &collector, None);
    let parent = format!("00-{TRACE}-{PARENT}-01");
    let headers = [("traceparent", parent.as_str()), ("tracestate", "a=1")];
    let got = read(router.send_with(CHAT, BODY, &headers).await).await;
    assert_eq!(got.status, 200, "{}", got.body);
    flush(&router).await;
    let server = collector.span("POST /v1/chat/completions");
    assert_eq!(hex(&server.parent_span_id), PARENT);
    for (worker, name) in workers.iter().zip(["tasuki.prefill", "tasuki.decode"]) {
        let leg = collector.span(name);
        assert_eq!(leg.parent_span_id, server.span_id);
        assert_eq!(error(&leg), None);
        let expected = format!("00-{TRACE}-{}-01", hex(&leg.span_id));
        assert_eq!(header(worker, "traceparent"), Some(expected), "{name}");
        assert_eq!(header(worker, "tracestate").as_deref(), Some("a=1"));
    }
    assert_eq!(text(&server, "gen_ai.operation.name"), "chat");
    fabric.check();
}

#[tokio::test]
async fn both_vllm_workers_get_their_legs_span() {
    let (router, workers, fabric) = fleet(&["prefill", "decode"]).await;
    check_split(router, &workers, &fabric).await;
}

#[tokio::test]
async fn both_sglang_workers_get_their_legs_span() {
    let (router, workers, fabric) = sglang::fleet(&["prefill", "decode"]).await;
    check_split(router, &workers, &fabric).await;
}

#[tokio::test]
async fn workers_are_told_of_requests_that_are_not_sampled() {
    let collector = Collector::start().await;
    let (router, workers, _fabric) = fleet(&[""]).await;
    let router = traced(router, &collector, Some(0.0));
    let worker = &workers[0];
    let unsampled = format!("00-{TRACE}-{PARENT}-00");
    read(
        router
            .send_with(CHAT, BODY, &[("traceparent", &unsampled)])
            .await,
    )
    .await;
    let told = header(worker, "traceparent").expect("the decision");
    assert!(
        told.starts_with(&format!("00-{TRACE}-")) && told.ends_with("-00"),
        "{told}"
    );
    let malformed = [("traceparent", "00-1-2-01"), ("tracestate", "a=1")];
    read(router.send_with(CHAT, BODY, &malformed).await).await;
    let told = header(worker, "traceparent").expect("a trace of its own");
    assert!(told.len() == 55 && told.ends_with("-00"), "{told}");
    assert_eq!(
        header(worker, "tracestate"),
        None,
        "of no trace that is known"
    );
    flush(&router).await;
    assert_eq!(collector.posts(), 0);
}

#[tokio::test]
async fn a_request_that_goes_on_elsewhere_stays_one_trace() {
    let collector = Collector::start().await;
    let (router, mut workers, _fabric) = fleet(&["", ""]).await;
    workers
        .iter()
        .for_each(|worker| worker.set(|m| m.pause_after = Some(2)));
    let router = traced(router, &collector, None);
    let body = r#"{"model":"theirs","messages":[],"stream":true,"temperature":0.0}"#;
    let response = router.send(CHAT, body).await;
    let (_, rest) = super::read_until(response, " t1").await;
    let busy = super::busy(&workers).await;
    workers[1 - busy].set(|manner| manner.pause_after = None);
    workers[busy].kill();
    futures::StreamExt::collect::<Vec<_>>(rest).await;
    flush(&router).await;
    let traces: HashSet<_> = collector.spans().into_iter().map(|s| s.trace_id).collect();
    assert_eq!(traces.len(), 1);
    let legs = collector.spans_of("tasuki.colocated");
    assert!(legs.len() >= 2, "{:?}", collector.names());
    assert!(error(&legs[0]).is_some() && error(legs.last().unwrap()).is_none());
    let server = collector.span("POST /v1/chat/completions");
    assert_eq!(text(&server, "tasuki.outcome"), "finished");
}
