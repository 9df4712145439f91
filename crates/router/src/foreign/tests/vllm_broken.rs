//! vLLM workers that are lost again and again, or whose errors stall.

use super::fake::{Fabric, Worker};
use super::vllm::{COMPLETIONS, fleet};
use super::vllm_worker::{routes as vllm_routes, url};
use super::*;
use crate::access_log::tests::Lines;
use crate::config::AccessLog;

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

/// A worker whose errors have a head, and the beginning of a body.
fn stalling<const STATUS: u16>(worker: Arc<Worker>) -> axum::Router {
    let answer = async || {
        let begun = futures::stream::iter([Ok::<_, std::convert::Infallible>("{")]);
        let body = Body::from_stream(begun.chain(futures::stream::pending()));
        (StatusCode::from_u16(STATUS).unwrap(), body)
    };
    axum::Router::new()
        .route(COMPLETIONS, axum::routing::post(answer))
        .fallback_service(vllm_routes(worker))
}

#[tokio::test]
async fn an_error_whose_body_stalls_is_a_failure_of_the_worker() {
    let fabric = Arc::new(Fabric::default());
    for serve in [stalling::<400>, stalling::<500>] {
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
