//! Workers that come and go while requests run.

use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::*;
use crate::discovery::{AddressSet, Discovery};

/// Sends the sets that a test tells it.
struct Told(mpsc::UnboundedReceiver<AddressSet>);

impl Discovery for Told {
    fn watch(self: Box<Self>) -> BoxStream<'static, AddressSet> {
        UnboundedReceiverStream::new(self.0).boxed()
    }
}

/// A service without workers, and what tells it of them.
fn empty(worker_drain: Duration) -> (Service, mpsc::UnboundedSender<AddressSet>) {
    let (tell, told) = mpsc::unbounded_channel();
    let tuning = Tuning {
        worker_drain,
        ..Tuning::from(&Config::default())
    };
    (
        Service::start_tuned(vec![Vec::new()], vec![Box::new(Told(told))], tuning),
        tell,
    )
}

/// A worker that is listed beside others, and the session that the router opens.
async fn joins(
    tell: &mpsc::UnboundedSender<AddressSet>,
    beside: &[&FakeWorker],
    engine: &str,
) -> (FakeWorker, Session) {
    let mut worker = FakeWorker::start().await;
    let all = beside.iter().copied().chain([&worker]);
    tell.send(addresses(all)).expect("a service");
    let session = worker.session().await;
    session.send(Message::Info(info(engine, Role::Mixed)));
    (worker, session)
}

fn addresses<'a>(workers: impl IntoIterator<Item = &'a FakeWorker>) -> AddressSet {
    let workers = workers.into_iter();
    workers.map(|worker| worker.address.to_string()).collect()
}

/// The numbers of the workers for which a gauge is 1.
fn workers_with(service: &Service, gauge: &str) -> Vec<String> {
    let text = service.metrics_text();
    let name = format!("tasuki_worker_{gauge}{{");
    let ones = text
        .lines()
        .filter(|l| l.starts_with(&name) && l.ends_with(" 1"));
    let number = |line: &str| Some(line.split('"').nth(1)?.to_owned());
    ones.filter_map(number).collect()
}

fn finish(session: &Session, id: &str) {
    session.output(id, 0, &[5], F::FinishLength);
    session.ended(id, R::LegEndFinished, LegTimings::default());
}

#[tokio::test]
async fn a_worker_joins_an_empty_router_and_leaves_when_its_requests_have_ended() {
    let (service, tell) = empty(Duration::from_secs(600));
    assert_eq!(service.readiness(None), no_placement(NoPlacement::NoWorker));
    let (first, mut session) = joins(&tell, &[], "a").await;
    until("the first worker", || workers_with(&service, "up") == ["0"]).await;
    let running = service.generate(generation(1), Instant::now());
    let submit = session.submit().await;

    // The second worker takes its place; what runs goes on.
    let (second, mut other) = joins(&tell, &[&first], "b").await;
    until("the second worker", || {
        workers_with(&service, "up").len() == 2
    })
    .await;
    tell.send(addresses([&second])).expect("a service");
    until("draining", || workers_with(&service, "draining") == ["0"]).await;
    let next = service.generate(generation(1), Instant::now());
    let id = other.submit().await.request_id;
    finish(&other, &id);
    assert!(read_all(next).await.end.is_ok());
    finish(&session, &submit.request_id);
    assert_eq!(read_all(running).await.end.expect("done").replacements, 0);
    assert!(session.next().await.is_none(), "the router hangs up");
    until("its series to go", || workers_with(&service, "up") == ["1"]).await;
    assert!(!service.metrics_text().contains("worker=\"0\""));

    // The same address again is another worker.
    tell.send(addresses([&first, &second])).expect("a service");
    let (mut first, _) = (first, session);
    let session = first.session().await;
    session.send(Message::Info(info("c", Role::Mixed)));
    until("the third worker", || {
        workers_with(&service, "up") == ["1", "2"]
    })
    .await;
}

#[tokio::test]
async fn requests_that_outlast_the_drain_are_placed_again() {
    let (service, tell) = empty(Duration::from_millis(50));
    let (first, mut session) = joins(&tell, &[], "a").await;
    until("the first worker", || workers_with(&service, "up") == ["0"]).await;
    let running = service.generate(generation(2), Instant::now());
    let id = session.submit().await.request_id;
    session.output(&id, 0, &[5], F::FinishNone);
    let (second, mut other) = joins(&tell, &[&first], "b").await;
    until("the second worker", || {
        workers_with(&service, "up").len() == 2
    })
    .await;
    tell.send(addresses([&second])).expect("a service");
    let again = other.submit().await;
    assert_eq!(again.resumed_tokens, [5]);
    other.output(&again.request_id, 1, &[6], F::FinishLength);
    other.ended(&again.request_id, R::LegEndFinished, LegTimings::default());
    let received = read_all(running).await;
    assert_eq!(received.tokens, [5, 6]);
    assert_eq!(received.end.expect("done").replacements, 1);
}

#[tokio::test]
async fn an_address_that_is_back_in_time_stays() {
    let (service, tell) = empty(Duration::from_secs(600));
    let (worker, mut session) = joins(&tell, &[], "a").await;
    until("the worker", || workers_with(&service, "up") == ["0"]).await;
    let running = service.generate(generation(1), Instant::now());
    let id = session.submit().await.request_id;
    tell.send(AddressSet::new()).expect("a service");
    until("draining", || workers_with(&service, "draining") == ["0"]).await;
    let drains = no_placement(NoPlacement::AllDraining);
    assert_eq!(service.readiness(None), drains);
    tell.send(addresses([&worker])).expect("a service");
    until("its return", || {
        workers_with(&service, "draining").is_empty()
    })
    .await;
    finish(&session, &id);
    assert!(read_all(running).await.end.is_ok());
    let next = service.generate(generation(1), Instant::now());
    let id = session.submit().await.request_id;
    finish(&session, &id);
    assert!(read_all(next).await.end.is_ok());
}
