//! Fields that one engine alone reads, before workers of both.

use std::sync::Arc;

use super::fake::{Fabric, FakeWorker};
use super::vllm::CHAT;
use super::{Router, sglang_worker, vllm_worker};

const OF_SGLANG: [&str; 3] = [
    r#""regex":"a+""#,
    r#""ebnf":"root ::= \"a\"""#,
    r#""json_schema":"{}""#,
];
const OF_VLLM: [&str; 3] = [
    r#""guided_json":{"type":"object"}"#,
    r#""structured_outputs":{"regex":"a+"}"#,
    r#""guided_choice":["a"]"#,
];

fn chat(field: &str) -> String {
    format!(r#"{{"model":"theirs","messages":[],"max_tokens":3,{field}}}"#)
}

#[tokio::test]
async fn a_field_that_one_engine_reads_goes_to_its_workers() {
    let fabric = Arc::new(Fabric::default());
    let workers = [
        sglang_worker::start("s0", "", &fabric),
        vllm_worker::start("w1", "", &fabric),
    ];
    let urls = [
        sglang_worker::url(&workers[0]),
        vllm_worker::url(&workers[1]),
    ];
    let router = Router::start(&urls).await;
    for (fields, by) in [(OF_SGLANG, &workers[0]), (OF_VLLM, &workers[1])] {
        for field in fields {
            let before = by.legs().len();
            for _ in 0..4 {
                let got = router.post(CHAT, &chat(field)).await;
                assert_eq!(got.status, 200, "{field} {}", got.body);
            }
            assert_eq!(by.legs().len(), before + 4, "{field}");
            assert!(by.bodies().pop().unwrap().contains(field));
        }
    }
    let before: usize = workers.iter().map(|worker| worker.legs().len()).sum();
    let both = format!("{},{}", OF_SGLANG[0], OF_VLLM[0]);
    let got = router.post(CHAT, &chat(&both)).await;
    assert_eq!(got.status, 400, "{}", got.body);
    assert!(got.body.contains("no engine reads both"), "{}", got.body);
    let after: usize = workers.iter().map(|worker| worker.legs().len()).sum();
    assert_eq!(after, before);
    // What says nothing binds to nobody.
    let nothing = chat(r#""regex":null,"guided_json":null,"ebnf":"""#);
    assert_eq!(router.post(CHAT, &nothing).await.status, 200);
    fabric.check();
}

#[tokio::test]
async fn a_field_that_no_worker_of_the_model_reads_is_refused() {
    let fabric = Arc::new(Fabric::default());
    for (fields, engine, start) in [
        (
            OF_SGLANG,
            "SGLang",
            vllm as fn(&Arc<Fabric>) -> (FakeWorker, String),
        ),
        (OF_VLLM, "vLLM", sglang),
    ] {
        let (worker, url) = start(&fabric);
        let router = Router::start(&[url]).await;
        for field in fields {
            let got = router.post(CHAT, &chat(field)).await;
            assert_eq!(got.status, 400, "{field} {}", got.body);
            let words = format!("no {engine} worker serves theirs: use response_format");
            assert!(got.body.contains(&words), "{}", got.body);
        }
        assert!(worker.legs().is_empty());
    }
    fabric.check();
}

fn vllm(fabric: &Arc<Fabric>) -> (FakeWorker, String) {
    let worker = vllm_worker::start("w", "", fabric);
    let url = vllm_worker::url(&worker);
    (worker, url)
}

fn sglang(fabric: &Arc<Fabric>) -> (FakeWorker, String) {
    let worker = sglang_worker::start("s", "", fabric);
    let url = sglang_worker::url(&worker);
    (worker, url)
}
