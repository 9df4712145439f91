//! The table that people know from SGLang's `bench_serving`, with rows of our
//! own for what it does not show.
//!
//! Source: sglang `python/sglang/bench_serving.py` (row names and widths).

use std::fmt::Write;

use crate::arrivals::{Arrival, Process};
use crate::recorder::TokenCountSource;
use crate::slo::Slo;
use crate::stats::Spread;
use crate::summary::Summary;

const WIDTH: usize = 50;

/// What the report says of the run beside its summary.
#[derive(Debug, Clone)]
pub struct Heading<'a> {
    pub backend: &'a str,
    pub arrival: &'a Arrival,
    pub slo: Option<&'a Slo>,
    /// Of the client: CPU seconds used, and the threads that it had.
    pub cpu_s: f64,
    pub threads: usize,
}

/// Above this share of its threads' time the client may be what was measured.
const BUSY: f64 = 0.8;

/// The whole table.
pub fn report(heading: &Heading<'_>, summary: &Summary) -> String {
    let mut table = Table::default();
    let metrics = &summary.metrics;
    table.title("Serving Benchmark Result", '=');
    table.row("Backend:", heading.backend);
    table.row("Traffic request rate:", &rate(heading.arrival));
    let limit = heading.arrival.max_concurrency;
    let limit = limit.map_or("not set".to_owned(), |limit| limit.to_string());
    table.row("Max request concurrency:", &limit);
    table.row("Successful requests:", &metrics.completed.to_string());
    table.row("Failed requests:", &metrics.failed.to_string());
    if summary.interrupted > 0 {
        table.row("Interrupted requests:", &summary.interrupted.to_string());
    }
    let outside = summary.window.excluded_requests - summary.interrupted;
    if outside > 0 {
        table.row("Requests outside the window:", &outside.to_string());
    }
    table.number("Benchmark duration (s):", metrics.duration_s);
    table.row("Total input tokens:", &metrics.input_tokens.to_string());
    table.row(
        "Total generated tokens:",
        &metrics.output_tokens.to_string(),
    );
    table.row("Tokens counted by:", source(summary.token_count_source));
    if summary.token_count_source == TokenCountSource::Unknown && metrics.completed > 0 {
        table.text.push_str(
            "The server counts no tokens: TTFT is that of the first chunk, and nothing\n\
             else can be told of tokens. Name the model's folder with --tokenizer.\n",
        );
    }
    table.number("Request throughput (req/s):", metrics.request_throughput);
    table.number("Input token throughput (tok/s):", metrics.input_throughput);
    table.number(
        "Output token throughput (tok/s):",
        metrics.output_throughput,
    );
    table.number(
        "Peak output token throughput (tok/s):",
        metrics.peak_output_throughput,
    );
    table.number("Total token throughput (tok/s):", metrics.total_throughput);
    table.row(
        "Peak concurrent requests:",
        &metrics.peak_concurrency.to_string(),
    );
    table.number("Concurrency:", metrics.concurrency);
    goodput(&mut table, heading.slo, summary);
    table.spread("End-to-End Latency", "E2E Latency", metrics.e2e_ms, false);
    table.spread("Time to First Token", "TTFT", metrics.ttft_ms, false);
    table.spread("Time to Second Token", "TTST", metrics.ttst_ms, false);
    table.spread(
        "Time per Output Token (excl. 1st token)",
        "TPOT",
        metrics.tpot_ms,
        false,
    );
    table.spread("Inter-Token Latency", "ITL", metrics.itl_ms, true);
    table.spread(
        "Inter-Token Latency (chunks split evenly)",
        "ITL",
        metrics.itl_even_ms,
        true,
    );
    client(&mut table, heading, summary);
    phases(&mut table, summary);
    failures(&mut table, summary);
    table.text.push_str(&"=".repeat(WIDTH));
    table.text.push('\n');
    table.text
}

fn rate(arrival: &Arrival) -> String {
    match arrival.process {
        Process::AllAtOnce => "inf".to_owned(),
        Process::Closed => "closed loop".to_owned(),
        Process::Constant { rate } => format!("{rate} (constant)"),
        Process::Poisson { rate } => format!("{rate} (Poisson)"),
        Process::Gamma { rate, burstiness } => format!("{rate} (gamma {burstiness})"),
        Process::Trace => "trace".to_owned(),
    }
}

fn source(source: TokenCountSource) -> &'static str {
    match source {
        TokenCountSource::Chunks => "server, every chunk",
        TokenCountSource::Usage => "server, total",
        TokenCountSource::Tokenizer => "local tokenizer",
        TokenCountSource::Unknown => "nobody",
    }
}

fn goodput(table: &mut Table, slo: Option<&Slo>, summary: &Summary) {
    let Some(slo) = slo else {
        return;
    };
    table.title("Goodput", '-');
    for (name, limit) in [
        ("TTFT", slo.ttft_s),
        ("TTST", slo.ttst_s),
        ("TPOT", slo.tpot_s),
        ("ITL (longest)", slo.itl_s),
        ("E2E", slo.e2e_s),
    ] {
        if let Some(limit_s) = limit {
            table.number(&format!("{name} at most (ms):"), limit_s * 1e3);
        }
    }
    let Some(goodput) = summary.metrics.goodput else {
        let unknown = "Not known which requests met it, as nobody counted tokens.\n";
        table.text.push_str(unknown);
        return;
    };
    table.number("Request goodput (req/s):", goodput);
    let attainment = summary.metrics.attainment.unwrap_or(0.0);
    table.number("Requests that met it (%):", attainment * 100.0);
}

fn client(table: &mut Table, heading: &Heading<'_>, summary: &Summary) {
    let metrics = &summary.metrics;
    table.title("Client", '-');
    for (name, spread) in [
        ("TTFT from sending", metrics.ttft_from_sent_ms),
        ("client queue", metrics.client_queue_ms),
        ("pacing error", metrics.pacing_error_ms),
    ] {
        if let Some(spread) = spread {
            table.number(&format!("Mean {name} (ms):"), spread.mean);
            table.number(&format!("P99 {name} (ms):"), spread.p99);
        }
    }
    table.number("CPU time (s):", heading.cpu_s);
    let can_do_s = metrics.duration_s * heading.threads as f64;
    if can_do_s > 1.0 && heading.cpu_s > BUSY * can_do_s {
        table.text.push_str(
            "The client was busy all the time: it may be what was measured.\n\
             Give it more --threads, or send less.\n",
        );
    }
}

fn phases(table: &mut Table, summary: &Summary) {
    let Some(phases) = &summary.metrics.phases else {
        return;
    };
    table.title("Phases, as the server tells (ms)", '-');
    table.columns(["Mean", "P99"]);
    for (_, title, spread) in &phases.0 {
        if let Some(spread) = spread {
            table.pair(&format!("{title}:"), spread.mean, spread.p99);
        }
    }
}

fn failures(table: &mut Table, summary: &Summary) {
    if summary.failures.is_empty() {
        return;
    }
    table.title("Failures", '-');
    for failure in &summary.failures {
        table.row(&format!("{}:", failure.kind), &failure.count.to_string());
        let _ = writeln!(table.text, "  first: {}", failure.first);
    }
}

#[derive(Default)]
struct Table {
    text: String,
}

impl Table {
    fn title(&mut self, title: &str, line: char) {
        let title = format!(" {title} ");
        let left = WIDTH.saturating_sub(title.chars().count()) / 2;
        let right = WIDTH.saturating_sub(title.chars().count() + left);
        let side = |length: usize| line.to_string().repeat(length);
        let _ = writeln!(self.text, "{}{title}{}", side(left), side(right));
    }

    fn row(&mut self, name: &str, value: &str) {
        let _ = writeln!(
            self.text,
            "{}",
            format!("{name:<40} {value:<10}").trim_end()
        );
    }

    fn number(&mut self, name: &str, value: f64) {
        self.row(name, &format!("{value:.2}"));
    }

    fn columns(&mut self, names: [&str; 2]) {
        let _ = writeln!(self.text, "{:<29} {:>10} {:>9}", "", names[0], names[1]);
    }

    fn pair(&mut self, name: &str, first: f64, second: f64) {
        let _ = writeln!(self.text, "{name:<29} {first:>10.2} {second:>9.2}");
    }

    fn spread(&mut self, title: &str, name: &str, spread: Option<Spread>, max: bool) {
        let Some(spread) = spread else {
            return;
        };
        self.title(title, '-');
        self.number(&format!("Mean {name} (ms):"), spread.mean);
        self.number(&format!("Median {name} (ms):"), spread.median);
        self.number(&format!("P90 {name} (ms):"), spread.p90);
        self.number(&format!("P95 {name} (ms):"), spread.p95);
        self.number(&format!("P99 {name} (ms):"), spread.p99);
        if max {
            self.number(&format!("Max {name} (ms):"), spread.max);
        }
    }
}
