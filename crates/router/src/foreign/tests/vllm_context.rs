//! Split vLLM workers and requests beyond their context, which is 8192 tokens.

use super::fake::FakeWorker;
use super::vllm::{CHAT, COMPLETIONS, fleet};
use super::*;

#[tokio::test]
async fn a_limit_beyond_the_context_is_not_prefilled() {
    let (router, workers, fabric) = fleet(&["prefill", "decode"]).await;
    for (path, fields) in [
        (CHAT, r#""messages":[],"max_tokens":8193"#),
        (CHAT, r#""messages":[],"max_completion_tokens":10000"#),
        (COMPLETIONS, r#""prompt":"a","max_tokens":8193"#),
    ] {
        let body = format!(r#"{{"model":"theirs",{fields}}}"#);
        let got = router.post(path, &body).await;
        assert_eq!(got.status, 400, "{fields}: {}", got.body);
        assert!(got.body.contains("maximum context length"), "{}", got.body);
    }
    let legs = || workers.iter().flat_map(FakeWorker::legs);
    assert_eq!(legs().collect::<Vec<_>>(), ["whole"; 3]);
    // vLLM shortens the limit of what fits without it: that is split.
    let fits = r#"{"model":"theirs","prompt":[1,2,3],"max_tokens":8192}"#;
    assert_eq!(router.post(COMPLETIONS, fits).await.status, 200);
    assert!(legs().any(|leg| leg == "prefill"));
    fabric.check();
}

#[tokio::test]
async fn kv_is_released_where_decode_refuses_what_prefill_took() {
    let (router, workers, fabric) = fleet(&["prefill", "decode"]).await;
    for stream in [false, true] {
        let fields = r#""model":"theirs","messages":[],"max_tokens":8,"min_tokens":9"#;
        let body = format!(r#"{{{fields},"stream":{stream}}}"#);
        let got = router.post(CHAT, &body).await;
        assert_eq!(got.status, 400, "{}", got.body);
        assert!(got.body.contains("min_tokens"), "{}", got.body);
    }
    until("all KV was pulled", || {
        let tickets = fabric.tickets.lock().unwrap();
        tickets.len() == 2 && tickets.values().all(|ticket| ticket.used)
    })
    .await;
    assert_eq!(workers[0].legs(), ["prefill"; 2]);
    assert_eq!(workers[1].legs(), ["decode"; 4]);
    fabric.check();
}
