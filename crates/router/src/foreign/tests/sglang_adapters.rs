//! Adapters of SGLang workers, by each of the names that requests have for them.

use std::sync::Arc;

use super::fake::{Fabric, FakeWorker};
use super::sglang_worker::{adapters, start, url};
use super::vllm::{CHAT, COMPLETIONS};
use super::{Router, vllm_worker};

/// Two pairs of SGLang workers, of which the second one has the adapter `special`, and a vLLM
/// worker that has one of this name.
async fn fleet() -> (Router, Vec<FakeWorker>, Arc<Fabric>) {
    let fabric = Arc::new(Fabric::default());
    let sglang = ["prefill", "decode", "prefill", "decode"].into_iter();
    let sglang = sglang.enumerate();
    let mut workers: Vec<_> = sglang
        .map(|(at, role)| start(&format!("s{at}"), role, &fabric))
        .collect();
    let mut urls: Vec<String> = workers.iter().map(url).collect();
    let vllm = vllm_worker::start("w4", "", &fabric);
    urls.push(vllm_worker::url(&vllm));
    workers.push(vllm);
    for worker in &workers[2..] {
        worker.set(|manner| manner.adapters.push("special"));
    }
    (Router::start(&urls).await, workers, fabric)
}

#[tokio::test]
async fn base_and_adapter_in_one_name_go_to_workers_that_have_both() {
    let (router, workers, fabric) = fleet().await;
    for (path, body) in [
        (
            CHAT,
            r#"{"model":"theirs:special","messages":[],"max_tokens":3}"#,
        ),
        (
            COMPLETIONS,
            r#"{"model":"theirs:special","prompt":"a","stream":true}"#,
        ),
    ] {
        for _ in 0..5 {
            let got = router.post(path, body).await;
            assert_eq!(got.status, 200, "{}", got.body);
        }
        for worker in &workers[2..4] {
            let sent = worker.bodies().pop().expect("a request");
            assert!(sent.starts_with(&body[..body.len() - 1]), "{sent}");
        }
    }
    let served = workers.iter().map(|worker| worker.legs().len());
    assert_eq!(served.collect::<Vec<_>>(), [0, 0, 10, 10, 0]);
    // SGLang loads again what it had to unload, so workers say what they do not know.
    let other = r#"{"model":"theirs:other","messages":[]}"#;
    let got = router.post(CHAT, other).await;
    assert!(
        got.body.contains("never been loaded: other"),
        "{}",
        got.body
    );
    assert_eq!(got.status, 400);
    for unknown in ["ours:special", "theirs:", "theirsx"] {
        let body = format!(r#"{{"model":"{unknown}","messages":[]}}"#);
        assert_eq!(router.post(CHAT, &body).await.status, 404, "{body}");
    }
    fabric.check();
}

/// SGLang lists adapters by their names, and answers a model of such a name by its base.
#[tokio::test]
async fn an_adapter_that_is_named_as_the_model_is_not_answered_by_the_base() {
    let fabric = Arc::new(Fabric::default());
    let worker = start("s0", "", &fabric);
    let router = Router::start(&[url(&worker)]).await;
    for (path, body, expected) in [
        (CHAT, r#"{"model":"lora","messages":[]}"#, Some("lora")),
        ("/generate", r#"{"model":"lora","text":"a"}"#, Some("lora")),
        (CHAT, r#"{"model":"theirs","messages":[]}"#, None),
        (CHAT, r#"{"messages":[]}"#, None),
        ("/generate", r#"{"text":"a"}"#, None),
        (
            "/generate",
            r#"{"text":"a","lora_path":"lora"}"#,
            Some("lora"),
        ),
        (
            CHAT,
            r#"{"model":"lora","lora_path":"","messages":[]}"#,
            Some("lora"),
        ),
    ] {
        let got = router.post(path, body).await;
        assert_eq!(got.status, 200, "{}", got.body);
        let sent = worker.bodies().pop().expect("a request");
        let served = adapters(path, &serde_json::from_str(&sent).unwrap());
        assert_eq!(served, Vec::from_iter(expected), "{sent}");
    }
    fabric.check();
}

#[tokio::test]
async fn lora_path_goes_to_sglang_workers_that_have_all_its_adapters() {
    let (router, workers, fabric) = fleet().await;
    for lora_path in [r#""special""#, r#"["special",null]"#] {
        for path in [COMPLETIONS, "/generate"] {
            let body = format!(
                r#"{{"model":"theirs","prompt":["a","b"],"text":["a","b"],"lora_path":{lora_path}}}"#
            );
            for _ in 0..5 {
                let got = router.post(path, &body).await;
                assert_eq!(got.status, 200, "{body} {}", got.body);
            }
        }
    }
    let served = workers.iter().map(|worker| worker.legs().len());
    assert_eq!(served.collect::<Vec<_>>(), [0, 0, 20, 20, 0]);
    let unreadable = r#"{"model":"theirs","prompt":"a","lora_path":[5]}"#;
    let got = router.post(COMPLETIONS, unreadable).await;
    assert_eq!(got.status, 400, "{}", got.body);
    assert!(got.body.contains("lora_path is [5]"), "{}", got.body);
    fabric.check();
}

#[tokio::test]
async fn lora_path_is_refused_where_no_sglang_worker_serves_the_model() {
    let fabric = Arc::new(Fabric::default());
    let worker = vllm_worker::start("w", "", &fabric);
    worker.set(|manner| manner.adapters.push("special"));
    let router = Router::start(&[vllm_worker::url(&worker)]).await;
    let body = r#"{"model":"theirs","messages":[],"lora_path":"special"}"#;
    let got = router.post(CHAT, body).await;
    assert_eq!(got.status, 400, "{}", got.body);
    assert!(
        got.body.contains("no SGLang worker serves theirs"),
        "{}",
        got.body
    );
    for of_the_base in [r#""""#, "[null]", r#"[null,""]"#] {
        let body = format!(r#"{{"model":"theirs","messages":[],"lora_path":{of_the_base}}}"#);
        let got = router.post(CHAT, &body).await;
        assert_eq!(got.status, 200, "{body} {}", got.body);
    }
    fabric.check();
}

#[tokio::test]
async fn where_only_workers_of_another_engine_are_up_the_error_says_so() {
    let (router, mut workers, fabric) = fleet().await;
    workers[..4].iter_mut().for_each(FakeWorker::kill);
    router.until_up(1).await;
    for (path, body, cause) in [
        ("/generate", r#"{"text":"a"}"#, "another engine"),
        (
            CHAT,
            r#"{"model":"theirs:other","messages":[]}"#,
            "another engine",
        ),
        (
            CHAT,
            r#"{"model":"theirs:special","messages":[]}"#,
            "adapter",
        ),
    ] {
        let got = router.post(path, body).await;
        assert_eq!(got.status, 503, "{}", got.body);
        let interrupted = got.body.contains("interrupted");
        assert!(got.body.contains(cause) && !interrupted, "{}", got.body);
    }
    assert_eq!(workers[4].legs(), [""; 0]);
    fabric.check();
}
