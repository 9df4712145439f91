//! vLLM workers, colocated and split through their connector.

use serde_json::{Value, json};

use super::fake::{Fabric, FakeWorker, MODEL, truth};
use super::vllm_worker::{start, url};
use super::*;
use crate::access_log::tests::Lines;
use crate::config::AccessLog;
use crate::foreign::serve::{EXTRA_ARGUMENTS, OURS};

pub const CHAT: &str = "/v1/chat/completions";
pub const COMPLETIONS: &str = "/v1/completions";

pub fn words(count: usize) -> String {
    (0..count).map(truth).collect()
}

/// A router in front of new workers of these roles.
pub async fn fleet(roles: &[&'static str]) -> (Router, Vec<FakeWorker>, Arc<Fabric>) {
    tuned(roles, |_, _| {}).await
}

pub async fn tuned(
    roles: &[&'static str],
    tune: impl FnOnce(&mut Tuning, &mut HttpSettings),
) -> (Router, Vec<FakeWorker>, Arc<Fabric>) {
    let fabric = Arc::new(Fabric::default());
    let numbered = roles.iter().enumerate();
    let workers: Vec<_> = numbered
        .map(|(at, role)| start(&format!("w{at}"), role, &fabric))
        .collect();
    let urls: Vec<String> = workers.iter().map(url).collect();
    let router = Router::tuned(&urls, Models::new(Vec::new()), tune).await;
    (router, workers, fabric)
}

/// A body that no parser of ours could have written.
const ODD: &str = r#"{"stream":false, "zeta":[1.50,{"b":1,"a":[]}],"model":"theirs","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:x"}},{"type":"text","text":"h\u0069"}]}],"structured_outputs":{"regex":"a+"},"big":12345678901234567890123,"temperature":0.70}"#;

#[tokio::test]
async fn a_request_and_its_answer_pass_untouched() {
    let (router, workers, fabric) = fleet(&[""]).await;
    let headers = [
        ("authorization", "Bearer secret"),
        ("traceparent", "00-1-2-01"),
        ("cookie", "private"),
        ("accept-encoding", "gzip"),
    ];
    let got = read(router.send_with(CHAT, ODD, &headers).await).await;
    assert_eq!(got.status, 200);
    assert_eq!(got.headers["content-type"], "application/json; x=1");
    assert!(got.body.contains(&words(4)), "{}", got.body);
    let seen = workers[0].worker.seen.lock().unwrap()[0].clone();
    let plain = |text: &str| text.replace(r#""stream":false, "zeta""#, r#""stream":false,"zeta""#);
    assert_eq!(seen.body, plain(ODD), "every value as it was");
    assert_eq!(seen.headers["authorization"], "Bearer secret");
    assert_eq!(seen.headers["traceparent"], "00-1-2-01");
    assert!(!seen.headers.contains_key("cookie"));
    assert_eq!(seen.headers["accept-encoding"], "identity");
    let id = got.headers["x-request-id"].to_str().unwrap();
    assert_eq!(seen.headers["x-request-id"], format!("{id}.0"));
    fabric.check();
}

#[tokio::test]
async fn a_stream_passes_byte_for_byte() {
    let (router, workers, fabric) = fleet(&[""]).await;
    let body =
        r#"{"model":"theirs","messages":[],"stream":true,"stream_options":{"include_usage":true}}"#;
    let got = router.post(CHAT, body).await;
    assert_eq!(
        got.headers["content-type"],
        "text/event-stream; charset=utf-8; x=1"
    );
    let (text, chunks) = said(&got.body);
    assert_eq!(text, words(4));
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 4);
    assert!(got.body.contains(r#"{"id": "w0-"#) && got.body.ends_with("data: [DONE]\n\n"));
    assert_eq!(workers[0].legs(), ["whole"]);
    until("the count of tokens", || {
        router.metric("tasuki_output_tokens_total") == 4.0
    })
    .await;
    assert_eq!(
        router.metric(r#"tasuki_requests_total{outcome="done"}"#),
        1.0
    );
    fabric.check();
}

#[tokio::test]
async fn a_split_request_is_prefilled_and_then_decoded() {
    let (router, workers, fabric) = fleet(&["prefill", "decode"]).await;
    let client = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}],
        "stream": true, "max_tokens": 3, "min_tokens": 2, "ignore_eos": false,
        "stop_token_ids": [7], "later": {"x": [1]}});
    let got = router.post(CHAT, &client.to_string()).await;
    assert_eq!(said(&got.body).0, words(3), "{}", got.body);
    assert_eq!(
        (workers[0].legs(), workers[1].legs()),
        (vec!["prefill"], vec!["decode"])
    );
    let mut decode: Value = serde_json::from_str(&workers[1].bodies()[0]).unwrap();
    decode.as_object_mut().unwrap().remove("kv_transfer_params");
    assert_eq!(decode, client, "the client's body and nothing else");
    let whole = router
        .post(
            COMPLETIONS,
            r#"{"model":"theirs","prompt":"a","max_tokens":2}"#,
        )
        .await;
    assert!(whole.body.contains(&words(2)), "{}", whole.body);
    assert_eq!(workers[1].legs(), ["decode", "decode"]);
    assert_eq!(router.metric("tasuki_recomputed_prompts_total"), 0.0);
    fabric.check();
}

#[tokio::test]
async fn what_has_no_handoff_is_served_by_one_worker() {
    let (router, workers, fabric) = fleet(&["prefill", "decode"]).await;
    for (path, fields) in [
        (COMPLETIONS, r#""prompt":"a","n":2"#),
        (COMPLETIONS, r#""prompt":"a","echo":true,"logprobs":1"#),
        (COMPLETIONS, r#""prompt":"a","prompt_logprobs":0"#),
        (CHAT, r#""messages":[],"echo":true"#),
        (CHAT, r#""messages":[],"truncate_prompt_tokens":-1"#),
        (COMPLETIONS, r#""prompt":["a","b"]"#),
        (COMPLETIONS, r#""prompt":[[1,2],[3]]"#),
        (
            CHAT,
            r#""messages":[],"tools":[{}],"tool_choice":"required""#,
        ),
        (
            CHAT,
            r#""messages":[],"tools":[{}],"tool_choice":{"type":"function"}"#,
        ),
    ] {
        let got = router
            .post(path, &format!(r#"{{"model":"theirs",{fields}}}"#))
            .await;
        assert_eq!(got.status, 200, "{fields}: {}", got.body);
    }
    let legs: Vec<_> = workers.iter().flat_map(FakeWorker::legs).collect();
    assert_eq!(legs, ["whole"; 9]);
    fabric.check();
}

#[tokio::test]
async fn what_has_no_handoff_is_refused_where_roles_are_strict() {
    let bodies = [
        (
            COMPLETIONS,
            r#""prompt":"a","prompt_logprobs":0"#,
            "(prompt_logprobs, or",
        ),
        (CHAT, r#""messages":[],"echo":true"#, "echo with logprobs)"),
        (
            CHAT,
            r#""messages":[],"tools":[{}],"tool_choice":"required""#,
            r#""param":"tool_choice""#,
        ),
        (CHAT, r#""messages":[],"n":2"#, "several choices (n)"),
    ];
    let strict = |tuning: &mut Tuning, _: &mut HttpSettings| tuning.policy.strict_roles = true;
    let (router, workers, fabric) = tuned(&["prefill", "decode"], strict).await;
    for (path, fields, named) in bodies {
        let body = format!(r#"{{"model":"theirs",{fields}}}"#);
        let got = router.post(path, &body).await;
        assert_eq!(got.status, 400, "{fields}: {}", got.body);
        assert!(
            got.body.contains(named) && got.body.contains("without a role"),
            "{}",
            got.body
        );
    }
    assert_eq!(
        workers
            .iter()
            .map(|worker| worker.legs().len())
            .sum::<usize>(),
        0
    );
    let (router, workers, _) = tuned(&["prefill", "decode", ""], strict).await;
    for (path, fields, _) in bodies {
        let body = format!(r#"{{"model":"theirs",{fields}}}"#);
        assert_eq!(router.post(path, &body).await.status, 200, "{fields}");
    }
    assert_eq!(workers[2].legs(), ["whole"; 4]);
    fabric.check();
}

#[tokio::test]
async fn an_incomplete_ticket_is_never_forwarded() {
    let reasons = [("all", "no_ticket"), ("remote_port", "incomplete_ticket")];
    for (lacks, reason) in reasons {
        let (router, workers, fabric) = fleet(&["prefill", "decode"]).await;
        workers[0].set(|manner| manner.lacks = Some(lacks));
        let body = r#"{"model":"theirs","messages":[],"max_tokens":9}"#;
        let got = router.post(CHAT, body).await;
        assert_eq!(
            (got.status.as_u16(), got.body.contains(&words(4))),
            (200, true)
        );
        let legs: Vec<_> = workers.iter().flat_map(FakeWorker::legs).collect();
        assert!(!legs.contains(&"decode"), "{legs:?}");
        assert_eq!(legs.iter().filter(|leg| **leg == "whole").count(), 1);
        let counted = format!("tasuki_recomputed_prompts_total{{reason=\"{reason}\"}}");
        assert_eq!(router.metric(&counted), 1.0);
        fabric.check();
    }
}

#[tokio::test]
async fn kv_that_decode_did_not_load_is_noticed() {
    let (router, workers, fabric) = fleet(&["prefill", "decode"]).await;
    let body = r#"{"model":"theirs","prompt":"a","max_tokens":9}"#;
    let counted = r#"tasuki_recomputed_prompts_total{reason="not_loaded"}"#;
    let scrapes = || {
        workers[1]
            .worker
            .pulled
            .load(std::sync::atomic::Ordering::SeqCst)
    };
    router.post(COMPLETIONS, body).await;
    assert_eq!(scrapes(), 7);
    workers[1].set(|manner| manner.recomputes = true);
    // A scrape between the two shows that the first one was loaded.
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(router.metric(counted), 0.0);
    router.post(COMPLETIONS, body).await;
    until("a scrape that shows it", || router.metric(counted) == 1.0).await;
    fabric.check();
}

#[tokio::test]
async fn what_only_the_router_says_is_refused_of_clients() {
    let (router, workers, _) = fleet(&["prefill", "decode"]).await;
    for name in OURS {
        for (place, field, value) in [
            (name.to_owned(), name, json!({"remote_host": "x"})),
            (
                format!("{EXTRA_ARGUMENTS}.{name}"),
                EXTRA_ARGUMENTS,
                json!({name: "x"}),
            ),
        ] {
            let body = json!({"model": MODEL, "messages": [], field: value});
            let got = router.post(CHAT, &body.to_string()).await;
            assert_eq!(got.status, 400);
            let says = format!("{place} is set by the router; leave it out.");
            assert!(got.body.contains(&says), "{}", got.body);
        }
    }
    assert!(workers[0].legs().is_empty());
}

#[tokio::test]
async fn tokens_are_of_our_own_models() {
    let (router, _workers, _fabric) = fleet(&[""]).await;
    for (path, field) in [
        ("/tokenize", r#""prompt":"x""#),
        ("/detokenize", r#""tokens":[1]"#),
    ] {
        for model in [r#""model":"theirs","#, ""] {
            let got = router.post(path, &format!("{{{model}{field}}}")).await;
            assert_eq!(got.status, 400, "{path}: {}", got.body);
            let says = format!(
                "model is theirs, which vLLM or SGLang workers serve; {path} is for models of \
                 Tasuki's own workers. Send it to such a worker itself."
            );
            assert!(got.body.contains(&says), "{}", got.body);
        }
        let got = router
            .post(path, &format!(r#"{{"model":"none",{field}}}"#))
            .await;
        assert_eq!(got.status, 404, "{path}: {}", got.body);
        assert!(got.body.contains("Served here: theirs"), "{}", got.body);
    }
}

#[tokio::test]
async fn responses_are_for_our_own_models() {
    let (router, workers, _) = fleet(&[""]).await;
    let body = r#"{"model":"theirs","input":"x"}"#;
    let got = router.post("/v1/responses", body).await;
    assert_eq!(got.status, 400);
    let says = "model is theirs, which vLLM or SGLang workers serve";
    assert!(got.body.contains(says), "{}", got.body);
    assert!(workers[0].worker.seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn models_are_those_that_workers_report() {
    let fabric = Arc::new(Fabric::default());
    let worker = start("w0", "", &fabric);
    let aliases = vec![("gpt".to_owned(), MODEL.to_owned())];
    let urls = [url(&worker)];
    let router = Router::tuned(&urls, Models::new(Vec::new()), |_, http| {
        http.foreign_aliases = aliases;
    });
    let router = router.await;
    let listed: Value = serde_json::from_str(&router.get("/v1/models").await.body).unwrap();
    let ids: Vec<_> = listed["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| &m["id"])
        .collect();
    assert_eq!(ids, [MODEL, "lora", "gpt"]);
    assert_eq!(listed["data"][0]["max_model_len"], 8192);
    assert_eq!(router.get("/v1/models/gpt").await.status, 200);
    for (asked, sent) in [
        (r#""model":"gpt","#, MODEL),
        ("", MODEL),
        (r#""model":"lora","#, "lora"),
    ] {
        let body = format!(r#"{{{asked}"messages":[]}}"#);
        assert_eq!(router.post(CHAT, &body).await.status, 200);
        let body: Value = serde_json::from_str(worker.bodies().last().unwrap()).unwrap();
        assert_eq!(body["model"], sent, "{asked}");
    }
    let unknown = router.post(CHAT, r#"{"model":"x","messages":[]}"#).await;
    assert_eq!(unknown.status, 404);
    assert!(
        unknown.body.contains("theirs, lora, gpt"),
        "{}",
        unknown.body
    );
    fabric.check();
}

#[tokio::test]
async fn a_key_of_the_router_is_not_told_to_workers() {
    let (router, workers, fabric) = fleet(&[""]).await;
    let keys = crate::api_keys::ApiKeys::new(Some("CARGO_PKG_NAME")).expect("a key");
    let app = Arc::new(App {
        keys: Some(Arc::new(keys)),
        ..App::new(
            Arc::new(router.service.clone()),
            Models::new(Vec::new()),
            settings(),
        )
    });
    let router = Router {
        service: router.service,
        app,
    };
    for path in [CHAT, "/generate", "/flush_cache"] {
        assert_eq!(router.post(path, ODD).await.status, 401, "{path}");
    }
    let headers = [
        ("authorization", "Bearer tasuki-router"),
        ("traceparent", "x"),
    ];
    let got = read(router.send_with(CHAT, ODD, &headers).await).await;
    assert_eq!(got.status, 200, "{}", got.body);
    let seen = workers[0].worker.seen.lock().unwrap()[0].clone();
    assert!(!seen.headers.contains_key("authorization"));
    assert!(seen.headers.contains_key("traceparent"));
    fabric.check();
}

#[tokio::test]
async fn the_access_log_has_a_line_for_each_request() {
    let (lines, _guard) = Lines::keep("info", AccessLog::Json);
    let (router, _workers, _fabric) = fleet(&["prefill", "decode"]).await;
    let body = r#"{"model":"theirs","messages":[],"stream":true}"#;
    assert_eq!(router.post(CHAT, body).await.status, 200);
    let objects = lines.objects();
    assert_eq!(objects.len(), 1, "{}", lines.text());
    let values = ["model", "endpoint", "outcome"].map(|name| objects[0][name].as_str());
    assert_eq!(values, ["theirs", CHAT, "finished"].map(Some));
    let mut ids = ["prefill_worker", "decode_worker"].map(|name| objects[0][name].as_str());
    ids.sort_unstable();
    assert_eq!(ids, ["0", "1"].map(Some));
    assert_eq!(objects[0]["status"], 200);
    assert!(
        objects[0]["why"].as_str().unwrap().starts_with("split "),
        "{}",
        objects[0]
    );
}

#[tokio::test]
async fn a_client_that_leaves_has_its_first_token_in_the_access_log() {
    let (lines, _guard) = Lines::keep("info", AccessLog::Json);
    let (router, workers, _fabric) = fleet(&[""]).await;
    workers[0].set(|manner| manner.pause_after = Some(2));
    let body = r#"{"model":"theirs","messages":[],"stream":true}"#;
    let (_, rest) = read_until(router.send(CHAT, body).await, "t1").await;
    drop(rest);
    until("its line", || !lines.objects().is_empty()).await;
    let line = lines.objects().remove(0);
    assert_eq!(line["outcome"], "disconnected");
    let [first, elapsed] = ["first_token_ms", "elapsed_ms"].map(|name| line[name].as_f64());
    assert!(first > Some(0.0) && first <= elapsed, "{line}");
}
