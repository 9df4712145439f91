//! Answers that another vLLM worker goes on with.

use super::vllm::{CHAT, COMPLETIONS, fleet, tuned, words};
use super::*;
use crate::access_log::tests::Lines;
use crate::config::AccessLog;

const GREEDY: &str = r#"{"model":"theirs","prompt":"a","stream":true,"temperature":0,"max_tokens":9,"stream_options":{"include_usage":true}}"#;

#[tokio::test]
async fn a_greedy_answer_goes_on_with_another_worker() {
    for (path, body) in [
        (COMPLETIONS, GREEDY.to_owned()),
        (
            CHAT,
            GREEDY.replace(
                r#""prompt":"a""#,
                r#""messages":[{"role":"user","content":"a"}]"#,
            ),
        ),
    ] {
        let (lines, _guard) = Lines::keep("info", AccessLog::Json);
        let (router, mut workers, fabric) = fleet(&["", ""]).await;
        workers.iter().for_each(|worker| {
            worker.set(|manner| {
                manner.pause_after = Some(2);
                manner.tokens = 6;
            });
        });
        let (begun, rest) = read_until(router.send(path, &body).await, "t1").await;
        let at = workers
            .iter()
            .position(|worker| worker.open() == 1)
            .unwrap();
        workers[1 - at].set(|manner| manner.pause_after = None);
        workers[at].kill();
        let rest: Vec<Bytes> = soon("the end", rest.collect()).await;
        let all = begun + std::str::from_utf8(&rest.concat()).unwrap();
        let (text, chunks) = said(&all);
        assert_eq!(text, words(6), "{all}");
        assert!(
            all.ends_with("data: [DONE]\n\n") && !all.contains("event: error"),
            "{all}"
        );
        assert_eq!(all.matches(r#""role""#).count(), usize::from(path == CHAT));
        assert!(
            chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"]),
            "{all}"
        );
        let usage = &chunks.last().unwrap()["usage"];
        let counts = [
            &usage["prompt_tokens"],
            &usage["completion_tokens"],
            &usage["total_tokens"],
        ];
        assert_eq!(counts, [7, 6, 13], "{usage}");
        let line = lines.objects().pop().expect("a line of the log");
        let logged = ["prompt_tokens", "output_tokens"].map(|name| line[name].clone());
        assert_eq!(logged, [7, 6], "{line}");
        let second: Value = serde_json::from_str(&workers[1 - at].bodies()[0]).unwrap();
        assert_eq!(second["max_tokens"], 7);
        assert_eq!(router.metric("tasuki_resumed_answers_total"), 1.0);
        fabric.check();
    }
}

#[tokio::test]
async fn what_a_worker_cannot_go_on_with_is_not_tried() {
    let with = |field: &str| GREEDY.replace(r#""temperature":0"#, field);
    for body in [
        with(r#""temperature":0.5"#),
        with(r#""seed":1"#),
        with(r#""temperature":0,"n":2"#),
        with(r#""temperature":0,"tools":[{}]"#),
        with(r#""temperature":0,"logprobs":1"#),
        with(r#""temperature":0,"structured_outputs":{}"#),
        with(r#""temperature":0,"structural_tag":{}"#),
        with(r#""temperature":0,"add_generation_prompt":false"#),
        with(r#""temperature":0,"of_a_later_version":1"#),
    ] {
        let (router, mut workers, _) = fleet(&["", ""]).await;
        workers
            .iter()
            .for_each(|worker| worker.set(|manner| manner.pause_after = Some(2)));
        let (_, rest) = read_until(router.send(COMPLETIONS, &body).await, "t1").await;
        let at = workers
            .iter()
            .position(|worker| worker.open() == 1)
            .unwrap();
        workers[at].kill();
        let rest: Vec<Bytes> = soon("the end", rest.collect()).await;
        let rest = String::from_utf8(rest.concat()).unwrap();
        assert_eq!(rest.matches("event: error").count(), 1, "{body}: {rest}");
        assert!(workers[1 - at].legs().is_empty());
    }
}

#[tokio::test]
async fn a_chat_is_not_gone_on_with_where_templates_cut_its_text() {
    let chat = GREEDY.replace(
        r#""prompt":"a""#,
        r#""messages":[{"role":"user","content":"a"}]"#,
    );
    let completion = GREEDY.to_owned();
    for (path, body, pad, resumed) in [
        (CHAT, &chat, "\n", 0.0),
        (CHAT, &chat, "</think>", 0.0),
        (CHAT, &chat, ".", 1.0),
        (COMPLETIONS, &completion, "\n", 1.0),
    ] {
        let (router, mut workers, fabric) = fleet(&["", ""]).await;
        workers.iter().for_each(|worker| {
            worker.set(|manner| {
                manner.pause_after = Some(2);
                (manner.padding, manner.pad) = (1, pad);
            });
        });
        let (_, rest) = read_until(router.send(path, body).await, "t1").await;
        let open = workers.iter().position(|worker| worker.open() == 1);
        let at = open.unwrap();
        workers[1 - at].set(|manner| manner.pause_after = None);
        workers[at].kill();
        let rest: Vec<Bytes> = soon("the end", rest.collect()).await;
        let rest = String::from_utf8(rest.concat()).unwrap();
        assert_eq!(router.metric("tasuki_resumed_answers_total"), resumed);
        let errors = rest.matches("event: error").count();
        assert_eq!(errors, usize::from(resumed == 0.0), "{path}: {rest}");
        fabric.check();
    }
}

/// An answer that pauses after two tokens: what has come, what is to come, and its worker.
async fn begun(
    router: &Router,
    workers: &[FakeWorker],
) -> (String, futures::stream::BoxStream<'static, Bytes>, usize) {
    for worker in workers {
        worker.set(|manner| manner.pause_after = Some(2));
    }
    let (begun, rest) = read_until(router.send(COMPLETIONS, GREEDY).await, "t1").await;
    let at = busy(workers).await;
    (begun, rest, at)
}

#[tokio::test]
async fn a_stream_that_stalls_goes_on_with_another_worker() {
    let (router, workers, fabric) = tuned(&["", ""], |tuning, _| {
        tuning.liveness.stalled = Some(Duration::from_millis(200));
    })
    .await;
    let (begun, rest, at) = begun(&router, &workers).await;
    workers[1 - at].set(|manner| manner.pause_after = None);
    let rest: Vec<Bytes> = soon("the rest", rest.collect()).await;
    let all = begun + std::str::from_utf8(&rest.concat()).unwrap();
    assert_eq!(said(&all).0, words(4), "{all}");
    assert_eq!(router.metric("tasuki_resumed_answers_total"), 1.0);
    // It is well otherwise, and stays.
    router.until_up(2).await;
    until("its request ended", || workers[at].open() == 0).await;
    fabric.check();
}

#[tokio::test]
async fn an_answer_waits_for_a_worker_that_can_go_on_with_it() {
    for comes in [true, false] {
        let (router, mut workers, fabric) = tuned(&["", ""], |tuning, _| {
            tuning.machine.recover = Duration::from_secs(if comes { 60 } else { 1 });
        })
        .await;
        workers[1].set(|manner| manner.health = 503);
        router.until_up(1).await;
        workers[0].set(|manner| manner.pause_after = Some(2));
        let (begun, rest) = read_until(router.send(COMPLETIONS, GREEDY).await, "t1").await;
        workers[0].kill();
        let rest = tokio::spawn(rest.collect::<Vec<Bytes>>());
        router.until_up(0).await;
        if comes {
            workers[1].set(|manner| manner.health = 200);
        }
        let rest = soon("the end", rest).await.unwrap();
        let all = begun + std::str::from_utf8(&rest.concat()).unwrap();
        let text = if comes { words(4) } else { words(2) };
        assert_eq!(said(&all).0, text, "{all}");
        assert_eq!(all.matches("event: error").count(), usize::from(!comes));
        let resumed = router.metric("tasuki_resumed_answers_total");
        assert_eq!(resumed, f64::from(comes));
        // The answer as a whole.
        let outcome = if comes { "done" } else { "unavailable" };
        let series = format!("tasuki_requests_total{{outcome=\"{outcome}\"}}");
        let counted = || router.metric("tasuki_requests_total{");
        until("the count", || counted() == 1.0).await;
        assert_eq!(router.metric(&series), 1.0);
        let failures = router.metric("tasuki_failures_total{kind=\"device\"}");
        assert_eq!(failures, 0.0);
        fabric.check();
    }
}

#[tokio::test]
async fn an_answer_that_goes_on_is_not_turned_away() {
    // A worker that is not idle takes no new request, and none may wait.
    let (router, mut workers, fabric) = tuned(&["", ""], |tuning, _| {
        tuning.admission.tpot = Some(Duration::from_nanos(1));
        tuning.admission.max_sequences = 0;
    })
    .await;
    let (begun, rest, at) = begun(&router, &workers).await;
    let running = async |requests| {
        until("the load", || {
            router.metric("tasuki_worker_running{") == requests
        })
        .await;
    };
    running(1.0).await;
    let (_, other) = read_until(router.send(COMPLETIONS, GREEDY).await, "t1").await;
    assert_eq!(workers[1 - at].open(), 1);
    running(2.0).await;
    let refused = router.post(COMPLETIONS, GREEDY).await;
    assert_eq!(refused.status, 503, "{}", refused.body);
    workers[at].kill();
    let rest = tokio::spawn(rest.collect::<Vec<Bytes>>());
    router.until_up(1).await;
    workers[1 - at].set(|manner| manner.pause_after = None);
    let rest = soon("the rest", rest).await.unwrap();
    let all = begun + std::str::from_utf8(&rest.concat()).unwrap();
    assert_eq!(said(&all).0, words(4), "{all}");
    drop(other);
    fabric.check();
}
