//! Every metric against a server whose every time is known.

mod support;

use support::*;
use tasuki_bench::arrivals::Process;
use tasuki_bench::client::UsageStats;
use tasuki_bench::fake::{Asked, Reply, Wording};
use tasuki_bench::plan::Api;
use tasuki_bench::recorder::{Arrived, Record, TokenCountSource};
use tasuki_bench::stats::Spread;
use tasuki_bench::summary::{Measuring, summarize};
use tokio::time::Instant;

const ONE_A_SECOND: Process = Process::Constant { rate: 1.0 };

fn mean(spread: Option<Spread>) -> f64 {
    spread.unwrap().mean
}

/// 5 tokens: 40 ms, then every 10 ms.
fn five(asked: &Asked) -> Reply {
    steady(asked, 40, 10)
}

#[tokio::test(start_paused = true)]
async fn one_token_a_chunk() {
    let run = run(Setting::new(ONE_A_SECOND), requests(3, 5), five).await;
    let summary = run.summary();
    let metrics = &summary.metrics;
    assert_eq!(summary.token_count_source, TokenCountSource::Chunks);
    assert_eq!((metrics.sent, metrics.completed, metrics.failed), (3, 3, 0));
    assert_eq!((metrics.input_tokens, metrics.output_tokens), (30, 15));
    // Due at 0, 1 and 2 s, each over 80 ms later.
    close(metrics.duration_s, 2.08);
    close(metrics.request_throughput, 3.0 / 2.08);
    close(metrics.input_throughput, 30.0 / 2.08);
    close(metrics.output_throughput, 15.0 / 2.08);
    close(metrics.total_throughput, 45.0 / 2.08);
    close(metrics.concurrency, 0.24 / 2.08);
    assert_eq!(
        (metrics.peak_concurrency, metrics.peak_output_throughput),
        (1, 7.211538461538462)
    );
    for (spread, wanted_ms) in [
        (metrics.ttft_ms, 40.0),
        (metrics.ttft_from_sent_ms, 40.0),
        (metrics.ttst_ms, 50.0),
        (metrics.tpot_ms, 10.0),
        (metrics.itl_ms, 10.0),
        (metrics.itl_even_ms, 10.0),
        (metrics.e2e_ms, 80.0),
        (metrics.client_queue_ms, 0.0),
        (metrics.pacing_error_ms, 0.0),
    ] {
        let spread = spread.unwrap();
        for seen in [
            spread.mean,
            spread.median,
            spread.min,
            spread.max,
            spread.p99,
        ] {
            close(seen, wanted_ms);
        }
        close(spread.std, 0.0);
    }
    assert_eq!(run.connections, 1, "kept alive");
}

#[tokio::test(start_paused = true)]
async fn several_tokens_a_chunk_are_one_gap_and_gaps_of_zero() {
    let script = |asked: &Asked| stream(asked, &[(30, 2), (20, 1), (60, 3)]);
    let run = run(Setting::new(ONE_A_SECOND), requests(1, 6), script).await;
    let summary = run.summary();
    let metrics = &summary.metrics;
    assert_eq!(metrics.output_tokens, 6);
    close(mean(metrics.ttft_ms), 30.0);
    close(mean(metrics.ttst_ms), 30.0); // it came with the first
    close(mean(metrics.tpot_ms), 80.0 / 5.0);
    // Gaps: 0 | 20 | 60, 0, 0. Split evenly: 0 | 20 | 20, 20, 20.
    let (itl, even) = (metrics.itl_ms.unwrap(), metrics.itl_even_ms.unwrap());
    close(itl.mean, 16.0);
    close(itl.median, 0.0);
    close(itl.max, 60.0);
    close(even.mean, 16.0);
    close(even.median, 20.0);
    close(even.max, 20.0);
}

#[tokio::test(start_paused = true)]
async fn empty_chunks_and_usage_alone_are_no_tokens() {
    let script = |asked: &Asked| {
        let mut wording = Wording::new(asked);
        let mut steps = vec![wording.chunk("", 0)]; // as chats begin: a role
        steps.extend([wait(30), wording.chunk(" a", 1)]);
        steps.extend([wait(5), wording.chunk("", 0)]);
        steps.extend([wait(5), wording.chunk(" b", 1)]);
        steps.extend([wait(7), wording.finish()]);
        steps.push(wait(9));
        steps.extend(wording.usage());
        steps.push(Wording::done());
        Reply::stream(steps)
    };
    for usage in [UsageStats::Chunks, UsageStats::Final] {
        let mut setting = Setting::new(ONE_A_SECOND);
        setting.usage = usage;
        setting.api = Api::Chat;
        let run = run(setting, requests(1, 2), script).await;
        let metrics = run.summary().metrics;
        assert_eq!((metrics.completed, metrics.output_tokens), (1, 2));
        close(mean(metrics.ttft_ms), 30.0);
        close(mean(metrics.ttst_ms), 40.0);
        close(mean(metrics.tpot_ms), 10.0);
        close(mean(metrics.e2e_ms), 40.0);
        assert_eq!(run.records[0].arrived.len(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn a_token_without_text_counts_when_it_is_told_of() {
    // Half a character, then the whole of it.
    let script = |asked: &Asked| {
        let mut wording = Wording::new(asked);
        let mut steps = vec![wait(30), wording.chunk("", 1), wait(10)];
        steps.extend([wording.chunk("é", 1), wording.finish(), Wording::done()]);
        Reply::stream(steps)
    };
    let run = run(Setting::new(ONE_A_SECOND), requests(1, 2), script).await;
    let metrics = run.summary().metrics;
    close(mean(metrics.ttft_ms), 30.0);
    close(mean(metrics.ttst_ms), 40.0);
}

#[tokio::test(start_paused = true)]
async fn a_total_alone_is_shared_and_nobodys_count_is_said() {
    let script = |asked: &Asked| stream(asked, &[(30, 2), (20, 1), (60, 3)]);
    let mut setting = Setting::new(ONE_A_SECOND);
    setting.usage = UsageStats::Final;
    let summary = run(setting, requests(1, 6), script).await.summary();
    assert_eq!(summary.token_count_source, TokenCountSource::Usage);
    assert_eq!(summary.metrics.output_tokens, 6);
    close(mean(summary.metrics.ttft_ms), 30.0);
    close(mean(summary.metrics.tpot_ms), 16.0);

    let mut setting = Setting::new(ONE_A_SECOND);
    setting.usage = UsageStats::None;
    let summary = run(setting, requests(1, 6), script).await.summary();
    assert_eq!(summary.token_count_source, TokenCountSource::Unknown);
    close(mean(summary.metrics.ttft_ms), 30.0);
    close(mean(summary.metrics.e2e_ms), 110.0);
    let metrics = &summary.metrics;
    assert_eq!((metrics.completed, metrics.output_tokens), (1, 0));
    assert_eq!(
        (metrics.ttst_ms, metrics.tpot_ms, metrics.itl_ms),
        (None, None, None)
    );
}

#[tokio::test(start_paused = true)]
async fn without_counts_objectives_of_tokens_are_not_called_met() {
    let script = |asked: &Asked| stream(asked, &[(30, 2), (20, 1), (60, 3)]);
    let mut setting = Setting::new(ONE_A_SECOND);
    setting.usage = UsageStats::None;
    let run = run(setting, requests(1, 6), script).await;
    let judged = |objectives: &str| {
        let slo = objectives.parse().unwrap();
        let measuring = Measuring {
            slo: Some(&slo),
            ..Measuring::default()
        };
        let summary = summarize(&run.records, measuring);
        (summary.met[0], summary.metrics.attainment)
    };
    for unknown in ["tpot=1us", "ttst=1us", "itl=1us", "ttft=1s,tpot=1s"] {
        assert_eq!(judged(unknown), (None, None), "{unknown}");
    }
    assert_eq!(judged("ttft=1us,tpot=1s"), (Some(false), Some(0.0)));
    assert_eq!(judged("ttft=1s,e2e=1s"), (Some(true), Some(1.0)));
}

#[tokio::test(start_paused = true)]
async fn a_stall_is_seen_where_it_is() {
    let script = |asked: &Asked| stream(asked, &[(40, 1), (10, 1), (500, 1), (10, 1)]);
    let run = run(Setting::new(ONE_A_SECOND), requests(1, 4), script).await;
    let metrics = run.summary().metrics;
    let itl = metrics.itl_ms.unwrap();
    close(itl.max, 500.0);
    close(itl.median, 10.0);
    close(mean(metrics.tpot_ms), 520.0 / 3.0);
    close(mean(metrics.ttst_ms), 50.0);
}

#[tokio::test(start_paused = true)]
async fn the_best_second_is_a_bucket_of_one_second() {
    // 3 tokens in the first second, 5 in the third.
    let chunks = [(100, 1), (100, 1), (100, 1), (1800, 1), (100, 4)];
    let script = move |asked: &Asked| stream(asked, &chunks);
    let run = run(Setting::new(ONE_A_SECOND), requests(1, 8), script).await;
    let metrics = run.summary().metrics;
    close(metrics.duration_s, 2.2);
    close(metrics.peak_output_throughput, 5.0);
}

#[tokio::test(start_paused = true)]
async fn goodput_wants_every_objective_and_counts_failures_against_it() {
    let script = |asked: &Asked| match asked.number {
        0 => steady(asked, 40, 10),
        1 => steady(asked, 400, 10), // late first token
        2 => steady(asked, 40, 60),  // slow
        _ => Reply::json(503, &serde_json::json!({"error": {"message": "busy"}})),
    };
    let run = run(Setting::new(ONE_A_SECOND), requests(4, 5), script).await;
    let slo = "ttft=100ms,tpot=50ms".parse().unwrap();
    let metrics = run.measured(None, Some(&slo)).metrics;
    assert_eq!((metrics.sent, metrics.completed, metrics.failed), (4, 3, 1));
    close(metrics.attainment.unwrap(), 0.25);
    close(metrics.goodput.unwrap(), 1.0 / metrics.duration_s);
    // Latencies are those of answered requests.
    close(mean(metrics.ttft_ms), (40.0 + 400.0 + 40.0) / 3.0);
    assert_eq!(run.summary().metrics.goodput, None);
}

#[test]
fn a_chunk_without_a_token_does_not_split_the_gap_that_an_objective_limits() {
    let arrived = |(at_s, tokens)| Arrived { at_s, tokens };
    let record = Record {
        index: 0,
        due_s: 0.0,
        sent_s: 0.0,
        end_s: 0.4,
        input_tokens: Some(1),
        output_tokens: Some(2),
        source: TokenCountSource::Chunks,
        arrived: [(0.1, 1), (0.25, 0), (0.4, 1)].map(arrived).to_vec(),
        failure: None,
        phases: None,
    };
    let met = |slo: &str| {
        let slo = slo.parse().unwrap();
        let measuring = Measuring {
            slo: Some(&slo),
            ..Measuring::default()
        };
        summarize(std::slice::from_ref(&record), measuring).met
    };
    assert_eq!(met("itl=290ms"), [Some(false)]);
    assert_eq!(met("itl=310ms"), [Some(true)]);
}

#[test]
fn a_run_of_centuries_is_summarized() {
    // The latest time of a trace.
    let record = |index, due_s| Record {
        index,
        due_s,
        sent_s: due_s,
        end_s: due_s + 0.5,
        input_tokens: Some(1),
        output_tokens: Some(4),
        source: TokenCountSource::Chunks,
        arrived: vec![Arrived {
            at_s: due_s + 0.5,
            tokens: 4,
        }],
        failure: None,
        phases: None,
    };
    let records = [record(0, 0.0), record(1, 1e10)];
    let metrics = summarize(&records, Measuring::default()).metrics;
    assert_eq!((metrics.completed, metrics.output_tokens), (2, 8));
    close(metrics.peak_output_throughput, 4.0);
}

#[tokio::test(start_paused = true)]
async fn a_window_leaves_out_what_lies_outside() {
    let run = run(Setting::new(ONE_A_SECOND), requests(5, 5), five).await;
    // Due at 1, 2 and 3 s; the last one's tokens after 3.04 s are outside.
    let summary = run.measured(Some((1.0, 3.045)), None);
    let metrics = &summary.metrics;
    assert_eq!(summary.window.excluded_requests, 2);
    assert_eq!((metrics.sent, metrics.completed), (3, 3));
    assert_eq!(metrics.output_tokens, 11);
    close(metrics.output_throughput, 11.0 / 2.045);
    close(metrics.request_throughput, 2.0 / 2.045);
    close(metrics.concurrency, (0.08 + 0.08 + 0.045) / 2.045);
    close(mean(metrics.e2e_ms), 80.0);
    assert_eq!(summary.in_window, [false, true, true, true, false]);
}

#[tokio::test(start_paused = true)]
async fn the_servers_phases_are_gathered() {
    let script = |asked: &Asked| {
        let mut reply = steady(asked, 40, 10);
        let timings = format!(
            "data: {{\"choices\":[],\"timings\":{{\"queue_ms\":{},\"transfer_ms\":2.5}}}}\n\n",
            asked.number
        );
        let last = reply.steps.len() - 1;
        reply
            .steps
            .insert(last, tasuki_bench::fake::Step::Send(timings.into()));
        reply
    };
    let run = run(Setting::new(ONE_A_SECOND), requests(3, 2), script).await;
    let phases = run.summary().metrics.phases.unwrap().0;
    let of = |name: &str| phases.iter().find(|phase| phase.0 == name).unwrap().2;
    close(mean(of("queue_ms")), 1.0);
    close(mean(of("transfer_ms")), 2.5);
    assert_eq!(of("handshake_ms"), None);
}

#[tokio::test(start_paused = true)]
async fn the_clock_of_these_tests_stands_still() {
    let begun = Instant::now();
    let script = |asked: &Asked| stream(asked, &[(1_800_000, 1)]);
    let run = run(Setting::new(ONE_A_SECOND), requests(1, 1), script).await;
    close(mean(run.summary().metrics.ttft_ms), 1_800_000.0);
    assert_eq!((Instant::now() - begun).as_secs(), 1800);
}
