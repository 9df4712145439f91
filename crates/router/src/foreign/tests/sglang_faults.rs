//! SGLang workers that fail, that cannot, and that are older.

use serde_json::Value;

use super::fake::Manner;
use super::sglang::{fleet, mannered};
use super::vllm::{CHAT, COMPLETIONS};

#[tokio::test]
async fn a_native_stream_that_is_aborted_is_a_failure() {
    let stream = r#"{"text":"a","stream":true}"#;
    let (router, workers, fabric) = fleet(&["", ""]).await;
    workers[0].set(|manner| manner.error_after = Some((0, 500)));
    // Among workers that are equally free it is chance.
    for _ in 0..64 {
        let got = router.post("/generate", stream).await;
        assert!(got.body.contains(" t3"), "{}", got.body);
        assert!(!got.body.contains("planted"), "{}", got.body);
        if !workers[0].legs().is_empty() {
            break;
        }
    }
    assert!(!workers[0].legs().is_empty(), "it was asked");
    workers
        .iter()
        .for_each(|worker| worker.set(|manner| manner.error_after = Some((2, 500))));
    let got = router.post("/generate", stream).await;
    assert!(got.body.contains(" t1"), "{}", got.body);
    assert_eq!(got.body.matches("event: error").count(), 1, "{}", got.body);
    assert!(!got.body.contains("abort"), "{}", got.body);
    fabric.check();
}

#[tokio::test]
async fn log_probabilities_of_an_echoed_prompt_are_those_of_one_worker() {
    let body = r#"{"model":"theirs","prompt":"a","echo":true,"logprobs":1}"#;
    let (router, workers, fabric) = fleet(&["prefill", "decode", ""]).await;
    let got = router.post(COMPLETIONS, body).await;
    assert_eq!(got.status, 200, "{}", got.body);
    assert_eq!(workers[2].legs(), ["whole"]);
    fabric.check();

    let (router, workers, fabric) = fleet(&["prefill", "decode"]).await;
    let got = router.post(COMPLETIONS, body).await;
    assert_eq!(got.status, 400, "{}", got.body);
    assert!(
        got.body.contains("log probabilities of an echoed prompt"),
        "{}",
        got.body
    );
    assert!(
        got.body.contains("add a worker without a role"),
        "{}",
        got.body
    );
    let others = [r#""echo":true"#, r#""logprobs":1"#];
    for fields in others {
        let body = format!(r#"{{"model":"theirs","prompt":"a",{fields}}}"#);
        let got = router.post(COMPLETIONS, &body).await;
        assert_eq!(got.status, 200, "{}", got.body);
    }
    assert_eq!(workers[0].legs(), ["prefill"; 2]);
    fabric.check();
}

/// A real one hangs: it asks for the prompt alone first, in the same room.
#[tokio::test]
async fn several_choices_are_those_of_one_worker() {
    let bodies = [
        ("/generate", r#"{"text":"a","sampling_params":{"n":2}}"#),
        (
            "/generate",
            r#"{"input_ids":[[1],[2]],"sampling_params":{"n":2}}"#,
        ),
        (CHAT, r#"{"model":"theirs","messages":[],"n":3}"#),
    ];
    let (router, workers, fabric) = fleet(&["prefill", "decode", ""]).await;
    for (path, body) in bodies {
        let got = router.post(path, body).await;
        assert_eq!(got.status, 200, "{body}: {}", got.body);
    }
    assert_eq!(workers[2].legs(), ["whole"; 3]);
    fabric.check();

    let (router, workers, fabric) = fleet(&["prefill", "decode"]).await;
    for (path, body) in bodies {
        let got = router.post(path, body).await;
        assert_eq!(got.status, 400, "{body}: {}", got.body);
        for said in ["several choices (n)", "add a worker without a role"] {
            assert!(got.body.contains(said), "{}", got.body);
        }
    }
    assert!(workers.iter().all(|worker| worker.legs().is_empty()));
    fabric.check();
}

#[tokio::test]
async fn an_older_server_is_asked_by_the_names_that_it_has() {
    let older = |manner: &mut Manner| manner.older_names = true;
    let (router, _workers, fabric) = mannered(&["prefill", "decode"], older).await;
    let got = router.get("/server_info").await;
    let info: Value = serde_json::from_str(&got.body).unwrap();
    assert_eq!(info["prefill"][0]["name"], "s0", "{info}");
    let info: Value = serde_json::from_str(&router.get("/model_info").await.body).unwrap();
    assert_eq!(info["model_path"], "m");
    fabric.check();
}
