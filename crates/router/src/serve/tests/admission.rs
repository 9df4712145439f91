//! Requests that wait to be placed.

use super::*;

/// Prompts of this length are a second's work, as far as is known before anything is measured.
const LONG: u32 = 900;

fn long(tenant: &str) -> Generation {
    Generation {
        prompt: (0..LONG).collect(),
        tenant: tenant.into(),
        request_id: format!("{tenant}-{:x}", rand::random::<u64>()),
        ..generation(3)
    }
}

async fn one_worker(tune: impl FnOnce(&mut Tuning)) -> (Service, Vec<FakeWorker>, Vec<Session>) {
    serve(&[Role::Mixed], tune).await
}

fn waiting(service: &Service) -> usize {
    service.registry().waiting().0
}

/// Computed, said by the worker itself.
fn finish(session: &Session, request_id: &str) {
    session.output(request_id, 0, &[7], F::FinishStop);
    session.ended(request_id, R::LegEndFinished, LegTimings::default());
}

#[tokio::test]
async fn a_waiting_request_is_placed_when_the_worker_has_less_to_do() {
    let (service, _workers, mut sessions) = one_worker(|_| ()).await;
    let now = Instant::now();
    let [first, second, third] = ["a", "a", "b"].map(|t| service.generate(long(t), now));
    let running = sessions[0].submit().await;
    until("two requests wait", || waiting(&service) == 2).await;
    let text = service.metrics_text();
    assert!(
        text.contains("\ntasuki_admission_waiting_prompt_tokens 1800\n"),
        "{text}"
    );
    finish(&sessions[0], &running.request_id);
    assert_eq!(read_all(first).await.tokens, [7]);
    // The other tenant has had nothing yet.
    let running = sessions[0].submit().await;
    assert!(
        running.request_id.starts_with('b'),
        "{}",
        running.request_id
    );
    finish(&sessions[0], &running.request_id);
    assert_eq!(read_all(third).await.tokens, [7]);
    let running = sessions[0].submit().await;
    finish(&sessions[0], &running.request_id);
    assert_eq!(read_all(second).await.tokens, [7]);
    assert_eq!(waiting(&service), 0);
}

#[tokio::test]
async fn a_request_that_would_be_too_late_is_refused_at_once_with_numbers() {
    let objective = |tuning: &mut Tuning| tuning.admission.ttft = Some(Duration::from_secs(1));
    let (service, _workers, mut sessions) = one_worker(objective).await;
    let _first = service.generate(long("a"), Instant::now());
    let _running = sessions[0].submit().await;
    let began = Instant::now();
    let ServeError::Overloaded {
        reason,
        retry_after_s,
        over_share,
    } = read_all(service.generate(long("a"), began))
        .await
        .end
        .expect_err("refused")
    else {
        panic!("another error");
    };
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "it did not wait for its time"
    );
    assert!(
        reason.starts_with("its first token is expected after "),
        "{reason}"
    );
    assert!(reason.contains("; the limit is "), "{reason}");
    assert_eq!((retry_after_s, over_share), (1, false));
    let text = service.metrics_text();
    assert!(
        text.contains("tasuki_admission_refusals_total{reason=\"too_late\"} 1"),
        "{text}"
    );
    assert!(
        text.contains("tasuki_requests_total{outcome=\"refused\"} 1"),
        "{text}"
    );
}

#[tokio::test]
async fn the_last_request_of_the_largest_tenant_makes_room_for_another() {
    let limit = |tuning: &mut Tuning| tuning.admission.max_sequences = 2;
    let (service, _workers, mut sessions) = one_worker(limit).await;
    let now = Instant::now();
    let [_running, _second, third] = ["a", "a", "a"].map(|t| service.generate(long(t), now));
    let _ = sessions[0].submit().await;
    until("two requests wait", || waiting(&service) == 2).await;
    let _other = service.generate(long("b"), now);
    let refused = read_all(third).await.end.expect_err("refused");
    let ServeError::Overloaded {
        reason, over_share, ..
    } = refused
    else {
        panic!("{refused}");
    };
    let told = "2 sequences wait, and it has 1; the limit is 2";
    assert!(reason.starts_with(told), "{reason}");
    assert!(over_share);
    assert_eq!(waiting(&service), 2);
}

#[tokio::test]
async fn a_client_that_leaves_while_it_waits_leaves_nothing() {
    let (service, _workers, mut sessions) = one_worker(|_| ()).await;
    let now = Instant::now();
    let [first, second, third] = ["a", "a", "a"].map(|t| service.generate(long(t), now));
    let running = sessions[0].submit().await;
    until("two requests wait", || waiting(&service) == 2).await;
    drop(second);
    until("one request waits", || waiting(&service) == 1).await;
    finish(&sessions[0], &running.request_id);
    read_all(first).await.end.expect("done");
    let running = sessions[0].submit().await;
    finish(&sessions[0], &running.request_id);
    read_all(third).await.end.expect("done");
}

#[tokio::test]
async fn requests_that_wait_at_shutdown_fail_with_the_reason() {
    let (service, _workers, mut sessions) = one_worker(|_| ()).await;
    let now = Instant::now();
    let [_first, second] = ["a", "a"].map(|t| service.generate(long(t), now));
    let _ = sessions[0].submit().await;
    until("a request waits", || waiting(&service) == 1).await;
    service.drain(Duration::ZERO).await;
    let error = read_all(second).await.end.expect_err("no answer");
    assert!(error.to_string().contains("shutting down"), "{error}");
}

#[tokio::test]
async fn without_admission_all_wait_in_the_worker() {
    let off = |tuning: &mut Tuning| tuning.admission.off = true;
    let (service, _workers, mut sessions) = one_worker(off).await;
    let now = Instant::now();
    let generating = ["a", "a", "a"].map(|t| service.generate(long(t), now));
    for _ in &generating {
        sessions[0].submit().await;
    }
    assert_eq!(waiting(&service), 0);
}

#[test]
fn placement_knows_the_objective() {
    let mut config = Config::default();
    assert_eq!(Tuning::from(&config).policy.cost.tpot_s, None);
    config.admission.tpot = Some(Duration::from_millis(9));
    assert_eq!(Tuning::from(&config).policy.cost.tpot_s, Some(0.009));
}
