//! Sending: in the background, within bounds, with every loss counted.

use std::time::{Duration, Instant};

use axum::http::StatusCode;

use super::collector::{Collector, Manner, value};
use super::{end_traces, traces};
use crate::access_log::tests::Lines;
use crate::config::AccessLog;
use crate::metrics::Counters;
use crate::workers::testing::until;

/// More than the end of the process waits.
const BOUND: Duration = Duration::from_secs(8);

fn dropped(counters: &Counters, reason: &'static str) -> u64 {
    counters.get_or_create(&[("reason", reason)]).get()
}

#[tokio::test]
async fn spans_are_sent_in_batches_while_requests_go_on() {
    let collector = Collector::start().await;
    let counters = Counters::default();
    let traces = traces(&collector, None, &counters);
    end_traces(&traces, 100);
    until("the spans", || collector.spans().len() == 100).await;
    assert_eq!(collector.posts(), 1, "they wait for one another");
    end_traces(&traces, 1_000);
    traces.end().await;
    assert_eq!(collector.spans().len(), 1_100);
    assert!(collector.posts() <= 4, "{}", collector.posts());
    assert_eq!(dropped(&counters, "export_failed"), 0);
    let resource = collector.resource();
    assert!(value(&resource, "service.version").is_some());
    assert!(value(&resource, "service.name").is_some());
    let spans = collector.spans();
    let ids: std::collections::HashSet<_> = spans.iter().map(|span| &span.trace_id).collect();
    assert_eq!(ids.len(), 1_100, "each is a trace of its own");
}

#[tokio::test]
async fn the_share_that_is_traced_is_chosen() {
    let collector = Collector::start().await;
    let traces = traces(&collector, Some(0.5), &Counters::default());
    end_traces(&traces, 4_000);
    traces.end().await;
    let sent = collector.spans().len();
    // 31.6 is the standard deviation.
    assert!((1_800..2_200).contains(&sent), "{sent}");
}

#[tokio::test]
async fn spans_that_a_collector_refuses_are_counted_and_logged() {
    let collector = Collector::start().await;
    let counters = Counters::default();
    let (lines, _guard) = Lines::keep("warn", AccessLog::Off);
    let traces = traces(&collector, None, &counters);
    collector.set(Manner::Refuses(StatusCode::BAD_REQUEST));
    for (more, all) in [(3, 3), (4, 7)] {
        end_traces(&traces, more);
        until("the loss", || dropped(&counters, "export_failed") == all).await;
    }
    collector.set(Manner::Takes);
    end_traces(&traces, 2);
    traces.end().await;
    assert_eq!(collector.spans().len(), 2, "those that follow");
    let text = lines.text();
    let logged: Vec<&str> = text.lines().collect();
    let [first, last] = &logged[..] else {
        panic!("one at once, one at the end: {text}");
    };
    assert!(first.contains("spans were dropped") && first.contains("spans=3"));
    assert!(
        first.contains("400") && first.contains(&collector.endpoint()),
        "{text}"
    );
    assert!(last.contains("spans=4"), "{text}");
}

#[tokio::test]
async fn a_collector_that_is_busy_is_asked_again() {
    let collector = Collector::start().await;
    let counters = Counters::default();
    let traces = traces(&collector, None, &counters);
    collector.set(Manner::Refuses(StatusCode::SERVICE_UNAVAILABLE));
    end_traces(&traces, 3);
    until("the first post", || collector.posts() > 0).await;
    collector.set(Manner::Takes);
    until("the spans", || collector.spans().len() == 3).await;
    assert_eq!(dropped(&counters, "export_failed"), 0);
}

#[tokio::test]
async fn a_dead_collector_delays_nothing() {
    let collector = Collector::start().await;
    let counters = Counters::default();
    let traces = traces(&collector, None, &counters);
    drop(collector);
    let begun = Instant::now();
    end_traces(&traces, 100);
    assert!(begun.elapsed() < Duration::from_secs(1));
    traces.end().await;
    assert!(begun.elapsed() < BOUND, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_collector_that_never_answers_costs_bounded_memory_and_time() {
    const MORE_THAN_WAIT: usize = 10_000;
    let collector = Collector::start().await;
    let counters = Counters::default();
    let traces = traces(&collector, None, &counters);
    collector.set(Manner::Hangs);
    let begun = Instant::now();
    end_traces(&traces, 1);
    until("a post that hangs", || collector.posts() == 1).await;
    end_traces(&traces, MORE_THAN_WAIT);
    let lost = dropped(&counters, "queue_full");
    assert_eq!(lost, MORE_THAN_WAIT as u64 - 8_192);
    let ending = Instant::now();
    traces.end().await;
    assert!(ending.elapsed() < BOUND, "{:?}", ending.elapsed());
    assert!(begun.elapsed() < 3 * BOUND);
}
