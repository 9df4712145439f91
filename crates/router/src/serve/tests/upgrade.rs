//! Two sets of weights of one model side by side, as in a rolling upgrade.

use super::*;

/// A service with two colocating workers of different weights; a request that the first
/// one begins, and the worker that has it first in the list.
async fn begun() -> (Service, Vec<FakeWorker>, Vec<Session>, Generating, String) {
    let mut workers = vec![FakeWorker::start().await, FakeWorker::start().await];
    let addresses = workers.iter().map(|w| w.address.to_string());
    let list = StaticList(addresses.collect());
    let mut tuning = Tuning::from(&Config::default());
    tuning.machine.recover = Duration::from_millis(50);
    let service = Service::start_tuned(vec![Vec::new()], vec![Box::new(list)], tuning);
    let mut sessions = Vec::new();
    for (at, worker) in (0u8..).zip(&mut workers) {
        let session = worker.session().await;
        let weights = v1::WorkerInfo {
            identity: vec![at; 16],
            ..info(&format!("e{at}"), Role::Mixed)
        };
        session.send(Message::Info(weights));
        sessions.push(session);
    }
    until("both workers", || {
        let text = service.metrics_text();
        let up = text.lines().filter(|l| l.starts_with("tasuki_worker_up{"));
        up.filter(|l| l.ends_with(" 1")).count() == 2
    })
    .await;
    let generating = service.generate(generation(3), Instant::now());
    let (left, right) = sessions.split_at_mut(1);
    let (first, submit) = soon("a submit", async {
        tokio::select! {
            submit = left[0].submit() => (0, submit),
            submit = right[0].submit() => (1, submit),
        }
    })
    .await;
    assert_eq!(
        submit.leg(),
        Leg::Colocated,
        "KV does not move between them"
    );
    if first == 1 {
        workers.reverse();
        sessions.reverse();
    }
    (service, workers, sessions, generating, submit.request_id)
}

#[tokio::test]
async fn a_begun_answer_does_not_go_on_with_other_weights() {
    let (service, mut workers, mut sessions, generating, id) = begun().await;
    sessions[0].output(&id, 0, &[5], F::FinishNone);
    drop((workers.remove(0), sessions.remove(0)));
    let received = read_all(generating).await;
    assert_eq!(received.tokens, [5]);
    let Err(ServeError::Unavailable { reason, .. }) = received.end else {
        panic!("{:?}", received.end)
    };
    assert!(reason.contains("other weights"), "{reason}");
    let next = service.generate(generation(1), Instant::now());
    let fresh = sessions[0].submit().await;
    assert!(fresh.resumed_tokens.is_empty());
    sessions[0].output(&fresh.request_id, 0, &[7], F::FinishLength);
    sessions[0].ended(&fresh.request_id, R::LegEndFinished, LegTimings::default());
    assert_eq!(read_all(next).await.tokens, [7]);
}

#[tokio::test]
async fn an_answer_that_has_not_begun_is_given_by_the_others() {
    let (_service, mut workers, mut sessions, generating, _) = begun().await;
    drop((workers.remove(0), sessions.remove(0)));
    let again = sessions[0].submit().await;
    sessions[0].output(&again.request_id, 0, &[7, 8, 9], F::FinishLength);
    sessions[0].ended(&again.request_id, R::LegEndFinished, LegTimings::default());
    assert_eq!(read_all(generating).await.tokens, [7, 8, 9]);
}
