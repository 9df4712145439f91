//! What the access log says of a request over two workers.

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::access_log::tests::{Lines, send};
use crate::app::App;
use crate::config::AccessLog;
use crate::testing::{TestModel, settings};

/// Sends a request that two workers serve.
async fn split_request() {
    let (service, _workers, mut sessions) = serve(&[Role::Prefill, Role::Decode], by_role).await;
    let http = settings();
    let app = Arc::new(App::new(Arc::new(service), TestModel::new().only(), http));
    let body = json!({"prompt": "a prompt", "max_tokens": 9});
    let sent = tokio::spawn(async move { send(&app, "/v1/completions", body).await });
    let [prefill, decode] = &mut sessions[..] else {
        unreachable!()
    };
    let id = prefill.submit().await.request_id;
    decode.submit().await;
    prefill.report(v1::StepReport {
        outputs: vec![v1::Output {
            request_id: id.clone(),
            tokens: vec![97],
            timings: Some(LegTimings {
                queue_s: 0.5,
                prefill_s: 0.25,
                ..Default::default()
            }),
            ..Default::default()
        }],
        ..Default::default()
    });
    decode.output(&id, 0, &[97], F::FinishNone);
    decode.output(&id, 1, &[98, 99], F::FinishStop);
    let timings = LegTimings {
        decode_s: 0.125,
        transfer_exposed_s: 0.001,
        transfer_bytes: 4_096,
        transport: "nixl-ucx/tcp".to_owned(),
        ..Default::default()
    };
    decode.ended(&id, R::LegEndFinished, timings);
    assert_eq!(soon("the answer", sent).await.unwrap(), 200);
}

fn number(text: &str, before: &str, after: &str) -> f64 {
    let (_, rest) = text.split_once(before).expect(before);
    rest.split_once(after).expect(after).0.parse().expect(text)
}

fn check_why(why: &str) {
    let total = number(why, "split ", " ms (");
    let prefill = number(why, "prefill ", ",");
    let handoff = number(why, "handoff ", ",");
    let decode = number(why, "decode ", ")");
    assert!(prefill > 0.0 && decode > 0.0, "{why}");
    // Each is rounded to 0.1 ms.
    assert!((prefill + handoff + decode - total).abs() < 0.21, "{why}");
}

#[tokio::test]
async fn a_split_requests_line_has_workers_phases_and_costs() {
    let (lines, _guard) = Lines::keep("info", AccessLog::Json);
    split_request().await;
    let objects = lines.objects();
    let [object] = &objects[..] else {
        panic!("{}", lines.text());
    };
    assert_eq!(
        (&object["prefill_worker"], &object["decode_worker"]),
        (&json!("0"), &json!("1"))
    );
    let ms = |name: &str| {
        object[name]
            .as_f64()
            .unwrap_or_else(|| panic!("{name}: {object}"))
    };
    assert!(ms("queue_ms") >= 500.0);
    assert_eq!(ms("prefill_ms"), 250.0);
    assert_eq!(ms("decode_ms"), 125.0);
    assert_eq!(ms("transfer_exposed_ms"), 1.0);
    assert_eq!(object["transfer_bytes"], 4_096);
    assert_eq!(object["transport"], "nixl-ucx/tcp");
    assert!(ms("first_token_ms") > 0.0 && ms("first_token_ms") <= ms("elapsed_ms"));
    assert_eq!(object["replacements"], Value::from(0));
    check_why(object["why"].as_str().unwrap());
}

#[tokio::test]
async fn text_has_the_same_fields() {
    let (lines, _guard) = Lines::keep("info", AccessLog::Text);
    split_request().await;
    let text = lines.text();
    let line = text
        .lines()
        .find(|line| line.contains("request ended"))
        .expect("a line");
    assert!(
        line.contains(" INFO access: request ended request_id=\"cmpl-"),
        "{line}"
    );
    for field in [
        "outcome=\"finished\"",
        "status=200",
        "output_tokens=3",
        "prefill_ms=250.0",
        "decode_ms=125.0",
        "prefill_worker=\"0\"",
        "decode_worker=\"1\"",
        "replacements=0",
    ] {
        assert!(
            line.contains(&format!(" {field}")),
            "{field} is not in {line}"
        );
    }
    check_why(line.split_once("why=\"").expect("why").1);
}

/// A generation that has begun and not ended.
async fn account_of_a_dispatched_request() -> Timings {
    let (service, _workers, mut sessions) = serve(&[Role::Prefill, Role::Decode], by_role).await;
    let generating = service.generate(generation(9), Instant::now());
    sessions[0].submit().await;
    sessions[1].submit().await;
    generating.account.read()
}

#[tokio::test]
async fn a_request_under_way_is_accounted_for_only_if_there_is_a_line() {
    let (_lines, guard) = Lines::keep("info", AccessLog::Text);
    let known = account_of_a_dispatched_request().await;
    assert_eq!(
        (known.prefill_worker.as_str(), known.decode_worker.as_str()),
        ("0", "1")
    );
    assert!(known.why.is_some());
    drop(guard);
    let (_lines, _guard) = Lines::keep("info", AccessLog::Off);
    let known = account_of_a_dispatched_request().await;
    assert!(known.why.is_none() && known.prefill_worker.is_empty());
}
