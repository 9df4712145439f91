//! Traces of requests that were retried, failed, refused or given up.

use super::*;

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
