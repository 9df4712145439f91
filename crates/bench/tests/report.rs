//! The report, row by row.

mod support;

use support::*;
use tasuki_bench::arrivals::{Arrival, Process};
use tasuki_bench::fake::{Asked, Reply};
use tasuki_bench::report::{Heading, report};
use tasuki_bench::result::Requests;
use tasuki_bench::slo::Slo;
use tasuki_bench::summary::{Measuring, summarize};

const RATE: Process = Process::Constant { rate: 2.0 };

fn table(run: &Run, slo: Option<&Slo>) -> Vec<String> {
    let arrival = Arrival {
        process: RATE,
        max_concurrency: None,
        ramp_s: 0.0,
    };
    let heading = Heading {
        backend: "openai",
        arrival: &arrival,
        slo,
        cpu_s: 0.25,
        threads: 1,
    };
    let text = report(&heading, &run.measured(None, slo));
    text.lines().map(str::to_owned).collect()
}

/// 3 tokens at 40, 50 and 60 ms, but the third request fails.
fn script(asked: &Asked) -> Reply {
    match asked.number {
        2 => Reply::json(500, &serde_json::json!({"error": "no room"})),
        _ => steady(asked, 40, 10),
    }
}

#[tokio::test(start_paused = true)]
async fn the_table_is_the_familiar_one() {
    let run = run(Setting::new(RATE), requests(4, 3), script).await;
    let slo = "ttft=1s".parse().unwrap();
    let table = table(&run, Some(&slo));
    let expected = "\
============ Serving Benchmark Result ============
Backend:                                 openai
Traffic request rate:                    2 (constant)
Max request concurrency:                 not set
Successful requests:                     3
Failed requests:                         1
Benchmark duration (s):                  1.56
Total input tokens:                      30
Total generated tokens:                  9
Tokens counted by:                       server, every chunk
Request throughput (req/s):              1.92
Input token throughput (tok/s):          19.23
Output token throughput (tok/s):         5.77
Peak output token throughput (tok/s):    6.00
Total token throughput (tok/s):          25.00
Peak concurrent requests:                1
Concurrency:                             0.12
-------------------- Goodput ---------------------
TTFT at most (ms):                       1000.00
Request goodput (req/s):                 1.92
Requests that met it (%):                75.00
--------------- End-to-End Latency ---------------
Mean E2E Latency (ms):                   60.00
Median E2E Latency (ms):                 60.00
P90 E2E Latency (ms):                    60.00
P95 E2E Latency (ms):                    60.00
P99 E2E Latency (ms):                    60.00
-------------- Time to First Token ---------------
Mean TTFT (ms):                          40.00";
    assert_eq!(table[..29].join("\n"), expected);
    let at = |row: &str| table.iter().position(|line| line == row).expect(row);
    assert!(at("Max ITL (ms):                            10.00") > 29);
    assert!(at("Mean client queue (ms):                  0.00") > 29);
    let failure = at("HTTP 500:                                1");
    assert_eq!(
        table[failure + 1],
        "  first: HTTP 500: {\"error\":\"no room\"}"
    );
}

#[tokio::test(start_paused = true)]
async fn without_objectives_and_phases_their_blocks_are_left_out() {
    let run = run(Setting::new(RATE), requests(1, 3), script).await;
    let table = table(&run, None).join("\n");
    assert!(!table.contains("Goodput") && !table.contains("Phases") && !table.contains("Failures"));
}

#[tokio::test(start_paused = true)]
async fn result_arrays_are_in_the_order_of_requests() {
    let run = run(Setting::new(RATE), requests(4, 3), script).await;
    let mut shuffled = run.records.clone();
    shuffled.swap(0, 3);
    let measuring = Measuring {
        steady_s: Some((0.0, 1.2)),
        ..Measuring::default()
    };
    let requests = Requests::new(&shuffled, &summarize(&shuffled, measuring), true);
    assert_eq!(requests.index, [0, 1, 2, 3]);
    assert_eq!(requests.due_s, [0.0, 0.5, 1.0, 1.5]);
    assert_eq!(requests.first_s, [Some(0.04), Some(0.54), None, Some(1.54)]);
    assert_eq!(requests.second_s[0], Some(0.05));
    assert_eq!(requests.in_window, [true, true, true, false]);
    assert_eq!(requests.chunk_s[1], [0.54, 0.55, 0.56]);
    assert_eq!(requests.chunk_tokens[1], [1, 1, 1]);
    assert!(requests.error[2].as_ref().unwrap().starts_with("HTTP 500"));
    assert_eq!(requests.phases, None);
}
