//! What becomes of requests when SGLang workers fail.

use super::sglang::fleet;

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
