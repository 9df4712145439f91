//! SGLang workers, colocated and disaggregated.

use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use super::fake::{Fabric, FakeWorker, MODEL, Manner};
use super::sglang_worker::{start, url};
use super::vllm::{CHAT, COMPLETIONS, words};
use super::*;
use crate::health_generate::Probes;
use crate::{dashboard, operators};

pub async fn fleet(roles: &[&'static str]) -> (Router, Vec<FakeWorker>, Arc<Fabric>) {
    mannered(roles, |_| ()).await
}

pub async fn mannered(
    roles: &[&'static str],
    change: fn(&mut Manner),
) -> (Router, Vec<FakeWorker>, Arc<Fabric>) {
    let fabric = Arc::new(Fabric::default());
    let numbered = roles.iter().enumerate();
    let workers: Vec<_> = numbered
        .map(|(at, role)| start(&format!("s{at}"), role, &fabric))
        .collect();
    workers.iter().for_each(|worker| worker.set(change));
    let urls: Vec<String> = workers.iter().map(url).collect();
    let router = Router::start(&urls).await;
    (router, workers, fabric)
}

#[tokio::test]
async fn both_legs_meet_whatever_the_path() {
    let (router, workers, fabric) = fleet(&["prefill", "decode"]).await;
    for (path, body) in [
        (CHAT, r#"{"model":"theirs","messages":[],"max_tokens":3}"#),
        (
            CHAT,
            r#"{"model":"theirs","messages":[],"max_tokens":1,"stream":true}"#,
        ),
        (
            COMPLETIONS,
            r#"{"model":"theirs","prompt":"a","stream":true}"#,
        ),
        (
            "/generate",
            r#"{"text":"a","sampling_params":{"max_new_tokens":4}}"#,
        ),
        (
            "/generate",
            r#"{"input_ids":[1,2],"stream":true,"x":[1.50]}"#,
        ),
    ] {
        let got = router.post(path, body).await;
        assert_eq!(got.status, 200, "{}", got.body);
        assert!(got.body.contains("t0"), "{path}: {}", got.body);
    }
    assert_eq!(workers[0].legs(), ["prefill"; 5]);
    assert_eq!(workers[1].legs(), ["decode"; 5]);
    let sent = workers[1].bodies().pop().unwrap();
    assert!(sent.starts_with(r#"{"input_ids":[1,2],"stream":true,"x":[1.50],"bootstrap_"#));
    until("no leg is left", || {
        workers.iter().all(|worker| worker.open() == 0)
    })
    .await;
    fabric.check();
}

#[tokio::test]
async fn the_prompts_of_a_batch_have_rooms_of_their_own() {
    let (router, workers, fabric) = fleet(&["prefill", "decode"]).await;
    for (path, body) in [
        ("/generate", r#"{"text":["a","b","c"]}"#),
        ("/generate", r#"{"text":["a"]}"#),
        ("/generate", r#"{"text":null,"input_ids":[[1],[2]]}"#),
        (COMPLETIONS, r#"{"model":"theirs","prompt":["a","b"]}"#),
    ] {
        let got = router.post(path, body).await;
        assert_eq!(got.status, 200, "{body}: {}", got.body);
    }
    assert_eq!(workers[1].legs().len(), 4);
    assert_eq!(fabric.rooms.lock().unwrap().len(), 3 + 1 + 2 + 2);
    fabric.check();
}

#[tokio::test]
async fn the_prompts_logprobs_come_from_both() {
    let (router, _workers, fabric) = fleet(&["prefill", "decode"]).await;
    let expected = json!([[null, 1, null], [-2.0, 2, null], [-1.0, 9, null]]);
    let whole = router
        .post("/generate", r#"{"text":"a","return_logprob":true}"#)
        .await;
    let whole: Value = serde_json::from_str(&whole.body).unwrap();
    assert_eq!(whole["meta_info"]["input_token_logprobs"], expected);
    let stream = r#"{"text":"a","return_logprob":true,"stream":true}"#;
    let stream = router.post("/generate", stream).await;
    let (_, chunks) = said(&stream.body);
    assert_eq!(chunks.len(), 4);
    for chunk in chunks {
        assert_eq!(chunk["meta_info"]["input_token_logprobs"], expected);
    }
    fabric.check();
}

#[tokio::test]
async fn an_error_of_prefill_reaches_the_client_at_once_and_ends_decode() {
    let refusal = r#"{"error":{"message":"too long","code":400}}"#;
    for (status, body, expected) in [(400, refusal, 400), (500, "broken", 500)] {
        let (router, workers, fabric) = fleet(&["prefill", "decode"]).await;
        workers[0].set(|manner| manner.hangs = true);
        let sent = {
            let app = Arc::clone(&router.app);
            let body = r#"{"model":"theirs","messages":[],"stream":true}"#;
            let request = Request::post(CHAT).body(Body::from(body)).unwrap();
            tokio::spawn(async move { read(routes(app).oneshot(request).await.unwrap()).await })
        };
        until("both legs", || {
            workers.iter().all(|worker| worker.open() == 1)
        })
        .await;
        workers[0].set(|manner| {
            manner.status = Some((status, body));
            manner.hangs = false;
        });
        let begun = std::time::Instant::now();
        let got = soon("the answer", sent).await.unwrap();
        assert_eq!(got.status, expected, "{}", got.body);
        assert_eq!(got.body == refusal, status == 400);
        assert!(begun.elapsed() < Duration::from_secs(5));
        until("decode's leg is ended", || workers[1].open() == 0).await;
        fabric.check();
    }
}

#[tokio::test]
async fn a_worker_of_one_half_never_does_the_other() {
    let (router, mut workers, fabric) = fleet(&["prefill", "decode"]).await;
    workers[1].kill();
    router.until_up(1).await;
    let request = r#"{"model":"theirs","messages":[],"max_tokens":1}"#;
    let service = router.service.clone();
    until("it is not ready", || service.readiness(None).is_err()).await;
    let sent = {
        let app = Arc::clone(&router.app);
        let request = Request::post(CHAT).body(Body::from(request)).unwrap();
        tokio::spawn(async move { read(routes(app).oneshot(request).await.unwrap()).await })
    };
    let got = soon("the answer", sent).await.unwrap();
    assert_eq!(got.status, 503, "{}", got.body);
    assert!(got.body.contains("no decode worker is up"), "{}", got.body);
    assert!(workers[0].legs().is_empty());
    fabric.check();
}

#[tokio::test]
async fn prefill_that_dies_before_its_end_is_tried_elsewhere() {
    let (router, mut workers, fabric) = fleet(&["prefill", "prefill", "decode"]).await;
    workers[0].set(|manner| manner.hangs = true);
    workers[1].set(|manner| manner.hangs = true);
    let sent = {
        let app = Arc::clone(&router.app);
        let body = r#"{"model":"theirs","messages":[],"stream":true}"#;
        let request = Request::post(CHAT).body(Body::from(body)).unwrap();
        tokio::spawn(async move { read(routes(app).oneshot(request).await.unwrap()).await })
    };
    let at = busy(&workers[..2]).await;
    workers[1 - at].set(|manner| manner.hangs = false);
    workers[at].kill();
    let got = soon("the answer", sent).await.unwrap();
    assert_eq!(said(&got.body).0, words(4), "{}", got.body);
    assert_eq!(workers[2].legs().len(), 2);
    fabric.check();
}

#[tokio::test]
async fn a_hang_up_ends_both_legs() {
    let (router, workers, fabric) = fleet(&["prefill", "decode"]).await;
    workers[0].set(|manner| manner.hangs = true);
    let app = Arc::clone(&router.app);
    let body = r#"{"model":"theirs","messages":[]}"#;
    let request = Request::post(CHAT).body(Body::from(body)).unwrap();
    let sent = tokio::spawn(async move { routes(app).oneshot(request).await });
    until("both legs", || {
        workers.iter().all(|worker| worker.open() == 1)
    })
    .await;
    sent.abort();
    until("both are closed", || {
        workers.iter().all(|worker| worker.open() == 0)
    })
    .await;
    fabric.check();
}

#[tokio::test]
async fn a_health_probe_generates_on_both_halves_and_fails_with_either() {
    for broken in [0, 1] {
        let (mut router, mut workers, fabric) = fleet(&["prefill", "decode"]).await;
        let app = Arc::get_mut(&mut router.app).expect("the only owner");
        app.probes = Probes::new(Duration::ZERO, Duration::from_secs(20));
        let got = router.get("/health_generate").await;
        assert_eq!(got.status, 200, "{}", got.body);
        assert_eq!(workers[0].legs(), ["prefill"]);
        assert_eq!(workers[1].legs(), ["decode"]);
        workers[broken].set(|manner| manner.status = Some((500, "broken")));
        let got = router.get("/health_generate?model=theirs").await;
        assert_eq!(got.status, 503, "{}", got.body);
        assert!(got.body.contains("a generation of 2 tokens failed"));
        workers[broken].kill();
        router.until_up(1).await;
        let got = router.get("/health_generate").await;
        assert_eq!(got.status, 503, "{}", got.body);
        fabric.check();
    }
}

#[tokio::test]
async fn what_operators_of_sglang_ask_is_answered_for_the_fleet() {
    let (router, workers, fabric) = fleet(&["prefill", "decode"]).await;
    let flushed = router.post("/flush_cache", "").await;
    assert_eq!(flushed.status, 200, "{}", flushed.body);
    for worker in &workers {
        assert_eq!(worker.worker.flushed.load(Ordering::SeqCst), 1);
    }
    workers[0].set(|manner| manner.status = Some((400, "busy")));
    let flushed = router.post("/flush_cache", "").await;
    assert_eq!(flushed.status, 502);
    assert!(
        flushed.body.contains("worker 0") && flushed.body.contains("400"),
        "{}",
        flushed.body
    );
    let info: Value = serde_json::from_str(&router.get("/get_server_info").await.body).unwrap();
    assert_eq!(info["internal_states"], json!([{"of": "s1"}]));
    assert_eq!(info["prefill"][0]["name"], "s0");
    assert_eq!(info["decode"][0]["name"], "s1");
    let info: Value = serde_json::from_str(&router.get("/get_model_info").await.body).unwrap();
    assert_eq!(info["model_path"], "m");
    fabric.check();
}

#[tokio::test]
async fn clients_of_a_network_neither_flush_caches_nor_see_how_workers_run() {
    let (router, workers, fabric) = fleet(&["prefill", "decode"]).await;
    let service = &router.service;
    let app = Arc::new(App {
        is_local: false,
        ..App::new(
            Arc::new(service.clone()),
            Models::new(Vec::new()),
            settings(),
        )
    });
    let source = dashboard::Source {
        registry: Arc::clone(service.registry()),
        metrics: Arc::clone(service.metrics()),
    };
    let operators = operators::routes(source, Arc::clone(&app));
    let send = async |routes: axum::Router, method: &str, path: &str| {
        let request = Request::builder().method(method).uri(path);
        let request = request.body(Body::empty()).unwrap();
        read(routes.oneshot(request).await.unwrap()).await
    };
    let flushed = || workers[0].worker.flushed.load(Ordering::SeqCst);
    let refused = send(routes(Arc::clone(&app)), "POST", "/flush_cache").await;
    assert_eq!((refused.status, flushed()), (StatusCode::NOT_FOUND, 0));
    assert!(refused.body.contains("--admin-port"), "{}", refused.body);
    let done = send(operators.clone(), "POST", "/flush_cache").await;
    assert_eq!((done.status, flushed()), (StatusCode::OK, 1));
    for path in ["/server_info", "/get_server_info"] {
        let shown = send(routes(Arc::clone(&app)), "GET", path).await;
        assert_eq!(shown.status, 200, "{path}");
        assert!(!shown.body.contains("s0"), "{path}: {}", shown.body);
        let whole = send(operators.clone(), "GET", path).await;
        assert!(whole.body.contains("s0"), "{path}: {}", whole.body);
    }
    for path in ["/model_info", "/get_model_info"] {
        let shown = send(routes(Arc::clone(&app)), "GET", path).await;
        let shown: Value = serde_json::from_str(&shown.body).unwrap();
        assert_eq!(shown["model_path"], MODEL, "no folder: {shown}");
    }
    fabric.check();
}

#[tokio::test]
async fn a_worker_whose_address_says_otherwise_is_refused() {
    let fabric = Arc::new(Fabric::default());
    let worker = start("s0", "prefill", &fabric);
    let wrong = format!("sglang://{}?role=decode", worker.worker.address);
    let other_port = format!(
        "sglang://{}?role=prefill&bootstrap_port=1",
        worker.worker.address
    );
    for url in [wrong, other_port] {
        let router = Router::tuned(&[], Models::new(Vec::new()), |_, _| {}).await;
        let address = match crate::discovery::Address::parse(&url) {
            Ok(crate::discovery::Address::Foreign(address)) => address,
            other => panic!("{other:?}"),
        };
        let registry = Arc::clone(router.service.registry());
        let id = registry.add(&url);
        let watching = crate::workers::foreign::keep_watched(
            id,
            address,
            Arc::clone(&registry),
            Liveness::default(),
        );
        let watching = tokio::spawn(watching);
        until("it was tried", || {
            registry.read(|known| known.state.was_tried)[0]
        })
        .await;
        assert_eq!(router.metric("tasuki_worker_up{"), 0.0);
        watching.abort();
    }
    fabric.check();
}

#[tokio::test]
async fn one_router_serves_all_three_kinds_at_once() {
    use crate::workers::testing as ours;
    use tasuki_wire::v1::{self, worker_message::Message};

    let fabric = Arc::new(Fabric::default());
    let sglang = [
        start("s0", "prefill", &fabric),
        start("s1", "decode", &fabric),
    ];
    let vllm = [
        super::vllm_worker::start("v0", "prefill", &fabric),
        super::vllm_worker::start("v1", "decode", &fabric),
    ];
    let mut own = ours::FakeWorker::start().await;
    let mut urls: Vec<String> = sglang.iter().map(url).collect();
    urls.extend(vllm.iter().map(super::vllm_worker::url));
    urls.push(own.address.to_string());
    let text = crate::testing::TestModel::new();
    let mine = Models::new(vec![(vec!["mine".to_owned()], Arc::clone(&text.text))]);
    let session = tokio::spawn(async move {
        let mut session = own.session().await;
        session.send(Message::Info(v1::WorkerInfo {
            model: "mine".to_owned(),
            vocab_size: 258,
            ..ours::info("e", v1::Role::Mixed)
        }));
        session.report(v1::StepReport {
            load: Some(ours::idle()),
            ..Default::default()
        });
        let submit = session.submit().await;
        let id = submit.request_id;
        session.output(&id, 0, &[u32::from(b'x')], v1::FinishReason::FinishLength);
        session.ended(
            &id,
            v1::LegEndReason::LegEndFinished,
            v1::LegTimings::default(),
        );
        (own, session)
    });
    let router = Router::tuned(&urls, mine, |_, _| {}).await;
    let body = r#"{"model":"mine","prompt":"a","max_tokens":1}"#;
    let got = router.post(COMPLETIONS, body).await;
    assert!(got.body.contains(r#""text":"x""#), "{}", got.body);
    // vLLM and SGLang workers of one model serve it side by side.
    let served = |workers: &[FakeWorker]| workers[1].legs().len();
    for _ in 0..50 {
        let body = json!({"model": MODEL, "prompt": "a", "stream": true});
        let got = router.post(COMPLETIONS, &body.to_string()).await;
        assert_eq!(said(&got.body).0, words(4), "{}", got.body);
        if served(&sglang) > 0 && served(&vllm) > 0 {
            break;
        }
    }
    assert!(served(&sglang) > 0 && served(&vllm) > 0);
    // vLLM has no such path.
    let before = served(&vllm);
    let native = json!({"model": MODEL, "text": "a"}).to_string();
    for _ in 0..6 {
        assert_eq!(router.post("/generate", &native).await.status, 200);
    }
    assert_eq!(served(&vllm), before);
    let nameless = router.post("/generate", r#"{"text":"a"}"#).await;
    let names = format!("Served here: mine, {MODEL}");
    assert!(nameless.body.contains(&names), "{}", nameless.body);
    let listed = router.get("/v1/models").await.body;
    assert!(
        listed.contains("mine") && listed.contains(MODEL),
        "{listed}"
    );
    let unknown = router.post(CHAT, r#"{"model":"x","messages":[]}"#).await;
    assert!(unknown.body.contains("mine, theirs"), "{}", unknown.body);
    fabric.check();
    drop(session.await.unwrap());
}
