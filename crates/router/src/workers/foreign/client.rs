//! Pages of workers of other engines: health, models, metrics. Legs have connections of their own,
//! see `exchange`.

use std::error::Error as _;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{Method, Request, Response, StatusCode, header};
use futures::StreamExt;
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::timeout;

/// Their servers close connections that are idle for 5 s.
pub const POOL_IDLE: Duration = Duration::from_secs(3);

/// What a worker answers at once: more is no answer of an inference server.
pub const MOST_ANSWER_BYTES: usize = 128 << 20;

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct Client(Pool<HttpConnector, Body>);

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HttpError {
    #[error("cannot connect: {0}")]
    Connect(String),
    #[error("the connection broke: {0}")]
    Broken(String),
    #[error("no answer for {0:?}")]
    Late(Duration),
    #[error("the answer has more than {0} bytes, the limit")]
    TooLarge(usize),
}

impl Client {
    pub fn new(connect: Duration) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(connect));
        let mut pool = Pool::builder(TokioExecutor::new());
        pool.pool_timer(TokioTimer::new())
            .pool_idle_timeout(POOL_IDLE);
        Self(pool.build(connector))
    }

    /// Sends a request and waits for the head of the answer. Dropping the answer's body closes
    /// the connection, by which the worker learns that the answer is not read.
    pub async fn send(&self, request: Request<Body>) -> Result<Response<Body>, HttpError> {
        let response = self.0.request(request).await.map_err(|error| {
            let cause = error.source().map_or_else(|| error.to_string(), root);
            match error.is_connect() {
                true => HttpError::Connect(cause),
                false => HttpError::Broken(cause),
            }
        })?;
        Ok(response.map(Body::new))
    }

    /// Asks for a page, for at most so long.
    pub async fn get(
        &self,
        authority: &str,
        path: &str,
        limit: Duration,
    ) -> Result<(StatusCode, Bytes), HttpError> {
        self.call(Method::GET, authority, path, limit).await
    }

    /// The same with another method, without a body.
    pub async fn call(
        &self,
        method: Method,
        authority: &str,
        path: &str,
        limit: Duration,
    ) -> Result<(StatusCode, Bytes), HttpError> {
        let request = Request::builder()
            .method(method)
            .uri(format!("http://{authority}{path}"))
            .header(header::ACCEPT, "*/*")
            .body(Body::empty())
            .map_err(|error| HttpError::Connect(error.to_string()))?;
        let answer = async {
            let (head, body) = self.send(request).await?.into_parts();
            Ok((head.status, collect(body, MOST_ANSWER_BYTES).await?))
        };
        let answer = timeout(limit, answer).await;
        answer.unwrap_or(Err(HttpError::Late(limit)))
    }

    /// The same at the first of these paths that is there.
    pub async fn call_first(
        &self,
        method: &Method,
        authority: &str,
        paths: &[&str],
        limit: Duration,
    ) -> Result<(StatusCode, Bytes), HttpError> {
        let mut last = (StatusCode::NOT_FOUND, Bytes::new());
        for path in paths {
            last = self.call(method.clone(), authority, path, limit).await?;
            if last.0 != StatusCode::NOT_FOUND {
                break;
            }
        }
        Ok(last)
    }
}

/// A whole body.
pub async fn collect(body: Body, most: usize) -> Result<Bytes, HttpError> {
    let mut all = Vec::new();
    let mut parts = body.into_data_stream();
    while let Some(part) = parts.next().await {
        let part = part.map_err(broken)?;
        if all.len() + part.len() > most {
            return Err(HttpError::TooLarge(most));
        }
        all.extend_from_slice(&part);
    }
    Ok(all.into())
}

pub fn broken(error: axum::Error) -> HttpError {
    HttpError::Broken(root(&error))
}

fn root(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
