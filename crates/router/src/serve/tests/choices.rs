//! Requests of many choices, and workers that generate few sequences at once.

use super::*;
use crate::error::ApiError;

/// Mixed workers that tell these limits of sequences.
async fn workers_of(limits: &[u32]) -> (Service, Vec<FakeWorker>, Vec<Session>) {
    let infos = limits.iter().enumerate();
    let infos = infos.map(|(at, &max_running_sequences)| v1::WorkerInfo {
        max_running_sequences,
        ..info(&format!("e{at}"), Role::Mixed)
    });
    serve_workers(infos.collect(), |_| {}).await
}

fn of_choices(n: u32) -> Generation {
    Generation { n, ..generation(3) }
}

#[tokio::test]
async fn they_go_to_a_worker_that_generates_so_many() {
    let (service, _workers, mut sessions) = workers_of(&[64, 128]).await;
    // Among equal workers they take turns.
    for _ in 0..4 {
        let generating = service.generate(of_choices(100), Instant::now());
        let submit = sessions[1].submit().await;
        assert_eq!(submit.choices.len(), 100);
        sessions[1].ended(&submit.request_id, R::LegEndRejected, LegTimings::default());
        assert!(read_all(generating).await.end.is_err());
    }
}

#[tokio::test]
async fn more_than_any_worker_generates_are_refused_before_a_leg_is_sent() {
    let (service, _workers, mut sessions) = workers_of(&[16, 64]).await;
    let end = read_all(service.generate(of_choices(100), Instant::now())).await;
    let error = ApiError::from(end.end.expect_err("too many"));
    assert_eq!(error.status(), 400);
    let error = error.body().error;
    assert_eq!(error.param.as_deref(), Some("n"));
    assert_eq!(
        error.message,
        "n is 100, and workers that take 23 tokens generate at most 64 choices of one request: \
         lower n to 64, and send the rest as further requests"
    );
    // What comes first at the workers is the next request.
    let _next = service.generate(of_choices(64), Instant::now());
    let submit = sessions[1].submit().await;
    assert_eq!(submit.choices.len(), 64);
}

#[tokio::test]
async fn a_worker_that_tells_no_limit_takes_them() {
    let (service, _workers, mut sessions) = workers_of(&[64, 0]).await;
    let _generating = service.generate(of_choices(128), Instant::now());
    let submit = sessions[1].submit().await;
    assert_eq!(submit.choices.len(), 128);
}
