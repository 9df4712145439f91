//! Whole requests through the router to workers of other engines, real HTTP on both sides of
//! it.

mod connection;
mod engines;
mod fake;
mod fake_answer;
mod sglang;
mod sglang_adapters;
mod sglang_faults;
mod sglang_ranks;
mod sglang_worker;
#[cfg(feature = "otel")]
mod traces;
mod vllm;
mod vllm_broken;
mod vllm_context;
mod vllm_faults;
mod vllm_resumed;
mod vllm_worker;

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Request, StatusCode};
use futures::StreamExt;
use serde_json::Value;
use tower::ServiceExt;

use self::fake::FakeWorker;
use crate::app::{App, HttpSettings};
use crate::discovery::StaticList;
use crate::models::Models;
use crate::routes::routes;
use crate::serve::{Config, Service, Tuning};
use crate::testing::settings;
use crate::workers::Liveness;
use crate::workers::testing::{soon, until};

/// A router in front of workers that have joined.
pub struct Router {
    pub service: Service,
    pub app: Arc<App>,
}

/// An answer, read to its end.
#[derive(Debug)]
pub struct Got {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: String,
}

impl Router {
    /// Waits until all workers are up.
    pub async fn start(urls: &[String]) -> Self {
        Self::tuned(urls, Models::new(Vec::new()), |_, _| {}).await
    }

    pub async fn tuned(
        urls: &[String],
        models: Models,
        tune: impl FnOnce(&mut Tuning, &mut HttpSettings),
    ) -> Self {
        let mut tuning = Tuning::from(&Config::default());
        tuning.liveness = Liveness {
            suspect_after: Duration::from_millis(200),
            lost_after: Duration::from_secs(2),
            ping_timeout: Duration::from_millis(500),
            ..Liveness::default()
        };
        let mut http = HttpSettings {
            max_concurrent_requests: 64,
            ..settings()
        };
        tune(&mut tuning, &mut http);
        let names = models.named().map(|(name, _)| vec![name.clone()]).collect();
        let list = Box::new(StaticList(urls.to_vec()));
        let service = Service::start_tuned(names, vec![list], tuning);
        let app = Arc::new(App::new(Arc::new(service.clone()), models, http));
        let router = Self { service, app };
        router.until_up(urls.len()).await;
        router
    }

    pub async fn until_up(&self, workers: usize) {
        until("all workers", || {
            self.metric("tasuki_worker_up{") == workers as f64
        })
        .await;
    }

    /// The sum of the series that begin so.
    pub fn metric(&self, beginning: &str) -> f64 {
        let text = self.service.metrics_text();
        let lines = text.lines().filter(|line| line.starts_with(beginning));
        let values = lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok());
        values.sum()
    }

    pub async fn send(&self, path: &str, body: &str) -> axum::response::Response {
        self.send_with(path, body, &[]).await
    }

    pub async fn send_with(
        &self,
        path: &str,
        body: &str,
        headers: &[(&str, &str)],
    ) -> axum::response::Response {
        let mut request = Request::post(path).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::from(body.to_owned())).unwrap();
        let response = connection::answer(routes(Arc::clone(&self.app)), request);
        soon("the head of an answer", response).await
    }

    pub async fn post(&self, path: &str, body: &str) -> Got {
        read(self.send(path, body).await).await
    }

    pub async fn get(&self, path: &str) -> Got {
        let request = Request::get(path).body(Body::empty()).unwrap();
        read(
            routes(Arc::clone(&self.app))
                .oneshot(request)
                .await
                .unwrap(),
        )
        .await
    }
}

pub async fn read(response: axum::response::Response) -> Got {
    let (head, body) = response.into_parts();
    let body = soon("the answer's end", axum::body::to_bytes(body, usize::MAX)).await;
    Got {
        status: head.status,
        headers: head.headers,
        body: String::from_utf8(body.unwrap().to_vec()).unwrap(),
    }
}

/// Reads an answer until it contains a text, and gives back the rest of its body.
pub async fn read_until(
    response: axum::response::Response,
    text: &str,
) -> (String, futures::stream::BoxStream<'static, Bytes>) {
    let mut parts = response
        .into_body()
        .into_data_stream()
        .map(Result::unwrap)
        .boxed();
    let mut read = String::new();
    while !read.contains(text) {
        let part = soon(text, parts.next()).await.expect("more");
        read.push_str(std::str::from_utf8(&part).unwrap());
    }
    (read, parts)
}

/// Waits until one of the workers has a request, and says which.
pub async fn busy(workers: &[FakeWorker]) -> usize {
    let has_one = |worker: &FakeWorker| worker.open() > 0;
    until("a request at a worker", || workers.iter().any(has_one)).await;
    let at = workers.iter().position(has_one);
    at.expect("it still has it")
}

/// The text of a streamed answer, and its chunks.
pub fn said(stream: &str) -> (String, Vec<Value>) {
    let data = stream
        .lines()
        .filter_map(|line| line.strip_prefix("data: "));
    let chunks: Vec<Value> = data
        .filter(|data| *data != "[DONE]")
        .map(|data| serde_json::from_str(data).expect(data))
        .collect();
    let text = chunks.iter().filter_map(|chunk| {
        let choice = &chunk["choices"][0];
        choice["delta"]["content"]
            .as_str()
            .or(choice["text"].as_str())
    });
    (text.collect(), chunks)
}
