//! What becomes of requests when vLLM workers refuse, fail, die or hang.

use super::fake::{MODEL, Worker};
use super::vllm::{CHAT, COMPLETIONS, fleet, tuned, words};
use super::vllm_worker::{self, start, url};
use super::*;

const STREAM: &str = r#"{"model":"theirs","prompt":"a","stream":true,"max_tokens":50}"#;

#[tokio::test]
async fn a_workers_refusal_reaches_the_client_as_it_is() {
    let refusal = r#"{"error":{"message":"max_tokens must be at least 1","code":400}}"#;
    for roles in [&[""][..], &["prefill", "decode"]] {
        for body in [STREAM, r#"{"model":"theirs","prompt":"a","max_tokens":50}"#] {
            let (router, workers, fabric) = fleet(roles).await;
            for _ in 0..4 {
                workers[0].set(|manner| manner.status = Some((400, refusal)));
                let got = router.post(COMPLETIONS, body).await;
                assert_eq!((got.status.as_u16(), got.body.as_str()), (400, refusal));
                assert_eq!(got.headers["content-type"], "application/json; x=1");
            }
            assert_eq!(workers[0].legs().len(), 4, "it is not tried again");
            assert!(workers[1..].iter().all(|worker| worker.legs().is_empty()));
            assert_eq!(router.metric("tasuki_worker_breaker_openings_total"), 0.0);
            assert_eq!(router.metric("tasuki_worker_failing"), 0.0);
            workers[0].set(|manner| manner.status = None);
            assert_eq!(router.post(COMPLETIONS, body).await.status, 200);
            fabric.check();
        }
    }
}

#[tokio::test]
async fn a_failure_before_the_first_byte_is_tried_elsewhere() {
    for status in [500, 503] {
        let (router, workers, fabric) = fleet(&["", ""]).await;
        workers[0].set(|manner| manner.status = Some((status, "broken")));
        for _ in 0..50 {
            let got = router.post(COMPLETIONS, STREAM).await;
            assert_eq!(said(&got.body).0, words(4), "{}", got.body);
            if !workers[0].legs().is_empty() {
                break;
            }
        }
        assert!(!workers[0].legs().is_empty(), "it was tried");
        fabric.check();
    }
}

#[tokio::test]
async fn where_all_fail_the_client_gets_one_clean_error() {
    let (router, _workers, _) = {
        let (router, workers, fabric) = fleet(&[""]).await;
        workers[0].set(|manner| manner.status = Some((500, "at 10.0.0.7: secret")));
        (router, workers, fabric)
    };
    let got = router.post(COMPLETIONS, STREAM).await;
    assert_eq!(got.status, 500);
    assert!(
        got.body.contains("attempts to run the request failed"),
        "{}",
        got.body
    );
    assert!(!got.body.contains("10.0.0.7"));
}

#[tokio::test]
async fn a_worker_that_dies_before_the_first_byte_costs_nothing() {
    let (router, mut workers, fabric) = fleet(&["", ""]).await;
    workers
        .iter()
        .for_each(|worker| worker.set(|manner| manner.hangs = true));
    let sent = {
        let app = Arc::clone(&router.app);
        let request = Request::post(COMPLETIONS).body(Body::from(STREAM)).unwrap();
        tokio::spawn(async move { read(routes(app).oneshot(request).await.unwrap()).await })
    };
    let at = busy(&workers).await;
    workers[1 - at].set(|manner| manner.hangs = false);
    workers[at].kill();
    let got = soon("the answer", sent).await.unwrap();
    assert_eq!(said(&got.body).0, words(4), "{}", got.body);
    router.until_up(1).await;
    fabric.check();
}

#[tokio::test]
async fn a_decode_worker_that_dies_in_an_answer_is_one_error_event() {
    let (router, mut workers, fabric) = fleet(&["prefill", "decode", "decode"]).await;
    workers
        .iter()
        .for_each(|worker| worker.set(|manner| manner.pause_after = Some(2)));
    let (begun, rest) = read_until(router.send(COMPLETIONS, STREAM).await, "t1").await;
    let at = workers
        .iter()
        .rposition(|worker| worker.open() == 1)
        .unwrap();
    assert_eq!(workers[at].legs(), ["decode"]);
    workers[at].kill();
    let rest: Vec<Bytes> = soon("the end", rest.collect()).await;
    let all = begun + std::str::from_utf8(&rest.concat()).unwrap();
    assert_eq!(all.matches("event: error").count(), 1, "{all}");
    assert!(
        all.contains("no worker can resume it") && !all.contains("[DONE]"),
        "{all}"
    );
    let text = all.split("event: error").next().unwrap();
    assert_eq!(said(text).0, words(2));
    assert_eq!(router.metric("tasuki_resumed_answers_total"), 0.0);
    let failed = r#"tasuki_requests_total{outcome="failed"}"#;
    until("the count", || router.metric(failed) == 1.0).await;
    fabric.check();
}

#[tokio::test]
async fn a_connection_that_breaks_behind_a_whole_answer_is_no_failure() {
    for roles in [&[""][..], &["prefill", "decode"]] {
        let (router, workers, fabric) = fleet(roles).await;
        workers
            .iter()
            .for_each(|worker| worker.set(|manner| manner.breaks = true));
        for _ in 0..4 {
            let got = router.post(COMPLETIONS, STREAM).await;
            assert!(got.body.ends_with("data: [DONE]\n\n"), "{}", got.body);
            assert!(!got.body.contains("event: error"), "{}", got.body);
        }
        assert_eq!(router.metric("tasuki_worker_breaker_openings_total"), 0.0);
        fabric.check();
    }
}

#[tokio::test]
async fn a_worker_whose_metrics_take_long_is_well() {
    let (router, workers, fabric) = tuned(&[""], |tuning, _| {
        tuning.liveness = Liveness {
            suspect_after: Duration::from_secs(2),
            ..Liveness::default()
        };
    })
    .await;
    workers[0].set(|manner| manner.metrics_hang = true);
    let began = std::time::Instant::now();
    while began.elapsed() < Duration::from_secs(4) {
        assert_eq!(router.metric("tasuki_worker_up{"), 1.0);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(router.post(COMPLETIONS, STREAM).await.status, 200);
    workers[0].set(|manner| manner.metrics_hang = false);
    fabric.check();
}

#[tokio::test]
async fn kv_that_dies_with_its_prefill_worker_is_computed_again() {
    let (router, mut workers, fabric) = fleet(&["prefill", "prefill", "decode"]).await;
    workers[2].set(|manner| manner.hangs = true);
    let sent = {
        let app = Arc::clone(&router.app);
        let request = Request::post(COMPLETIONS).body(Body::from(STREAM)).unwrap();
        tokio::spawn(async move { read(routes(app).oneshot(request).await.unwrap()).await })
    };
    until("a decode leg", || workers[2].open() == 1).await;
    let at = workers
        .iter()
        .position(|worker| worker.legs() == ["prefill"])
        .unwrap();
    workers[at].kill();
    workers[2].set(|manner| manner.hangs = false);
    let got = soon("the answer", sent).await.unwrap();
    assert_eq!(said(&got.body).0, words(4), "{}", got.body);
    assert_eq!(
        router.metric(r#"tasuki_retries_total{reason="kv_lost""#),
        1.0
    );
    fabric.check();
}

#[tokio::test]
async fn a_client_that_hangs_up_ends_the_work() {
    let (router, workers, fabric) = fleet(&["prefill", "decode"]).await;
    workers[1].set(|manner| manner.pause_after = Some(1));
    let (_, rest) = read_until(router.send(COMPLETIONS, STREAM).await, "t0").await;
    assert_eq!(workers[1].open(), 1);
    drop(rest);
    until("decode's connection is closed", || workers[1].open() == 0).await;
    // In the middle of prefill too.
    workers[0].set(|manner| manner.hangs = true);
    let app = Arc::clone(&router.app);
    let request = Request::post(COMPLETIONS).body(Body::from(STREAM)).unwrap();
    let sent = tokio::spawn(async move { routes(app).oneshot(request).await });
    until("a prefill leg", || workers[0].open() == 1).await;
    sent.abort();
    until("prefill's connection is closed", || workers[0].open() == 0).await;
    until("the requests are over", || {
        router.metric("tasuki_requests_in_flight") == 0.0
    })
    .await;
    assert_eq!(workers[1].legs(), ["decode"]);
    fabric.check();
}

#[tokio::test]
async fn an_error_event_of_a_worker_is_a_failure() {
    let (router, workers, fabric) = fleet(&["", ""]).await;
    // Before the first token: elsewhere.
    workers[0].set(|manner| manner.error_after = Some((0, 500)));
    let chat = STREAM.replace(r#""prompt":"a""#, r#""messages":[]"#);
    let paths = [(CHAT, &*chat), (COMPLETIONS, STREAM)];
    for (path, body) in paths.repeat(2) {
        let got = router.post(path, body).await;
        assert_eq!(said(&got.body).0, words(4), "{}", got.body);
        assert!(!got.body.contains("planted"));
    }
    // After it: one error event. What the client did wrong is told as the worker says it.
    for (code, says) in [(500, "no worker can resume"), (400, "planted")] {
        workers
            .iter()
            .for_each(|w| w.set(|manner| manner.error_after = Some((2, code))));
        for (path, body) in paths {
            let got = router.post(path, body).await;
            assert_eq!(got.body.matches("event: error").count(), 1, "{}", got.body);
            let (text, error) = got.body.split_once("event: error\n").unwrap();
            assert_eq!(said(text).0, words(2));
            assert!(error.contains(says) && !error.contains("[DONE]"), "{error}");
            assert!(error.starts_with(r#"data: {"error":{"#), "{error}");
        }
    }
    fabric.check();
}

#[tokio::test]
async fn a_client_that_reads_slowly_holds_its_worker_back() {
    // The client is slower than a worker may be.
    let stalled = Duration::from_secs(2);
    let (router, workers, fabric) = tuned(&[""], |tuning, _| {
        tuning.liveness.stalled = Some(stalled);
        tuning.machine.stalled = Some(stalled);
    })
    .await;
    workers[0].set(|manner| {
        manner.tokens = 4_000;
        manner.padding = 4_096;
    });
    let body = STREAM.replace("50", "5000");
    let (begun, rest) = read_until(router.send(COMPLETIONS, &body).await, "t0").await;
    let written = || {
        workers[0]
            .worker
            .written
            .load(std::sync::atomic::Ordering::SeqCst)
    };
    let mut before = 0;
    while before != written() {
        before = written();
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    // The router's window, and the buffers of two sockets.
    assert!(before < 3_000, "{before} chunks of 4 KiB were taken");
    tokio::time::sleep(2 * stalled).await;
    let rest: Vec<Bytes> = soon("the rest", rest.collect()).await;
    let all = begun + std::str::from_utf8(&rest.concat()).unwrap();
    assert!(all.contains("t3999") && all.ends_with("[DONE]\n\n"));
    assert_eq!(workers[0].legs().len(), 1);
    assert_eq!(router.metric("tasuki_retries_total"), 0.0);
    fabric.check();
}

#[tokio::test]
async fn a_worker_is_free_when_the_rest_of_its_answer_waits_for_the_client() {
    let (router, workers, fabric) = fleet(&[""]).await;
    // In several parts, and less than the window.
    workers[0].set(|manner| {
        manner.tokens = 50;
        manner.padding = 4_096;
    });
    let (begun, rest) = read_until(router.send(COMPLETIONS, STREAM).await, "t0").await;
    until("the request is over", || {
        router.metric("tasuki_requests_in_flight") == 0.0
    })
    .await;
    let rest: Vec<Bytes> = soon("the rest", rest.collect()).await;
    let all = begun + std::str::from_utf8(&rest.concat()).unwrap();
    assert!(all.contains("t49") && all.ends_with("[DONE]\n\n"));
    fabric.check();
}

#[tokio::test]
async fn a_sick_worker_gets_no_new_work_and_a_well_one_does() {
    let (router, workers, fabric) = fleet(&["", ""]).await;
    workers[0].set(|manner| manner.health = 503);
    router.until_up(1).await;
    for _ in 0..3 {
        router.post(COMPLETIONS, STREAM).await;
    }
    assert!(workers[0].legs().is_empty());
    workers[0].set(|manner| manner.health = 200);
    router.until_up(2).await;
    fabric.check();
}

#[tokio::test]
async fn a_worker_of_another_kind_is_refused_by_name() {
    let fabric = Arc::new(fake::Fabric::default());
    let worker = start("w0", "", &fabric);
    let text = crate::testing::TestModel::new();
    let ours = Models::new(vec![(vec![MODEL.to_owned()], Arc::clone(&text.text))]);
    let router = Router::tuned(&[], ours, |_, _| {}).await;
    let registry = router.service.registry();
    let id = registry.add(&url(&worker));
    let mut info = crate::workers::testing::local_info("e");
    info.model = MODEL.to_owned();
    info.capabilities.payload = tasuki_core::Payload::Opaque;
    let (link, _worker) = crate::workers::testing::LocalWorker::new();
    let refused = registry.join(id, info, Arc::new(link), std::time::Instant::now());
    let refused = refused.err().expect("refused").to_string();
    let says =
        "\"theirs\" is served by workers of Tasuki here, and this is a worker of another engine";
    assert!(
        refused.contains(says) && refused.contains("--served-model-name"),
        "{refused}"
    );
}

/// A body counts until it is worked up, and not until the answer is there.
#[tokio::test]
async fn large_requests_that_wait_for_a_worker_take_no_room_of_others() {
    let large = |_: &mut _, http: &mut HttpSettings| http.max_body_bytes = 70_000;
    let (router, workers, fabric) = tuned(&[""], large).await;
    workers[0].set(|manner| manner.hangs = true);
    let prompt = "a".repeat(69_000);
    let body = format!(r#"{{"model":"theirs","prompt":"{prompt}","max_tokens":4}}"#);
    let begun = ["tasuki_requests_in_flight", "tasuki_http_errors_total"];
    let mut answers = Vec::new();
    for sent in 1..=40 {
        let request = Request::post(COMPLETIONS).body(Body::from(body.clone()));
        let app = Arc::clone(&router.app);
        let answer = connection::answer(routes(app), request.unwrap());
        answers.push(tokio::spawn(answer));
        let all = || begun.map(|name| router.metric(name)).iter().sum::<f64>() == f64::from(sent);
        until("the request", all).await;
    }
    workers[0].set(|manner| manner.hangs = false);
    for answer in answers {
        let answer = read(soon("an answer", answer).await.unwrap()).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
    fabric.check();
}

/// A worker whose streams have comments alone.
fn commenting(worker: Arc<Worker>) -> axum::Router {
    let answer = async || {
        let comment = Bytes::from(format!(": {}\n\n", "x".repeat(1 << 20)));
        let comments = futures::stream::iter(vec![Ok::<_, std::convert::Infallible>(comment); 20]);
        Body::from_stream(comments.chain(futures::stream::pending()))
    };
    axum::Router::new()
        .route(COMPLETIONS, axum::routing::post(answer))
        .fallback_service(vllm_worker::routes(worker))
}

#[tokio::test]
async fn what_comes_before_the_first_token_is_limited() {
    let fabric = Arc::new(fake::Fabric::default());
    let worker = FakeWorker::start("w0", "", &fabric, commenting);
    let router = Router::start(&[url(&worker)]).await;
    let got = router.post(COMPLETIONS, STREAM).await;
    assert_eq!(got.status, 500, "{}", got.body);
}

/// A worker that does not say how long its context is.
fn without_context(worker: Arc<Worker>) -> axum::Router {
    let models = async || axum::Json(serde_json::json!({"data": [{"id": MODEL}]}));
    axum::Router::new()
        .route("/v1/models", axum::routing::get(models))
        .fallback_service(vllm_worker::routes(worker))
}

#[tokio::test]
async fn a_context_that_is_not_known_is_not_told() {
    let fabric = Arc::new(fake::Fabric::default());
    let worker = FakeWorker::start("w0", "", &fabric, without_context);
    let router = Router::start(&[url(&worker)]).await;
    let models = router.get("/v1/models").await.body;
    let models: Value = serde_json::from_str(&models).unwrap();
    assert_eq!(models["data"][0]["id"], MODEL);
    assert_eq!(models["data"][0]["max_model_len"], Value::Null);
}
