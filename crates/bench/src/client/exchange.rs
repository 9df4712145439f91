//! One request and its streamed answer.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::header::{HeaderName, HeaderValue, InvalidHeaderValue};
use tasuki_http1::{Connection, Head};
use tokio::time::{Instant, timeout};

use super::answer::Answer;
use super::body::{self, RequestOptions};
use super::chunk;
use super::failure::{Failure, quote};
use super::pool::Pool;
use super::sse::SseReader;
use super::target::{Target, api_path};
use super::transport::Transport;
use crate::live::Counters;
use crate::plan::Planned;

/// For the end of a body whose stream has said that it is over.
const TAIL: Duration = Duration::from_secs(1);
/// So much of an error's body is read.
const ERROR_BYTES: usize = 4096;

/// A request on a kept connection that breaks later than this was dropped by the server, and is not
/// sent again: longer than a round trip.
const CROSSING: Duration = Duration::from_millis(300);

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
    /// Of a request for an answer, up to the length of its body.
    post: String,
    /// Header lines of every request.
    headers: String,
    target: Target,
    options: ClientOptions,
    counters: Arc<Counters>,
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
    ) -> Result<Self, InvalidHeaderValue> {
        // Without it a server may compress an answer.
        let mut headers = format!(
            "host: {}\r\naccept-encoding: identity\r\n",
            target.authority
        );
        if let Some(key) = &options.api_key {
            let value = HeaderValue::from_str(&format!("Bearer {key}"))?;
            headers += &line("authorization", &value);
        }
        for (name, value) in &options.headers {
            headers += &line(name.as_str(), value);
        }
        let path = target.path(api_path(options.request.api));
        Ok(Self {
            pool: Pool::new(transport, target.address()),
            post: format!(
                "POST {path} HTTP/1.1\r\n{headers}content-type: application/json\r\n\
                 accept: text/event-stream\r\ncontent-length: "
            ),
            headers,
            target: target.clone(),
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
    pub async fn get(&self, path: &str) -> Result<(u16, Vec<u8>), Failure> {
        let path = self.target.path(path);
        let request = format!("GET {path} HTTP/1.1\r\n{}\r\n", self.headers);
        let (mut connection, mut head) = self.respond(request.as_bytes()).await?;
        let body = read_up_to(&mut connection, &mut head, usize::MAX).await?;
        self.keep(connection, &head);
        Ok((head.status, body))
    }

    async fn exchange(
        &self,
        body: Bytes,
        due: Instant,
        answer: &mut Answer,
    ) -> Result<(), Failure> {
        let mut request = Vec::with_capacity(self.post.len() + body.len() + 24);
        request.extend_from_slice(self.post.as_bytes());
        request.extend_from_slice(format!("{}\r\n\r\n", body.len()).as_bytes());
        request.extend_from_slice(&body);
        let (mut connection, mut head) = self.respond(&request).await?;
        refuse_other_than_streams(&mut connection, &mut head).await?;
        let mut stream = Following {
            due,
            counters: &self.counters,
            answer,
            reader: SseReader::default(),
            finished: false,
            done: false,
        };
        let followed = stream.follow(&mut connection, &mut head).await;
        let (finished, done) = (stream.finished, stream.done);
        match followed {
            // Everything was there but the end of the end.
            Err(Failure::Disconnected { .. }) if finished => {}
            Err(failure) => return Err(failure),
            Ok(()) if !finished && !done => {
                return Err(Failure::Truncated {
                    output_tokens: answer.usage.map_or(0, |usage| usage.completion_tokens),
                });
            }
            Ok(()) => {
                let rest = read_up_to(&mut connection, &mut head, ERROR_BYTES);
                if let Ok(Ok(_)) = timeout(TAIL, rest).await {
                    self.keep(connection, &head);
                }
            }
        }
        if answer.chunks.is_empty() {
            return Err(Failure::Empty);
        }
        Ok(())
    }

    fn keep(&self, connection: Connection, head: &Head) {
        if head.keeps_alive && head.is_over() {
            self.pool.put(connection);
        }
    }

    /// Sends on a kept connection, or on a new one.
    async fn respond(&self, request: &[u8]) -> Result<(Connection, Head), Failure> {
        while let Some(mut connection) = self.pool.take() {
            if !connection.is_quiet() {
                continue; // the server has closed it
            }
            let sent = Instant::now();
            match answered(connection.ask(request).await) {
                Ok(head) => return Ok((connection, head)),
                // Closed while it was idle: the request and that crossed on their way.
                Err(_) if sent.elapsed() < CROSSING => {}
                Err(failure) => return Err(failure),
            }
        }
        let mut connection = self.pool.open().await?;
        let head = answered(connection.ask(request).await)?;
        Ok((connection, head))
    }
}

/// A stream that is being followed.
struct Following<'a> {
    due: Instant,
    counters: &'a Counters,
    answer: &'a mut Answer,
    reader: SseReader,
    /// Whether there was a finish reason.
    finished: bool,
    /// Whether there was `[DONE]`.
    done: bool,
}

impl Following<'_> {
    /// Follows it to `[DONE]`, or to the end of the body.
    async fn follow(
        &mut self,
        connection: &mut Connection,
        head: &mut Head,
    ) -> Result<(), Failure> {
        let mut more = true;
        while more && !self.done {
            let mut read_at = None;
            let take = |piece: &[u8]| {
                let at = *read_at.get_or_insert_with(Instant::now);
                let mut reader = std::mem::take(&mut self.reader);
                let taken = reader.push(piece, |data| self.event(data, at));
                self.reader = reader;
                taken
            };
            more = connection.body(head, take).await?;
        }
        match self.reader.finish() {
            Some(data) if !self.done => self.event(&data, Instant::now()),
            _ => Ok(()),
        }
    }

    fn event(&mut self, data: &[u8], at: Instant) -> Result<(), Failure> {
        let Some(said) = chunk::read(data)? else {
            self.done = true;
            return Ok(());
        };
        self.finished |= said.finished;
        if let Some((chunk, gap)) = self.answer.take(said, at) {
            self.counters.chunk(chunk.tokens, at - self.due, gap);
        }
        Ok(())
    }
}

async fn refuse_other_than_streams(
    connection: &mut Connection,
    head: &mut Head,
) -> Result<(), Failure> {
    let kind = head.content_type.to_ascii_lowercase();
    if head.status == 200 && kind.starts_with("text/event-stream") {
        return match head.content_encoding.trim() {
            "" | "identity" => Ok(()),
            coding => Err(Failure::Encoded {
                coding: coding.to_owned(),
            }),
        };
    }
    let beginning = read_up_to(connection, head, ERROR_BYTES).await;
    let body = quote(&beginning.unwrap_or_default());
    Err(match head.status {
        200 => Failure::NotAStream {
            content_type: head.content_type.clone(),
            body,
        },
        status => Failure::Status { status, body },
    })
}

/// The rest of a body, or at least its first `limit` bytes.
async fn read_up_to(
    connection: &mut Connection,
    head: &mut Head,
    limit: usize,
) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let mut more = true;
    while more && bytes.len() < limit {
        let take = |piece: &[u8]| {
            bytes.extend_from_slice(piece);
            Ok::<(), Failure>(())
        };
        more = connection.body(head, take).await?;
    }
    Ok(bytes)
}

fn answered(head: io::Result<Option<Head>>) -> Result<Head, Failure> {
    head?.ok_or_else(|| Failure::Disconnected {
        reason: "the server closed the connection without an answer".to_owned(),
    })
}

fn line(name: &str, value: &HeaderValue) -> String {
    format!("{name}: {}\r\n", String::from_utf8_lossy(value.as_bytes()))
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Disconnected {
            reason: error.to_string(),
        }
    }
}
