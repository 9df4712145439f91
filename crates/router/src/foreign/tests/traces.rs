//! Workers of other engines are told of the trace: their spans become children of their leg's.

use std::collections::HashSet;
use std::sync::Arc;

use super::fake::{Fabric, FakeWorker};
use super::vllm::{CHAT, fleet};
use super::{Router, read, sglang_worker, vllm_worker};
use crate::app::{App, HttpSettings};
use crate::metrics::Counters;
use crate::models::Models;
use crate::serve::Tuning;
use crate::testing::settings;
use crate::traces::tests::collector::{Collector, error, text};
use crate::traces::tests::traces;
use crate::workers::Liveness;
use crate::workers::testing::until;

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

type Start = fn(&str, &'static str, &Arc<Fabric>) -> FakeWorker;

/// Every request that a worker gets names the span of its leg.
async fn check_split(start: Start, url: fn(&FakeWorker) -> String) {
    let fabric = Arc::new(Fabric::default());
    let workers = ["prefill", "decode"].map(|role| start(role, role, &fabric));
    let urls = workers.each_ref().map(url);
    let calm = |tuning: &mut Tuning, _: &mut HttpSettings| {
        tuning.liveness = Liveness::default();
        tuning.policy.strict_roles = true;
    };
    let router = Router::tuned(&urls, Models::new(Vec::new()), calm).await;
    let collector = Collector::start().await;
    let router = traced(router, &collector, None);
    let parent = format!("00-{TRACE}-{PARENT}-01");
    let headers = [("traceparent", parent.as_str()), ("tracestate", "a=1")];
    let got = read(router.send_with(CHAT, BODY, &headers).await).await;
    assert_eq!(got.status, 200, "{}", got.body);
    flush(&router).await;
    let server = collector.span("POST /v1/chat/completions");
    assert_eq!(hex(&server.parent_span_id), PARENT);
    assert_eq!(text(&server, "gen_ai.operation.name"), "chat");
    for (worker, name) in workers.iter().zip(["tasuki.prefill", "tasuki.decode"]) {
        let legs = collector.spans_of(name);
        assert!(legs.iter().all(|leg| leg.parent_span_id == server.span_id));
        let sent = legs
            .iter()
            .map(|leg| format!("00-{TRACE}-{}-01", hex(&leg.span_id)));
        let sent: HashSet<String> = sent.collect();
        let seen = worker.worker.seen.lock().unwrap();
        assert!(!seen.is_empty());
        for request in seen.iter() {
            let told = request.headers["traceparent"].to_str().unwrap();
            assert!(sent.contains(told), "{told}: {sent:?}");
            assert_eq!(request.headers["tracestate"], "a=1");
        }
    }
    fabric.check();
}

#[tokio::test]
async fn both_vllm_workers_get_their_legs_span() {
    check_split(vllm_worker::start, vllm_worker::url).await;
}

#[tokio::test]
async fn both_sglang_workers_get_their_legs_span() {
    check_split(sglang_worker::start, sglang_worker::url).await;
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
