//! Workers that are lost, frozen, or not there.

use tokio::time::timeout;

use super::*;

#[tokio::test]
async fn a_lost_decode_worker_is_made_good_by_the_other() {
    let roles = [Role::Prefill, Role::Decode, Role::Decode];
    let (service, _workers, mut sessions) = serve(&roles, by_role).await;
    let generating = service.generate(generation(4), Instant::now());
    let first = sessions[0].submit().await;
    let lost: usize = match first.peer.as_ref().expect("a peer").engine_id.as_str() {
        "e1" => 1,
        _ => 2,
    };
    let id = &first.request_id;
    sessions[0].output(id, 0, &[1], F::FinishNone);
    sessions[lost].submit().await;
    sessions[lost].output(id, 0, &[1, 2], F::FinishNone);
    sessions[0].ended(id, R::LegEndHandedOff, LegTimings::default());
    // The stream ends only after what was said on it.
    drop(sessions.remove(lost));
    let [prefill, left] = &mut sessions[..] else {
        unreachable!()
    };
    let again = prefill.submit().await;
    assert_eq!(again.resumed_tokens, [1, 2]);
    assert_ne!(again.request_id, *id);
    assert_eq!(left.submit().await.leg(), Leg::Decode);
    prefill.output(&again.request_id, 2, &[3], F::FinishNone);
    prefill.ended(&again.request_id, R::LegEndHandedOff, LegTimings::default());
    left.output(&again.request_id, 2, &[3, 4], F::FinishLength);
    left.ended(&again.request_id, R::LegEndFinished, LegTimings::default());
    let received = read_all(generating).await;
    assert_eq!(received.tokens, [1, 2, 3, 4]);
    let timings = received.end.expect("done");
    assert_eq!(timings.replacements, 1);
    // The workers reported no times: all but the first token is recovery.
    assert!(!timings.recovery.is_zero(), "{timings:?}");
    assert_eq!(timings.first_token + timings.recovery, timings.total);
    let recovery = "tasuki_phase_seconds_count{phase=\"recovery\"} 1";
    assert!(service.metrics_text().contains(recovery));
    let retry = "tasuki_retries_total{reason=\"worker_lost\",kind=\"device\"} 1";
    assert!(service.metrics_text().contains(retry));
}

#[tokio::test]
async fn a_stream_that_stalls_on_a_worker_that_reports_goes_on_elsewhere() {
    let limit = Duration::from_millis(150);
    let roles = [Role::Mixed, Role::Mixed];
    let (service, _workers, mut sessions) = serve(&roles, |tuning| {
        tuning.machine.stalled = Some(limit);
    })
    .await;
    let generating = service.generate(generation(4), Instant::now());
    let [a, b] = &mut sessions[..] else {
        unreachable!()
    };
    let (first, stalled, other) = tokio::select! {
        submit = a.submit() => (submit, a, b),
        submit = b.submit() => (submit, b, a),
    };
    stalled.output(&first.request_id, 0, &[1, 2], F::FinishNone);
    // The worker is well, and says so all the while.
    let again = loop {
        stalled.report(v1::StepReport {
            load: Some(idle()),
            ..Default::default()
        });
        if let Ok(submit) = timeout(limit / 10, other.submit()).await {
            break submit;
        }
    };
    assert_eq!(again.resumed_tokens, [1, 2]);
    assert_eq!(stalled.abort().await.request_id, first.request_id);
    other.output(&again.request_id, 2, &[3, 4], F::FinishLength);
    other.ended(&again.request_id, R::LegEndFinished, LegTimings::default());
    let received = read_all(generating).await;
    assert_eq!(received.tokens, [1, 2, 3, 4]);
    let retry = "tasuki_retries_total{reason=\"failed\",kind=\"device\"} 1";
    assert!(service.metrics_text().contains(retry));
}

#[tokio::test]
async fn a_worker_that_fails_again_and_again_is_shown_and_is_tried_where_it_is_the_only_one() {
    let (service, _workers, mut sessions) = serve(&[Role::Mixed], |_| {}).await;
    let generating = service.generate(generation(1), Instant::now());
    for _ in 0..3 {
        let id = sessions[0].submit().await.request_id;
        sessions[0].report(v1::StepReport {
            ended: vec![v1::LegEnd {
                request_id: id,
                reason: R::LegEndFailed.into(),
                failure: v1::FailureKind::FailureMemory.into(),
                ..Default::default()
            }],
            ..Default::default()
        });
    }
    let id = sessions[0].submit().await.request_id;
    let state = |is: u8| {
        let labels = "worker=\"0\",role=\"mixed\",model=\"tiny\"";
        format!("tasuki_worker_failing{{{labels}}} {is}\n")
    };
    let opened = "model=\"tiny\",kind=\"memory\"} 1\n";
    let text = service.metrics_text();
    assert!(text.contains(&state(1)) && text.contains(opened), "{text}");
    assert!(service.readiness(None).is_ok());
    let fails_by = || {
        let registry = service.registry();
        let open = registry.read(|known| known.state.breakers().read().any(|(_, open, _)| open));
        open[0]
    };
    assert!(fails_by());
    sessions[0].output(&id, 0, &[5], F::FinishLength);
    sessions[0].ended(&id, R::LegEndFinished, LegTimings::default());
    assert_eq!(read_all(generating).await.tokens, [5]);
    assert!(service.metrics_text().contains(&state(0)) && !fails_by());
}

#[tokio::test]
async fn a_device_failure_is_retried_and_a_client_failure_is_not() {
    let (service, _workers, mut sessions) = serve(&[Role::Mixed], |_| {}).await;
    let failed = |session: &Session, id: &str, kind: v1::FailureKind| {
        session.report(v1::StepReport {
            ended: vec![v1::LegEnd {
                request_id: id.to_owned(),
                reason: R::LegEndFailed.into(),
                message: "as the worker says".to_owned(),
                failure: kind.into(),
                ..Default::default()
            }],
            ..Default::default()
        });
    };
    let generating = service.generate(generation(1), Instant::now());
    let id = sessions[0].submit().await.request_id;
    failed(&sessions[0], &id, v1::FailureKind::FailureDevice);
    let again = sessions[0].submit().await.request_id;
    sessions[0].output(&again, 0, &[5], F::FinishLength);
    sessions[0].ended(&again, R::LegEndFinished, LegTimings::default());
    let received = read_all(generating).await;
    assert_eq!(received.tokens, [5]);
    assert_eq!(received.end.expect("done").replacements, 1);

    let generating = service.generate(generation(1), Instant::now());
    let id = sessions[0].submit().await.request_id;
    failed(&sessions[0], &id, v1::FailureKind::FailureClient);
    let Err(ServeError::Rejected { message, .. }) = read_all(generating).await.end else {
        panic!("a client's failure is the client's to mend")
    };
    assert_eq!(message, "as the worker says");

    let text = service.metrics_text();
    for line in [
        "tasuki_retries_total{reason=\"failed\",kind=\"device\"} 1",
        "tasuki_failures_total{kind=\"client\"} 1",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    assert!(text.contains("tasuki_failures_total{kind=\"device\"} 0\n"));
}

#[tokio::test]
async fn without_workers_the_error_comes_at_once() {
    // Nothing listens on a port that was just given back.
    let address = FakeWorker::start().await.address.to_string();
    let mut config = Config::default();
    config.workers.list = vec![address];
    let service = Service::start(config);
    assert!(service.limits(ModelId(0)).is_none());
    assert_eq!(service.readiness(None), no_placement(NoPlacement::NoWorker));
    let received = read_all(service.generate(generation(4), Instant::now())).await;
    let Err(ServeError::Unavailable {
        reason,
        retry_after_s,
    }) = received.end
    else {
        panic!("{:?}", received.end)
    };
    assert_eq!(reason, "no worker is up");
    assert!(retry_after_s > 0);
}

#[tokio::test]
async fn an_accepted_request_survives_a_restart_of_the_only_worker() {
    let (service, mut workers, mut sessions) = serve(&[Role::Mixed], |_| {}).await;
    let generating = service.generate(generation(2), Instant::now());
    let id = sessions[0].submit().await.request_id;
    sessions[0].output(&id, 0, &[1], F::FinishNone);
    sessions.clear();
    let session = workers[0].session().await;
    session.send(Message::Info(info("another", Role::Mixed)));
    let mut session = session;
    let again = session.submit().await;
    assert_eq!(again.resumed_tokens, [1]);
    session.output(&again.request_id, 1, &[2], F::FinishLength);
    session.ended(&again.request_id, R::LegEndFinished, LegTimings::default());
    let received = read_all(generating).await;
    assert_eq!(received.tokens, [1, 2]);
    assert!(received.end.is_ok());
}

#[tokio::test]
async fn a_frozen_worker_gets_nothing_new_and_loses_what_it_has() {
    let short = |tuning: &mut Tuning| {
        tuning.liveness = Liveness {
            suspect_after: Duration::from_secs(1),
            lost_after: Duration::from_secs(3),
            ..Liveness::default()
        };
    };
    let (service, _workers, mut sessions) = serve(&[Role::Mixed, Role::Mixed], short).await;
    let heartbeat = |session: &Session| {
        session.report(v1::StepReport {
            load: Some(idle()),
            ..Default::default()
        });
    };
    let generating = service.generate(generation(1), Instant::now());
    let frozen = soon("a submit", async {
        let (left, right) = sessions.split_at_mut(1);
        tokio::select! {
            _ = left[0].next() => 0,
            _ = right[0].next() => 1,
        }
    })
    .await;
    let mut other = sessions.remove(1 - frozen);
    let answered = soon("the other one's submit", async {
        loop {
            tokio::select! {
                message = other.next() => break message,
                () = tokio::time::sleep(Duration::from_millis(20)) => heartbeat(&other),
            }
        }
    })
    .await;
    let Some(ToWorker::Submit(submit)) = answered else {
        panic!("{answered:?}")
    };
    assert!(submit.request_id.ends_with(".1"));
    other.output(&submit.request_id, 0, &[5], F::FinishLength);
    other.ended(&submit.request_id, R::LegEndFinished, LegTimings::default());
    assert_eq!(read_all(generating).await.tokens, [5]);
}

#[tokio::test]
async fn a_panic_of_the_requests_task_aborts_its_legs() {
    let roles = [Role::Prefill, Role::Decode];
    let (service, mut workers, mut sessions) = serve(&roles, |tuning| {
        tuning.policy.strict_roles = true;
        // No time is so far away: adding it overflows when the decode worker is lost.
        tuning.machine.recover = Duration::MAX;
    })
    .await;
    let generating = service.generate(generation(4), Instant::now());
    let prefill = sessions[0].submit().await;
    sessions[1].submit().await;
    workers.truncate(1);
    sessions.truncate(1);
    assert_eq!(sessions[0].abort().await.request_id, prefill.request_id);
    let mut generating = generating;
    while let Some(event) = soon("the end", generating.next()).await {
        assert!(!matches!(event, Event::Done(_)), "{event:?}");
    }
    soon("the drain", service.drain(Duration::from_secs(60))).await;
}
