//! `docs/metrics.md` against what `/metrics` says.

use std::fmt::Write as _;
use std::path::Path;

use tasuki_core::FailureKind;
use tasuki_reqlog::Outcome;

use super::*;

const HEAD: &str = "\
# Metrics

`GET /metrics` of the router, in OpenMetrics. This page is made of it by `make proto`; a test compares them.
`examples/monitoring` has a Grafana dashboard and alert rules for Prometheus.

`tasuki_worker_*` have the labels `worker` (the number in the order in which addresses appeared), `role` and
`model`, and are what the workers report. Histograms have `_bucket`, `_sum` and `_count`. Seconds,
bytes and tokens are in the names.

| metric | kind | meaning |
|---|---|---|
";

#[tokio::test]
async fn the_page_is_made_of_the_metrics() {
    let (service, _workers, _sessions) = serve(&[Role::Mixed], |_| {}).await;
    // What has not happened is not in the text.
    let metrics = service.metrics();
    metrics.retried("returned", FailureKind::Memory);
    metrics.refused("too_late");
    metrics.http_error("/v1/models", 404);
    metrics.failed(FailureKind::Client);
    for dropped in [&metrics.trace_spans_dropped, &metrics.request_log_dropped] {
        dropped.get_or_create(&[("reason", "queue_full")]).inc();
    }
    metrics.ended(Outcome::Done);
    metrics.finished(&Timings::default());
    let made = page(&service.metrics_text());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
    if std::env::var_os("TASUKI_WRITE_GENERATED").is_some() {
        std::fs::write(&path, &made).expect("docs/metrics.md is written");
    }
    let found = std::fs::read_to_string(&path).expect("docs/metrics.md");
    assert!(
        found == made,
        "docs/metrics.md differs from the metrics: run `make proto`"
    );
}

fn page(metrics: &str) -> String {
    let mut page = HEAD.to_owned();
    let mut help = "";
    for line in metrics.lines() {
        if let Some(described) = line.strip_prefix("# HELP ") {
            help = described.split_once(' ').map_or("", |(_, help)| help);
        } else if let Some(typed) = line.strip_prefix("# TYPE ") {
            let (name, kind) = typed.split_once(' ').expect("a name and a kind");
            let suffix = if kind == "counter" { "_total" } else { "" };
            let help = help.trim_end_matches('.');
            writeln!(page, "| `{name}{suffix}` | {kind} | {help} |").expect("a string grows");
        }
    }
    page
}
