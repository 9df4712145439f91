//! One request and its streamed answer.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{
    ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue,
};
use hyper::{Method, Request, Response, StatusCode};
use tokio::time::{Instant, timeout};

use super::answer::Answer;
use super::body::{self, RequestOptions};
use super::chunk;
use super::failure::{Failure, quote};
use super::pool::{Pool, Sender};
use super::sse::SseReader;
use super::target::{Target, api_path};
use super::transport::Transport;
use crate::live::Counters;
use crate::plan::Planned;

/// For the end of a body whose stream has said that it is over.
const TAIL: Duration = Duration::from_secs(1);
/// So much of an error's body is read.
const ERROR_BYTES: usize = 4096;

/// Becomes true when the run is to stop.
pub type Stop = tokio::sync::watch::Receiver<bool>;

/// How requests are sent.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    pub request: RequestOptions,
    pub api_key: Option<String>,
    /// Further headers.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// For one whole answer.
    pub timeout: Duration,
}

/// A client of one server. Shared by all requests of a run.
pub struct Client {
    pool: Pool,
    path: String,
    headers: HeaderMap,
    options: ClientOptions,
    counters: Arc<Counters>,
}

/// How a stream went on.
enum Ending {
    /// `[DONE]` came.
    Done,
    /// The body ended without it.
    BodyEnd,
}

impl Client {
    /// A client that connects through `transport` and counts in `counters`.
    ///
    /// # Errors
    /// `Err` names the characters that an API key must not have.
    pub fn new(
        target: &Target,
        transport: Arc<dyn Transport>,
        options: ClientOptions,
        counters: Arc<Counters>,
    ) -> Result<Self, hyper::header::InvalidHeaderValue> {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, HeaderValue::from_str(&target.authority)?);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream"));
        if let Some(key) = &options.api_key {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}"))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        headers.extend(options.headers.iter().cloned());
        Ok(Self {
            pool: Pool::new(transport, target.address()),
            path: target.path(api_path(options.request.api)),
            headers,
            options,
            counters,
        })
    }

    /// Sends `planned`, due at `due`, and follows the answer to its end, or
    /// until `stop`.
    pub async fn ask(&self, planned: &Planned, due: Instant, mut stop: Stop) -> Answer {
        let body = body::body(&self.options.request, planned);
        let mut answer = Answer::sent(Instant::now());
        self.counters.sent();
        let exchange = self.exchange(body, due, &mut answer);
        let failure = tokio::select! {
            biased;
            ended = timeout(self.options.timeout, exchange) => match ended {
                Ok(ended) => ended.err(),
                Err(_) => Some(Failure::Timeout {
                    limit_s: self.options.timeout.as_secs_f64(),
                }),
            },
            _ = stop.wait_for(|stop| *stop) => Some(Failure::Interrupted),
        };
        self.counters.ended(failure.is_some());
        answer.ended(failure, Instant::now())
    }

    /// A GET of `path`: the status and the body.
    ///
    /// # Errors
    /// Why there was no answer.
    pub async fn get(&self, target: &Target, path: &str) -> Result<(StatusCode, Bytes), Failure> {
        let mut request = self.request(Method::GET, &target.path(path), Bytes::new());
        request.headers_mut().remove(CONTENT_TYPE);
        let (sender, response) = self.respond(request).await?;
        let status = response.status();
        let body = response.into_body().collect().await.map_err(broken)?;
        self.pool.put(sender);
        Ok((status, body.to_bytes()))
    }

    fn request(&self, method: Method, path: &str, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = path.parse().expect("the target's path is valid");
        request.headers_mut().clone_from(&self.headers);
        request
    }

    async fn exchange(
        &self,
        body: Bytes,
        due: Instant,
        answer: &mut Answer,
    ) -> Result<(), Failure> {
        let request = self.request(Method::POST, &self.path, body);
        let (sender, response) = self.respond(request).await?;
        let mut body = refuse_other_than_streams(response).await?;
        let mut stream = Following {
            due,
            counters: &self.counters,
            answer,
            finished: false,
        };
        let ending = stream.follow(&mut body).await;
        let finished = stream.finished;
        match ending {
            Ok(Ending::Done) => {
                if let Ok(None) = timeout(TAIL, body.frame()).await {
                    self.pool.put(sender);
                }
            }
            Ok(Ending::BodyEnd) if finished => self.pool.put(sender),
            Ok(Ending::BodyEnd) => {
                return Err(Failure::Truncated {
                    output_tokens: answer.usage.map_or(0, |usage| usage.completion_tokens),
                });
            }
            // Everything was there but the end of the end.
            Err(Failure::Disconnected { .. }) if finished => {}
            Err(failure) => return Err(failure),
        }
        if answer.chunks.is_empty() {
            return Err(Failure::Empty);
        }
        Ok(())
    }

    /// Sends on a kept connection, or on a new one.
    async fn respond(
        &self,
        mut request: Request<Full<Bytes>>,
    ) -> Result<(Sender, Response<Incoming>), Failure> {
        loop {
            let (mut sender, kept) = match self.pool.take() {
                Some(sender) => (sender, true),
                None => (self.pool.open().await?, false),
            };
            match sender.ready().await {
                Err(_) if kept => continue, // closed since it was last seen
                ready => ready.map_err(broken)?,
            }
            match sender.try_send_request(request).await {
                Ok(response) => return Ok((sender, response)),
                Err(mut error) => match error.take_message() {
                    // The server had closed it; nothing was sent.
                    Some(unsent) if kept => request = unsent,
                    _ => return Err(broken(error.into_error())),
                },
            }
        }
    }
}

/// A stream that is being followed.
struct Following<'a> {
    due: Instant,
    counters: &'a Counters,
    answer: &'a mut Answer,
    /// Whether there was a finish reason.
    finished: bool,
}

impl Following<'_> {
    async fn follow(&mut self, body: &mut Incoming) -> Result<Ending, Failure> {
        let mut reader = SseReader::default();
        let mut done = false;
        while let Some(frame) = body.frame().await {
            let Ok(bytes) = frame.map_err(broken)?.into_data() else {
                continue;
            };
            let at = Instant::now();
            reader.push(&bytes, |data| {
                done |= self.event(data, at)?;
                Ok(())
            })?;
            if done {
                return Ok(Ending::Done);
            }
        }
        if let Some(data) = reader.finish() {
            done = self.event(&data, Instant::now())?;
        }
        Ok(if done { Ending::Done } else { Ending::BodyEnd })
    }

    /// Whether the event is the stream's end.
    fn event(&mut self, data: &[u8], at: Instant) -> Result<bool, Failure> {
        let Some(said) = chunk::read(data)? else {
            return Ok(true);
        };
        self.finished |= said.finished;
        if let Some((chunk, gap)) = self.answer.take(said, at) {
            self.counters.chunk(chunk.tokens, at - self.due, gap);
        }
        Ok(false)
    }
}

async fn refuse_other_than_streams(response: Response<Incoming>) -> Result<Incoming, Failure> {
    let status = response.status();
    let kind = response.headers().get(CONTENT_TYPE);
    let content_type = kind.map_or(String::new(), |kind| {
        String::from_utf8_lossy(kind.as_bytes()).into_owned()
    });
    let mut body = response.into_body();
    if status == StatusCode::OK && content_type.starts_with("text/event-stream") {
        return Ok(body);
    }
    let mut beginning = Vec::new();
    while beginning.len() < ERROR_BYTES
        && let Some(Ok(frame)) = body.frame().await
    {
        beginning.extend_from_slice(frame.data_ref().map_or(&[], |data| data.as_ref()));
    }
    let body = quote(&beginning);
    Err(if status == StatusCode::OK {
        Failure::NotAStream { content_type, body }
    } else {
        let status = status.as_u16();
        Failure::Status { status, body }
    })
}

fn broken(error: hyper::Error) -> Failure {
    // hyper's own words say what was going on, the source says why it ended.
    let source = std::error::Error::source(&error).map(|source| format!(": {source}"));
    Failure::Disconnected {
        reason: format!("{error}{}", source.unwrap_or_default()),
    }
}
