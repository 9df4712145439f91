//! When requests are sent, and what waiting looks like.

mod support;

use std::sync::{Arc, Mutex};

use support::*;
use tasuki_bench::arrivals::Process;
use tasuki_bench::client::Failure;
use tasuki_bench::fake::{Asked, Reply};
use tokio::sync::watch;
use tokio::time::sleep;

const TEN_A_SECOND: Process = Process::Constant { rate: 10.0 };

/// Two tokens: 100 ms and 150 ms.
fn two(asked: &Asked) -> Reply {
    steady(asked, 100, 50)
}

fn times(of: impl Iterator<Item = f64>) -> Vec<i64> {
    of.map(|seconds| (seconds * 1e3).round() as i64).collect()
}

#[tokio::test(start_paused = true)]
async fn an_open_loop_does_not_wait_for_a_server_slower_than_the_rate() {
    // The server has one place: request n is answered after (n + 1) x 300 ms.
    let place = Arc::new(tokio::sync::Mutex::new(0_u64));
    let place = Arc::clone(&place);
    let script = move |asked: &Asked| {
        let _ = &place;
        steady(
            asked,
            (asked.number as u64 + 1) * 300 - asked.number as u64 * 100,
            0,
        )
    };
    let run = run(Setting::new(TEN_A_SECOND), requests(10, 1), script).await;
    let sent = times(run.records.iter().map(|record| record.sent_s));
    assert_eq!(sent, [0, 100, 200, 300, 400, 500, 600, 700, 800, 900]);
    let metrics = run.summary().metrics;
    // The queue is the server's, and it grows: 300 ms to 2.1 s.
    close(metrics.ttft_ms.unwrap().max, 2100.0);
    close(metrics.client_queue_ms.unwrap().max, 0.0);
    close(metrics.pacing_error_ms.unwrap().max, 0.0);
    assert_eq!(metrics.peak_concurrency, 7);
}

#[tokio::test(start_paused = true)]
async fn a_limit_makes_requests_wait_and_the_wait_shows() {
    let setting = Setting::new(TEN_A_SECOND).at_most(1);
    let run = run(setting, requests(4, 2), two).await;
    // Due every 100 ms, sent every 150 ms.
    assert_eq!(
        times(run.records.iter().map(|r| r.due_s)),
        [0, 100, 200, 300]
    );
    assert_eq!(
        times(run.records.iter().map(|r| r.sent_s)),
        [0, 150, 300, 450]
    );
    let metrics = run.summary().metrics;
    close(metrics.client_queue_ms.unwrap().mean, 75.0);
    close(metrics.ttft_ms.unwrap().mean, 175.0);
    close(metrics.ttft_from_sent_ms.unwrap().mean, 100.0);
    close(metrics.e2e_ms.unwrap().max, 300.0);
    assert_eq!(
        metrics.pacing_error_ms, None,
        "the limit decides, not the pacing"
    );
    assert_eq!(metrics.peak_concurrency, 1);
}

#[tokio::test(start_paused = true)]
async fn all_at_once_under_a_limit_is_due_at_once() {
    let setting = Setting::new(Process::AllAtOnce).at_most(2);
    let run = run(setting, requests(4, 2), two).await;
    assert_eq!(times(run.records.iter().map(|r| r.due_s)), [0, 0, 0, 0]);
    assert_eq!(
        times(run.records.iter().map(|r| r.sent_s)),
        [0, 0, 150, 150]
    );
    close(run.summary().metrics.ttft_ms.unwrap().max, 250.0);
}

#[tokio::test(start_paused = true)]
async fn users_of_a_closed_loop_join_and_are_due_when_they_are_free() {
    let mut setting = Setting::new(Process::Closed).at_most(2);
    setting.arrival.ramp_s = 0.1;
    let run = run(setting, requests(5, 2), two).await;
    assert_eq!(
        times(run.records.iter().map(|r| r.due_s)),
        [0, 50, 150, 200, 300]
    );
    let metrics = run.summary().metrics;
    close(metrics.client_queue_ms.unwrap().max, 0.0);
    close(metrics.ttft_ms.unwrap().max, 100.0);
    assert_eq!(
        (metrics.peak_concurrency, metrics.pacing_error_ms),
        (2, None)
    );
    assert_eq!(run.connections, 2);
}

#[tokio::test(start_paused = true)]
async fn what_follows_an_answer_is_due_after_thinking() {
    let workload = requests(2, 2).followed(ms(1000));
    let answers = Arc::clone(&workload.answers);
    let run = run(Setting::new(TEN_A_SECOND), workload, two).await;
    assert_eq!(
        times(run.records.iter().map(|r| r.due_s)),
        [0, 100, 1150, 1250]
    );
    assert_eq!(run.summary().metrics.completed, 4);
    let answers = answers.lock().unwrap();
    assert_eq!(answers[0], (0, " the the".to_owned()));
    assert_eq!(answers.len(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_user_of_a_closed_loop_stays_with_its_conversation() {
    let workload = requests(2, 2).followed(ms(1000));
    let run = run(Setting::new(Process::Closed).at_most(1), workload, two).await;
    // First conversation: 0 and 1150 ms; the second begins when that is over.
    assert_eq!(
        times(run.records.iter().map(|r| r.due_s)),
        [0, 1300, 1150, 2450]
    );
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_after_the_duration_and_what_is_in_flight_ends() {
    let mut setting = Setting::new(TEN_A_SECOND);
    setting.duration = Some(ms(350));
    let run = run(setting, requests(100, 2), two).await;
    let metrics = run.summary().metrics;
    assert_eq!((metrics.sent, metrics.completed), (4, 4));
    close(metrics.duration_s, 0.45);
    assert!(!run.interrupted);
}

#[tokio::test(start_paused = true)]
async fn a_stop_keeps_what_was_measured() {
    let (sender, stop) = watch::channel(false);
    tokio::spawn(async move {
        sleep(ms(320)).await;
        let _ = sender.send(true);
        std::future::pending::<()>().await;
    });
    let mut setting = Setting::new(TEN_A_SECOND).at_most(3);
    setting.stop = Some(stop);
    let run = run(setting, requests(100, 2), two).await;
    assert!(run.interrupted);
    let summary = run.summary();
    // Due at 0, 100, 200 and 300 ms; the last two were still in flight.
    assert_eq!((summary.metrics.sent, summary.metrics.completed), (2, 2));
    assert_eq!((summary.interrupted, summary.metrics.failed), (2, 0));
    assert!(summary.failures.is_empty());
    // What they had received by then counts: one token of the third.
    assert_eq!(summary.metrics.output_tokens, 5);
    close(summary.metrics.duration_s, 0.32);
    close(summary.metrics.request_throughput, 2.0 / 0.32);
    assert_eq!(run.records[3].failure, Some(Failure::Interrupted));
}

#[tokio::test(start_paused = true)]
async fn a_stop_forgets_what_was_never_sent() {
    let (sender, stop) = watch::channel(false);
    let script_calls = Arc::new(Mutex::new(0));
    let calls = Arc::clone(&script_calls);
    let script = move |asked: &Asked| {
        *calls.lock().unwrap() += 1;
        two(asked)
    };
    tokio::spawn(async move {
        sleep(ms(120)).await;
        let _ = sender.send(true);
        std::future::pending::<()>().await;
    });
    let mut setting = Setting::new(Process::AllAtOnce).at_most(2);
    setting.stop = Some(stop);
    let run = run(setting, requests(10, 2), script).await;
    assert_eq!((run.records.len(), *script_calls.lock().unwrap()), (2, 2));
    assert_eq!(run.summary().metrics.output_tokens, 2);
}
