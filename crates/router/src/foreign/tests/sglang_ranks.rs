//! SGLang workers of several data-parallel ranks. A leg on a rank that is not there, and a decode
//! leg that waits for another rank than prefill's, are violations.

use serde_json::Value;

use super::fake::{Fabric, FakeWorker};
use super::sglang_worker::{start, url};
use super::vllm::{CHAT, COMPLETIONS};
use super::*;

/// Workers of so many ranks.
async fn fleet(workers: &[(&'static str, u64)]) -> (Router, Vec<FakeWorker>, Arc<Fabric>) {
    fleet_of(workers, false).await
}

async fn fleet_of(
    workers: &[(&'static str, u64)],
    are_replicas: bool,
) -> (Router, Vec<FakeWorker>, Arc<Fabric>) {
    let fabric = Arc::new(Fabric::default());
    let started = workers.iter().enumerate().map(|(at, (role, ranks))| {
        let worker = start(&format!("s{at}"), role, &fabric);
        worker.set(|manner| {
            manner.ranks = *ranks;
            manner.ranks_are_replicas = are_replicas;
        });
        worker
    });
    let started: Vec<_> = started.collect();
    let urls: Vec<String> = started.iter().map(url).collect();
    let router = Router::start(&urls).await;
    (router, started, fabric)
}

const WITHOUT: [(&str, &str); 4] = [
    (CHAT, r#"{"model":"theirs","messages":[]"#),
    (COMPLETIONS, r#"{"model":"theirs","prompt":["a","b"]"#),
    ("/generate", r#"{"text":"a","stream":true"#),
    ("/generate", r#"{"text":["a","b","c"]"#),
];

#[tokio::test]
async fn where_nobody_names_a_rank_the_room_does() {
    let (router, _workers, fabric) = fleet(&[("prefill", 3), ("decode", 2)]).await;
    for (path, body) in WITHOUT {
        for _ in 0..8 {
            let got = router.post(path, &format!("{body}}}")).await;
            assert_eq!(got.status, 200, "{}", got.body);
        }
    }
    fabric.check();
}

#[tokio::test]
async fn ranks_that_are_replicas_are_named_by_the_router() {
    let (router, workers, fabric) = fleet_of(&[("prefill", 3), ("decode", 2)], true).await;
    for (path, body) in WITHOUT {
        for _ in 0..8 {
            let got = router.post(path, &format!("{body}}}")).await;
            assert_eq!(got.status, 200, "{}", got.body);
        }
    }
    fabric.check();
    let body = |body: &String| serde_json::from_str::<Value>(body).unwrap();
    let of_prefill: Vec<Value> = workers[0].bodies().iter().map(body).collect();
    for rank in 0..3 {
        assert!(of_prefill.iter().any(|body| body["routed_dp_rank"] == rank));
    }
    let of_decode: Vec<Value> = workers[1].bodies().iter().map(body).collect();
    assert!(
        of_decode
            .iter()
            .all(|body| body.get("routed_dp_rank").is_none())
    );
}

#[tokio::test]
async fn a_named_rank_is_that_of_both_legs() {
    for are_replicas in [false, true] {
        a_named_rank_holds(are_replicas).await;
    }
}

async fn a_named_rank_holds(are_replicas: bool) {
    let (router, workers, fabric) = fleet_of(&[("prefill", 3), ("decode", 4)], are_replicas).await;
    for (path, body) in WITHOUT {
        for (fields, header) in [
            (r#","routed_dp_rank":2"#, None),
            (r#","data_parallel_rank":2,"routed_dp_rank":null"#, None),
            (r#","routed_dp_rank":0"#, Some("2")),
        ] {
            let headers: Vec<_> = header
                .map(|rank| ("x-data-parallel-rank", rank))
                .into_iter()
                .collect();
            let sent = format!("{body}{fields}}}");
            let got = read(router.send_with(path, &sent, &headers).await).await;
            assert_eq!(got.status, 200, "{}", got.body);
            for worker in &workers {
                let body: Value = serde_json::from_str(worker.bodies().last().unwrap()).unwrap();
                assert_eq!(body["routed_dp_rank"], 2);
            }
        }
    }
    fabric.check();
}

#[tokio::test]
async fn a_rank_that_is_not_there_is_refused_by_name() {
    let fleets: [&[_]; 3] = [
        &[("prefill", 2), ("decode", 4)],
        &[("prefill", 4), ("decode", 2)],
        &[("", 2)],
    ];
    for workers in fleets {
        let (router, _workers, fabric) = fleet(workers).await;
        for wrong in ["2", "-1", "1.5", "\"a\""] {
            let body = format!(r#"{{"text":"a","routed_dp_rank":{wrong}}}"#);
            let got = router.post("/generate", &body).await;
            assert_eq!(got.status, 400, "{}", got.body);
            let error: Value = serde_json::from_str(&got.body).unwrap();
            let message = error["error"]["message"].as_str().unwrap();
            assert!(
                message.starts_with(&format!("routed_dp_rank is {wrong}")),
                "{message}"
            );
            assert!(message.contains("0 to "), "{message}");
            assert_eq!(error["error"]["param"], "routed_dp_rank");
        }
        let header = [("x-data-parallel-rank", "7")];
        let body = r#"{"model":"theirs","messages":[]}"#;
        let got = read(router.send_with(CHAT, body, &header).await).await;
        assert_eq!(got.status, 400, "{}", got.body);
        assert!(
            got.body.contains("x-data-parallel-rank is 7"),
            "{}",
            got.body
        );
        fabric.check();
    }
}
