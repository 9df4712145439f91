//! Requests that go as they should, or that their client ends.

use super::*;

#[tokio::test]
async fn a_split_request_from_both_workers() {
    let (service, _workers, mut sessions) = serve(&[Role::Prefill, Role::Decode], by_role).await;
    assert!(service.readiness(None).is_ok());
    let limits = service.limits(ModelId(0)).expect("limits");
    assert_eq!((limits.max_model_len, limits.vocab_size), (1_024, 512));
    let generating = service.generate(generation(9), Instant::now());
    let [prefill, decode] = &mut sessions[..] else {
        unreachable!()
    };
    let first = prefill.submit().await;
    let second = decode.submit().await;
    assert_eq!(first.leg(), Leg::Prefill);
    assert_eq!(second.leg(), Leg::Decode);
    assert_eq!(first.request_id, second.request_id);
    assert_eq!(first.peer.expect("a peer").engine_id, "e1");
    assert_eq!(second.peer.expect("a peer").kv_endpoint, "e0:1");
    let id = &first.request_id;
    let timings = LegTimings {
        queue_s: 0.5,
        prefill_s: 0.25,
        ..Default::default()
    };
    // The prefill leg's own end comes too late: the first token tells what it took.
    prefill.report(v1::StepReport {
        outputs: vec![v1::Output {
            request_id: id.clone(),
            tokens: vec![7],
            timings: Some(timings),
            ..Default::default()
        }],
        ..Default::default()
    });
    decode.output(id, 0, &[7], F::FinishNone);
    decode.output(id, 1, &[8, 9], F::FinishStop);
    let timings = LegTimings {
        transfer_s: 0.125,
        transfer_bytes: 4_096,
        ..Default::default()
    };
    decode.ended(id, R::LegEndFinished, timings);
    let received = read_all(generating).await;
    assert_eq!(received.tokens, [7, 8, 9]);
    assert_eq!(received.finish, Some(Finish::Stop));
    let timings = received.end.expect("done");
    assert!(timings.queue >= Duration::from_millis(500));
    assert_eq!(timings.prefill, Duration::from_millis(250));
    assert_eq!(timings.transfer, Duration::from_millis(125));
    assert_eq!(timings.transfer_bytes, 4_096);
    assert_eq!(
        (
            timings.prefill_worker.as_str(),
            timings.decode_worker.as_str()
        ),
        ("0", "1")
    );
    assert_eq!(timings.replacements, 0);
    assert!(!timings.first_token.is_zero() && timings.total >= timings.first_token);
    assert!(!timings.messages.is_zero());
    assert!(timings.first_token + timings.messages <= timings.total);

    until("the count", || {
        service
            .metrics_text()
            .contains("tasuki_requests_in_flight 0")
    })
    .await;
    let text = service.metrics_text();
    for line in [
        "tasuki_requests_total{outcome=\"done\"} 1",
        "tasuki_output_tokens_total 3",
        "tasuki_time_to_first_token_seconds_count 1",
        "tasuki_time_to_second_token_seconds_count 1",
        "tasuki_inter_token_latency_seconds_count 2",
        "tasuki_phase_seconds_count{phase=\"transfer\"} 1",
        "tasuki_worker_free_blocks{worker=\"0\",role=\"prefill\",model=\"tiny\"} 100",
        "tasuki_worker_waiting{worker=\"1\",role=\"decode\",model=\"tiny\"} 0",
        "tasuki_worker_prompt_tokens_computed_total{worker=\"1\",role=\"decode\",model=\"tiny\"} 0",
        "# EOF",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    let past = service.metrics().recorder.past();
    let shown = &past.requests[0];
    assert_eq!((shown.id.as_str(), shown.outcome), ("r", "done"));
    assert_eq!((shown.prompt_tokens, shown.output_tokens), (20, 3));
    let phases = shown.phases.as_ref().expect("phases");
    assert!((phases.prefill - 0.25).abs() < 1e-9, "{phases:?}");
    assert_eq!(phases.transfer_bytes, 4_096);
}

#[tokio::test]
async fn a_client_that_reads_nothing_loses_its_request_and_is_counted() {
    let (service, _workers, mut sessions) = serve(&[Role::Mixed], by_role).await;
    let generating = service.generate(generation(1_000), Instant::now());
    let id = sessions[0].submit().await.request_id;
    let logprob = v1::TokenLogprob {
        top: vec![v1::TopLogprob::default(); 1_000],
        ..Default::default()
    };
    let mut position = 0;
    let mut count = || {
        sessions[0].report(v1::StepReport {
            outputs: vec![v1::Output {
                request_id: id.clone(),
                position,
                tokens: vec![7],
                logprobs: vec![logprob.clone()],
                ..Default::default()
            }],
            ..Default::default()
        });
        position += 1;
        let metrics = service.metrics_text();
        metrics.contains("tasuki_requests_total{outcome=\"too_slow\"} 1")
    };
    until("the count", &mut count).await;
    let received = read_all(generating).await;
    let error = received.end.expect_err("too slow").to_string();
    assert!(error.contains("read too slowly"), "{error}");
}

#[tokio::test]
async fn dropping_a_generation_aborts_both_legs() {
    let (service, _workers, mut sessions) = serve(&[Role::Prefill, Role::Decode], by_role).await;
    let generating = service.generate(generation(4), Instant::now());
    let mut ids = Vec::new();
    for session in &mut sessions {
        ids.push(session.submit().await.request_id);
    }
    drop(generating);
    for (session, id) in sessions.iter_mut().zip(ids) {
        let abort = session.abort().await;
        assert_eq!((abort.request_id, abort.choices), (id, vec![]));
    }
    until("the count", || {
        service
            .metrics_text()
            .contains("tasuki_requests_total{outcome=\"cancelled\"} 1")
    })
    .await;
}

#[tokio::test]
async fn a_stopped_choice_is_aborted_and_done_follows() {
    let (service, _workers, mut sessions) = serve(&[Role::Mixed], |_| {}).await;
    let mut generating = service.generate(generation(9), Instant::now());
    let submit = sessions[0].submit().await;
    assert_eq!(submit.leg(), Leg::Colocated);
    sessions[0].output(&submit.request_id, 0, &[1], F::FinishNone);
    assert!(matches!(
        soon("tokens", generating.next()).await,
        Some(Event::Tokens { .. })
    ));
    generating.stop(0);
    assert!(sessions[0].abort().await.choices.is_empty());
    sessions[0].ended(&submit.request_id, R::LegEndAborted, LegTimings::default());
    assert!(read_all(generating).await.end.is_ok());
}

#[tokio::test]
async fn time_counts_from_the_requests_arrival() {
    let (service, _workers, mut sessions) = serve(&[Role::Mixed], |_| {}).await;
    let tokenizing = Duration::from_secs(3);
    let generating = service.generate(generation(1), Instant::now() - tokenizing);
    let id = sessions[0].submit().await.request_id;
    sessions[0].output(&id, 0, &[5], F::FinishLength);
    let timings = LegTimings {
        prefill_s: 0.25,
        ..Default::default()
    };
    sessions[0].ended(&id, R::LegEndFinished, timings);
    let timings = read_all(generating).await.end.expect("done");
    assert!(timings.queue >= tokenizing, "{timings:?}");
    assert!(timings.first_token >= tokenizing && timings.total >= tokenizing);
    let text = service.metrics_text();
    let under = "tasuki_time_to_first_token_seconds_bucket{le=\"2.5\"} 0";
    assert!(text.contains(under), "{text}");
}
