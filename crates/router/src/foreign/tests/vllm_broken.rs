//! vLLM workers that are lost again and again, that fail or refuse every request, or that differ in
//! their adapters.

use std::sync::atomic::Ordering;

use serde_json::json;
use tasuki_reqlog::Log;

use super::fake::{Fabric, MODEL, Worker};
use super::vllm::{COMPLETIONS, fleet, words};
use super::vllm_worker::{routes as vllm_routes, url};
use super::*;
use crate::access_log::tests::Lines;
use crate::config::AccessLog;
use crate::serve::tests::request_log::keep_log;

const STREAM: &str = r#"{"model":"theirs","prompt":"a","stream":true,"max_tokens":50}"#;

#[tokio::test]
async fn an_error_is_logged_again_after_a_loss() {
    let (lines, _guard) = Lines::keep("info", AccessLog::Off);
    let refused = || {
        let text = lines.text();
        let logged = text.lines().filter(|line| line.contains("not reached"));
        logged.filter(|line| line.contains("refused")).count()
    };
    let (router, mut workers, fabric) = fleet(&[""]).await;
    let mut worker = workers.remove(0);
    for losses in 1..3 {
        worker.kill();
        until("the error", || refused() == losses).await;
        let address = worker.worker.address;
        worker = FakeWorker::start_at(address, "w0", "", &fabric, vllm_routes);
        router.until_up(1).await;
    }
}

/// A worker whose errors have a head, and the beginning of a body, which stalls or is cut off.
fn broken<const STATUS: u16, const CUT: bool>(worker: Arc<Worker>) -> axum::Router {
    let answer = async || {
        let end = async {
            if !CUT {
                std::future::pending::<()>().await;
            }
            tokio::time::sleep(Duration::from_millis(10)).await; // the head is sent
            Err(std::io::Error::other("cut off"))
        };
        let begun = futures::stream::iter([Ok("{")]);
        let body = Body::from_stream(begun.chain(futures::stream::once(end)));
        (StatusCode::from_u16(STATUS).unwrap(), body)
    };
    axum::Router::new()
        .route(COMPLETIONS, axum::routing::post(answer))
        .fallback_service(vllm_routes(worker))
}

/// A worker that compresses its answers, whatever is asked for.
fn compressing(worker: Arc<Worker>) -> axum::Router {
    let answer = async || ([("content-encoding", "gzip")], &b"\x1f\x8b\x08"[..]);
    axum::Router::new()
        .route(COMPLETIONS, axum::routing::post(answer))
        .fallback_service(vllm_routes(worker))
}

#[tokio::test]
async fn a_compressed_answer_is_a_failure_of_the_worker() {
    let (lines, _guard) = Lines::keep("info", AccessLog::Off);
    let fabric = Arc::new(Fabric::default());
    let bad = FakeWorker::start("w0", "", &fabric, compressing);
    let good = FakeWorker::start("w1", "", &fabric, vllm_routes);
    let router = Router::start(&[url(&bad), url(&good)]).await;
    let whole = STREAM.replace("true", "false");
    for body in [STREAM, &whole].repeat(4) {
        let got = router.post(COMPLETIONS, body).await;
        assert_eq!(got.status, 200, "{}", got.body);
        assert!(got.body.contains("t0"), "{}", got.body);
    }
    let seen = good.worker.seen.lock().unwrap()[0].clone();
    assert_eq!(seen.headers["accept-encoding"], "identity");
    let logged = lines.text();
    assert!(logged.contains("the Content-Encoding gzip"), "{logged}");
}

#[tokio::test]
async fn an_error_without_its_whole_body_is_a_failure_of_the_worker() {
    let fabric = Arc::new(Fabric::default());
    for serve in [
        broken::<400, false>,
        broken::<500, false>,
        broken::<400, true>,
    ] {
        let worker = FakeWorker::start("w0", "", &fabric, serve);
        let router = Router::tuned(&[url(&worker)], Models::new(Vec::new()), |tuning, _| {
            tuning.liveness.stalled = Some(Duration::from_millis(50));
        })
        .await;
        let got = router.post(COMPLETIONS, STREAM).await;
        assert_eq!(got.status, 500, "{}", got.body);
        assert!(got.body.contains("attempts"), "{}", got.body);
    }
}

#[tokio::test]
async fn a_decode_worker_that_fails_every_request_is_left_alone() {
    let (router, workers, fabric) = fleet(&["prefill", "decode", "decode"]).await;
    workers[1].set(|manner| manner.status = Some((500, "broken")));
    for _ in 0..40 {
        let got = router.post(COMPLETIONS, STREAM).await;
        assert_eq!(said(&got.body).0, words(4), "{}", got.body);
    }
    let tried = workers[1].legs().len();
    assert!((3..10).contains(&tried), "{tried} of 40 requests");
    let openings = ["1", "2"].map(|worker| {
        let series = "tasuki_worker_breaker_openings_total";
        router.metric(&format!("{series}{{worker=\"{worker}\""))
    });
    assert!(openings[0] > 0.0 && openings[1] == 0.0, "{openings:?}");
    fabric.check();
}

#[tokio::test]
async fn a_prefill_worker_whose_kv_cannot_be_had_is_left_alone() {
    let (router, mut workers, fabric) = fleet(&["prefill", "prefill", "decode"]).await;
    // It prefills, and nobody can pull from it.
    fabric.dead.lock().unwrap().insert("w0".to_owned());
    for _ in 0..40 {
        let got = router.post(COMPLETIONS, STREAM).await;
        assert_eq!(said(&got.body).0, words(4), "{}", got.body);
    }
    let tried = workers[0].legs().len();
    assert!((3..12).contains(&tried), "{tried} of 40 requests");
    assert!(router.metric("tasuki_worker_breaker_openings_total{worker=\"0\"") > 0.0);
    workers.clear();
    fabric.check();
}

/// A worker of a model, with an adapter.
fn with_adapter<const MODEL_NUMBER: u8>(worker: Arc<Worker>) -> axum::Router {
    let models = async || {
        let base = match MODEL_NUMBER {
            0 => MODEL.to_owned(),
            number => format!("model-{number}"),
        };
        axum::Json(json!({"data": [{"id": base}, {"id": "special", "parent": base}]}))
    };
    axum::Router::new()
        .route("/v1/models", axum::routing::get(models))
        .fallback_service(vllm_routes(worker))
}

#[tokio::test]
async fn adapters_that_are_loaded_and_unloaded_later_are_known() {
    let (router, workers, _) = fleet(&[""]).await;
    let lists = |name: &str| {
        let foreign = router.app.foreign_models();
        foreign[0].names.iter().any(|known| known == name)
    };
    let ask = async |model: &str| {
        router
            .post(COMPLETIONS, &STREAM.replace(MODEL, model))
            .await
    };
    assert_eq!(ask("special").await.status, 404);
    workers[0].set(|manner| manner.adapters = vec!["special"]);
    until("the new adapter", || lists("special")).await;
    assert_eq!(ask("special").await.status, 200);
    let sent = workers[0].bodies().pop().expect("a request");
    assert!(sent.contains(r#""model":"special""#), "{sent}");
    assert!(!lists("lora"), "it is unloaded");
    assert_eq!(ask("lora").await.status, 404);
    workers[0].set(|manner| {
        manner.adapters.clear();
        manner.models_fail = true;
    });
    let answers = workers[0].worker.lists.load(Ordering::Relaxed);
    let asked_again = || workers[0].worker.lists.load(Ordering::Relaxed) > answers + 1;
    until("a list that fails", asked_again).await;
    assert!(lists("special"), "its last list counts");
}

/// Two names of one model, in another order each time.
fn in_any_order(worker: Arc<Worker>) -> axum::Router {
    let asked = Arc::clone(&worker);
    let models = async move || {
        let turn = asked.lists.fetch_add(1, Ordering::Relaxed);
        let mut names = [MODEL, "other"];
        names.rotate_left(turn % 2);
        axum::Json(json!({"data": names.map(|id| json!({"id": id}))}))
    };
    axum::Router::new()
        .route("/v1/models", axum::routing::get(models))
        .fallback_service(vllm_routes(worker))
}

#[tokio::test]
async fn names_in_another_order_are_the_same() {
    let (lines, _guard) = Lines::keep("info", AccessLog::Off);
    let worker = FakeWorker::start("w0", "", &Arc::new(Fabric::default()), in_any_order);
    let router = Router::start(&[url(&worker)]).await;
    let lists = || worker.worker.lists.load(Ordering::Relaxed);
    until("further lists", || lists() >= 4).await;
    assert_eq!(router.metric("tasuki_worker_up{"), 1.0);
    let logged = lines.text();
    for said in ["worker lost", "have changed"] {
        assert!(!logged.contains(said), "{logged}");
    }
}

#[tokio::test]
async fn only_workers_with_the_adapter_get_requests_for_it() {
    let fabric = Arc::new(Fabric::default());
    let with = FakeWorker::start("w0", "", &fabric, vllm_routes);
    let mut without = FakeWorker::start("w1", "", &fabric, vllm_routes);
    with.set(|manner| manner.adapters = vec!["special"]);
    let none = Models::new(Vec::new());
    let router = Router::tuned(&[url(&with), url(&without)], none, |tuning, _| {
        tuning.admission.recover = Duration::from_millis(100);
    })
    .await;
    let body = STREAM.replace(MODEL, "special");
    for _ in 0..10 {
        assert_eq!(router.post(COMPLETIONS, &body).await.status, 200);
    }
    assert_eq!((with.bodies().len(), without.bodies().len()), (10, 0));
    let lora = STREAM.replace(MODEL, "lora");
    assert_eq!(router.post(COMPLETIONS, &lora).await.status, 200);
    assert_eq!(without.bodies().len(), 1);
    let listed = async || router.get("/v1/models").await.body;
    let has = |list: &str, name: &str| list.matches(&format!(r#""id":"{name}""#)).count();
    let list = listed().await;
    assert_eq!(
        [has(&list, "special"), has(&list, "lora")],
        [1, 1],
        "{list}"
    );
    // It may come back: no other model is answered for it, and its name stays.
    without.kill();
    router.until_up(1).await;
    let got = router.post(COMPLETIONS, &lora).await;
    assert_eq!(got.status, 503, "{}", got.body);
    assert!(
        got.body.contains("load the adapter on more workers"),
        "{}",
        got.body
    );
    assert!(got.headers.contains_key("retry-after"));
    assert_eq!(has(&listed().await, "lora"), 1);
    router.service.registry().remove(tasuki_core::WorkerId(1));
    assert_eq!(router.post(COMPLETIONS, &lora).await.status, 404);
    assert_eq!(has(&listed().await, "lora"), 0);
}

/// Its prompt is cached there, so without its refusal it is the best one.
#[tokio::test]
async fn a_worker_that_refuses_is_asked_once() {
    for status in [429, 503] {
        let (router, workers, fabric) = fleet(&["", ""]).await;
        let body = STREAM.replace(r#""a""#, &json!("word ".repeat(150)).to_string());
        assert_eq!(router.post(COMPLETIONS, &body).await.status, 200);
        let first = workers.iter().position(|worker| !worker.legs().is_empty());
        let first = &workers[first.expect("one has served it")];
        first.set(|manner| manner.status = Some((status, "full")));
        until("an idle fleet, as the worker last said", || {
            router.metric("tasuki_requests_in_flight") + router.metric("tasuki_worker_running")
                == 0.0
        })
        .await;
        assert_eq!(router.post(COMPLETIONS, &body).await.status, 200);
        assert_eq!(first.legs().len(), 2, "{status}: once more");
        fabric.check();
    }
}

#[tokio::test]
async fn prompts_of_an_adapter_are_not_where_the_base_has_cached_them() {
    let folder = tempfile::tempdir().unwrap();
    let (router, _workers, fabric) = fleet(&[""]).await;
    let log = keep_log(&router.service, folder.path());
    let body = STREAM.replace(r#""a""#, &json!("word ".repeat(150)).to_string());
    for model in [MODEL, "lora", MODEL, "lora"] {
        let got = router.post(COMPLETIONS, &body.replace(MODEL, model)).await;
        assert_eq!(got.status, 200, "{}", got.body);
    }
    log.close(Duration::from_secs(20));
    let read = Log::read(&folder.path().join("requests.log")).unwrap();
    let chunks: Vec<_> = read.requests.iter().map(|one| &one.chunks).collect();
    assert!(!chunks[0].is_empty() && !chunks[1].is_empty());
    assert_eq!((chunks[0], chunks[1]), (chunks[2], chunks[3]));
    assert_ne!(chunks[0], chunks[1]);
    fabric.check();
}

#[tokio::test]
async fn an_adapter_whose_workers_are_gone_is_not_answered_by_the_base() {
    let fabric = Arc::new(Fabric::default());
    let mut with = FakeWorker::start("w0", "", &fabric, vllm_routes);
    let without = FakeWorker::start("w1", "", &fabric, vllm_routes);
    with.set(|manner| {
        manner.adapters = vec!["special"];
        manner.pause_after = Some(2);
    });
    let router = Router::start(&[url(&with), url(&without)]).await;
    let body = STREAM.replace(MODEL, "special");
    let begun = body.replace('}', r#","temperature":0}"#);
    let (got, ()) = tokio::join!(router.post(COMPLETIONS, &begun), async {
        let written = || with.worker.written.load(Ordering::SeqCst) >= 2;
        until("its first tokens", written).await;
        router.service.registry().remove(tasuki_core::WorkerId(0));
        with.kill();
    });
    assert!(got.body.contains("does not exist"), "{}", got.body);
    let sent = without.bodies().pop().expect("the rest of the answer");
    assert!(sent.contains(r#""model":"special""#), "{sent}");
    assert_eq!(router.post(COMPLETIONS, &body).await.status, 404);
    assert_eq!(without.bodies().len(), 1);
}

#[tokio::test]
async fn an_alias_of_an_adapter_is_the_adapter() {
    let fabric = Arc::new(Fabric::default());
    let worker = FakeWorker::start("w0", "", &fabric, with_adapter::<0>);
    let router = Router::tuned(&[url(&worker)], Models::new(Vec::new()), |_, http| {
        http.foreign_aliases = vec![("mine".to_owned(), "special".to_owned())];
    })
    .await;
    router
        .post(COMPLETIONS, &STREAM.replace(MODEL, "mine"))
        .await;
    let sent = worker.bodies().pop().expect("a request");
    assert!(sent.contains(r#""model":"special""#), "{sent}");
}

#[tokio::test]
async fn two_models_with_an_adapter_of_one_name_stay_two() {
    let fabric = Arc::new(Fabric::default());
    let one = FakeWorker::start("w0", "", &fabric, with_adapter::<1>);
    let other = FakeWorker::start("w1", "", &fabric, with_adapter::<2>);
    let router = Router::start(&[url(&one), url(&other)]).await;
    for (model, worker) in [("model-1", &one), ("model-2", &other)] {
        for _ in 0..5 {
            let before = worker.legs().len();
            router
                .post(COMPLETIONS, &STREAM.replace(MODEL, model))
                .await;
            assert_eq!(worker.legs().len(), before + 1, "{model}");
        }
    }
}
