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

`tasuki_worker_*` are what the workers report; the label `worker` is the number in the order in which addresses
appeared, and `peer` is the prefill worker's. Histograms have `_bucket`, `_sum` and `_count`. Seconds, bytes and
tokens are in the names.

| metric | kind | labels | meaning |
|---|---|---|---|
";

/// Labels of metrics that the test's fleet does not have: its roles are fixed.
const OF_ROLES: [(&str, &str); 4] = [
    ("tasuki_workers_wanted", "model, role, reason"),
    ("tasuki_roles_owner", "model"),
    ("tasuki_roles_taken", "model"),
    ("tasuki_role_changes", "model, from, to, reason"),
];

#[tokio::test]
async fn the_page_is_made_of_the_metrics() {
    let (service, _workers, sessions) = serve(&[Role::Prefill, Role::Decode], |_| {}).await;
    let pair = v1::KvPair {
        engine_id: "e0".to_owned(),
        transport: "shm".to_owned(),
        failures: vec![v1::KvFailure::default()],
        ..Default::default()
    };
    sessions[1].report(v1::StepReport {
        load: Some(v1::Load {
            kv_pairs: vec![pair],
            ..idle()
        }),
        ..Default::default()
    });
    until("a pair of workers", || {
        let text = service.metrics_text();
        text.contains("tasuki_kv_pair_failures_total{")
    })
    .await;
    // What has not happened is not in the text.
    let metrics = service.metrics();
    metrics.retried("returned", FailureKind::Memory);
    metrics.refused("too_late");
    metrics.http_error("/v1/models", 404, "");
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
    let mut lines = metrics.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(described) = line.strip_prefix("# HELP ") {
            help = described.split_once(' ').map_or("", |(_, help)| help);
        } else if let Some(typed) = line.strip_prefix("# TYPE ") {
            let (name, kind) = typed.split_once(' ').expect("a name and a kind");
            let suffix = if kind == "counter" { "_total" } else { "" };
            let help = help.trim_end_matches('.');
            let sample = lines.peek().filter(|next| !next.starts_with('#'));
            let labels = labels(name, sample.copied());
            writeln!(page, "| `{name}{suffix}` | {kind} | {labels} | {help} |")
                .expect("a string grows");
        }
    }
    let outcomes = Outcome::ALL.map(Outcome::as_str).join(", ");
    let kinds = FailureKind::ALL.map(FailureKind::as_str).join(", ");
    writeln!(
        page,
        "\n`outcome` is {outcomes}: [what they are](request-log.md). `kind` is {kinds}:\n\
         [what to do](troubleshooting.md#requests-that-fail)."
    )
    .expect("a string grows");
    page
}

/// The labels of a metric, as one of its samples has them.
fn labels(name: &str, sample: Option<&str>) -> String {
    let unseen = OF_ROLES.iter().find(|(of_roles, _)| *of_roles == name);
    let Some(sample) = sample else {
        let (_, labels) = unseen.unwrap_or_else(|| panic!("{name} has no sample"));
        return (*labels).to_owned();
    };
    assert!(unseen.is_none(), "{name} has a sample, so it is in no list");
    let labels = sample.split_once('{').map_or("", |(_, labels)| labels);
    let names = labels
        .split("\",")
        .filter_map(|label| label.split_once('='));
    let names = names.map(|(label, _)| label).filter(|label| *label != "le");
    names.collect::<Vec<_>>().join(", ")
}
