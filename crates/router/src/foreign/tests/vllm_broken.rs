//! vLLM workers that are lost again and again.

use super::vllm::fleet;
use super::vllm_worker::routes as vllm_routes;
use super::*;
use crate::access_log::tests::Lines;
use crate::config::AccessLog;

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
