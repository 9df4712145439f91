//! What the request log says of requests, read as the simulator reads it.

use std::path::Path;

use tasuki_reqlog::{Log, Outcome, RequestLog};

use super::*;
use crate::request_log::RequestLogArgs;

/// Starts the service's log in a folder.
pub fn keep_log(service: &Service, folder: &Path) -> RequestLog {
    let args = RequestLogArgs {
        request_log: Some(folder.join("requests.log")),
        request_log_mb: 1,
        request_log_files: 2,
    };
    let router = tasuki_reqlog::Router {
        policy: "cost".to_owned(),
        strict_roles: true,
        role_preference: 0.05,
        admission: true,
        ttft_target_ms: None,
        tpot_target_ms: None,
    };
    let dropped = &service.metrics().request_log_dropped;
    let log = args.start(router, service.registry(), dropped).unwrap();
    let log = log.unwrap();
    service.keep_log(log.clone());
    log
}

#[tokio::test]
async fn a_split_request_leaves_a_record_with_workers_and_times() {
    let folder = tempfile::tempdir().unwrap();
    let (service, _workers, mut sessions) = serve(&[Role::Prefill, Role::Decode], by_role).await;
    let log = keep_log(&service, folder.path());
    let one = Generation {
        tenant: "somebody".into(),
        ..generation(9)
    };
    let received = tokio::spawn(read_all(service.generate(one, Instant::now())));
    let [prefill, decode] = &mut sessions[..] else {
        unreachable!()
    };
    let id = prefill.submit().await.request_id;
    decode.submit().await;
    prefill.output(&id, 0, &[97], F::FinishNone);
    decode.output(&id, 0, &[97], F::FinishNone);
    decode.output(&id, 1, &[98, 99], F::FinishStop);
    let timings = LegTimings {
        transfer_s: 0.004,
        transfer_exposed_s: 0.001,
        transfer_bytes: 5_000,
        ..Default::default()
    };
    decode.ended(&id, R::LegEndFinished, timings);
    soon("the answer", received).await.unwrap().end.unwrap();
    // A client that leaves before anything has come.
    drop(service.generate(generation(9), Instant::now()));
    until("both ends", || {
        service
            .metrics_text()
            .contains("tasuki_requests_total{outcome=\"cancelled\"} 1")
    })
    .await;
    log.close(Duration::from_secs(20));

    let text = std::fs::read_to_string(folder.path().join("requests.log")).unwrap();
    for secret in ["somebody", "127.0.0.1"] {
        assert!(!text.contains(secret), "{secret} is in {text}");
    }
    let read = Log::read(&folder.path().join("requests.log")).unwrap();
    let fleet = read.fleet().unwrap();
    let roles: Vec<&str> = fleet.workers.iter().map(|w| w.role.as_str()).collect();
    assert_eq!(roles, ["prefill", "decode"]);
    assert!(fleet.workers.iter().all(|worker| worker.ready));
    assert_eq!(read.requests.len(), 2);
    let record = &read.requests[0].record;
    assert_eq!((record.prompt_tokens, record.output_tokens), (20, 3));
    assert_eq!(
        (record.workers, record.outcome),
        (Some((0, 1)), Outcome::Done)
    );
    assert_eq!(record.handoff.unwrap().0, 5_000);
    assert!(record.tenant > 0 && record.retries == 0);
    let first = record.first_token_ms.unwrap();
    let second = record.second_token_ms.unwrap();
    assert!(0.0 <= first && first <= second && second <= record.end_ms);
    assert!(record.admitted_ms.unwrap() <= first);
    assert_eq!(read.requests[1].record.outcome, Outcome::Cancelled);
    assert_eq!(read.requests[1].record.first_token_ms, None);
}
