//! The router's own end.

use super::*;

#[tokio::test]
async fn draining_lets_requests_finish_and_takes_no_new_ones() {
    let (service, _workers, mut sessions) = serve(&[Role::Mixed], |_| {}).await;
    let generating = service.generate(generation(1), Instant::now());
    let submit = sessions[0].submit().await;
    let drain = tokio::spawn({
        let service = service.clone();
        async move { service.drain(Duration::from_secs(60)).await }
    });
    until("draining", || {
        service.readiness(None) == Err(Unready::ShuttingDown)
    })
    .await;
    let refused = read_all(service.generate(generation(1), Instant::now())).await;
    assert!(matches!(refused.end, Err(ServeError::Unavailable { .. })));
    assert!(!drain.is_finished());
    sessions[0].output(&submit.request_id, 0, &[5], F::FinishLength);
    sessions[0].ended(&submit.request_id, R::LegEndFinished, LegTimings::default());
    assert!(read_all(generating).await.end.is_ok());
    soon("the drain", drain).await.expect("drained");
    assert!(sessions[0].next().await.is_none(), "the router hangs up");
}

#[tokio::test]
async fn draining_ends_what_does_not_finish() {
    let (service, _workers, mut sessions) = serve(&[Role::Mixed], |_| {}).await;
    let generating = service.generate(generation(1), Instant::now());
    let submit = sessions[0].submit().await;
    soon("the drain", service.drain(Duration::from_millis(10))).await;
    let received = read_all(generating).await;
    assert!(matches!(received.end, Err(ServeError::Unavailable { .. })));
    assert_eq!(sessions[0].abort().await.request_id, submit.request_id);
}
