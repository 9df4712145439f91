//! A leg's request and its answer, on a connection that is kept for the next one.
//!
//! A general client hands every chunk of a body from its connection's task to the leg's, which
//! costs more than the chunk does: here the leg reads the connection, as much as there is.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderValue, StatusCode};
use tasuki_http1::{Connection, Head};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::client::{HttpError, POOL_IDLE};

/// Read at a time: some thirty tokens. Each connection has a buffer of this size.
const READ_BYTES: usize = 8 << 10;

/// The connections to one worker.
pub struct Connections {
    /// HOST:PORT.
    authority: String,
    /// For a new connection.
    limit: Duration,
    idle: Mutex<Vec<(Connection, Instant)>>,
}

/// An answer whose head is there. Dropped before its end, its connection closes, by which the
/// worker learns that the answer is not read.
pub struct Exchange<'a> {
    from: &'a Connections,
    /// Until the body is over.
    connection: Option<Connection>,
    head: Head,
}

impl Connections {
    pub fn new(authority: String, limit: Duration) -> Self {
        Self {
            authority,
            limit,
            idle: Mutex::default(),
        }
    }

    /// Sends a request, head and body, and waits for the head of the answer.
    ///
    /// # Errors
    /// [`HttpError::Connect`]: nothing was sent. [`HttpError::Broken`]: there is no head.
    pub async fn ask(&self, request: &[u8]) -> Result<Exchange<'_>, HttpError> {
        if let Some(mut kept) = self.take() {
            match kept.ask(request).await {
                Ok(Some(head)) => return Ok(self.exchange(kept, head)),
                // The worker has closed it meanwhile, as it may.
                Ok(None) => {}
                Err(error) if is_closed(&error) => {}
                Err(error) => return Err(broken(&error)),
            }
        }
        let mut new = self.open().await?;
        match new.ask(request).await {
            Ok(Some(head)) => Ok(self.exchange(new, head)),
            Ok(None) => Err(HttpError::Broken("closed without an answer".to_owned())),
            Err(error) => Err(broken(&error)),
        }
    }

    fn exchange(&self, connection: Connection, head: Head) -> Exchange<'_> {
        Exchange {
            from: self,
            connection: Some(connection),
            head,
        }
    }

    async fn open(&self) -> Result<Connection, HttpError> {
        let connecting = timeout(self.limit, TcpStream::connect(&self.authority));
        let stream = match connecting.await {
            Ok(connected) => connected.and_then(|stream| {
                stream.set_nodelay(true)?;
                Ok(stream)
            }),
            Err(_) => return Err(HttpError::Connect(format!("nothing for {:?}", self.limit))),
        };
        let stream = stream.map_err(|error| HttpError::Connect(error.to_string()))?;
        Ok(Connection::new(Box::new(stream), READ_BYTES))
    }

    /// The one that was used last, if it is still open.
    fn take(&self) -> Option<Connection> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((mut connection, since)) = idle.pop() {
            if since.elapsed() >= POOL_IDLE {
                idle.clear(); // those below are older
                return None;
            }
            if connection.is_quiet() {
                return Some(connection);
            }
        }
        None
    }

    fn keep(&self, connection: Connection) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.push((connection, Instant::now()));
    }

    /// Closes those that nobody has used for as long as a worker may take to close them itself.
    pub fn close_idle(&self, now: Instant) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let old = idle.partition_point(|(_, since)| now.duration_since(*since) >= POOL_IDLE);
        idle.drain(..old); // the oldest come first
    }
}

impl Exchange<'_> {
    pub fn status(&self) -> StatusCode {
        StatusCode::from_u16(self.head.status).unwrap_or(StatusCode::BAD_GATEWAY)
    }

    /// How its body is compressed; `None`: not at all.
    pub fn coding(&self) -> Option<&str> {
        let coding = self.head.content_encoding.trim();
        (!coding.is_empty() && !coding.eq_ignore_ascii_case("identity")).then_some(coding)
    }

    pub fn content_type(&self) -> Option<HeaderValue> {
        let named = Some(&self.head.content_type).filter(|named| !named.is_empty());
        named.and_then(|named| HeaderValue::from_str(named).ok())
    }

    /// Waits for more of the body and adds it to `into`; false at the end. May be dropped and
    /// called again.
    ///
    /// # Errors
    /// [`HttpError::Broken`]: the body has no end.
    pub async fn read(&mut self, into: &mut Vec<u8>) -> Result<bool, HttpError> {
        let before = into.len();
        while let Some(connection) = &mut self.connection {
            let take = |piece: &[u8]| {
                into.extend_from_slice(piece);
                Ok::<_, io::Error>(())
            };
            let read = connection.body(&mut self.head, take).await;
            read.map_err(|error| broken(&error))?;
            if self.head.is_over()
                && let Some(connection) = self.connection.take()
                && self.head.keeps_alive
            {
                self.from.keep(connection);
            }
            if into.len() > before {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether there may be more of the body without waiting.
    pub fn may_have_more(&self) -> bool {
        self.connection
            .as_ref()
            .is_some_and(Connection::may_have_more)
    }

    /// The whole body.
    ///
    /// # Errors
    /// [`HttpError::Broken`], or [`HttpError::TooLarge`].
    pub async fn whole(mut self, most: usize) -> Result<Bytes, HttpError> {
        let mut all = Vec::new();
        while self.read(&mut all).await? {
            if all.len() > most {
                return Err(HttpError::TooLarge(most));
            }
        }
        Ok(all.into())
    }
}

/// Whether the worker had closed the connection before it got the request.
fn is_closed(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}

fn broken(error: &io::Error) -> HttpError {
    HttpError::Broken(error.to_string())
}

#[cfg(test)]
pub mod testing {
    use tokio::io::{AsyncWriteExt, DuplexStream, duplex};

    use super::*;

    /// An answer with further header lines, whose body is what is written to the stream.
    pub async fn answer<'a>(from: &'a Connections, lines: &str) -> (Exchange<'a>, DuplexStream) {
        let (ours, mut theirs) = duplex(1 << 20);
        let head = format!("HTTP/1.1 200 OK\r\n{lines}\r\n");
        theirs.write_all(head.as_bytes()).await.unwrap();
        let mut connection = Connection::new(Box::new(ours), READ_BYTES);
        let head = connection.ask(b"").await.unwrap().unwrap();
        (from.exchange(connection, head), theirs)
    }

    pub fn connections() -> Connections {
        Connections::new(String::new(), Duration::from_secs(1))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);
    const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

    async fn listening() -> (TcpListener, Connections) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let authority = listener.local_addr().unwrap().to_string();
        (listener, Connections::new(authority, LONG))
    }

    async fn asked(connections: &Connections) -> Result<Bytes, HttpError> {
        let asking = async { connections.ask(b"ask").await?.whole(9).await };
        timeout(LONG, asking).await.expect("in time")
    }

    /// Answers one request.
    async fn serve(stream: &mut TcpStream) {
        stream.read_exact(&mut [0; 3]).await.unwrap();
        stream.write_all(ANSWER).await.unwrap();
    }

    #[tokio::test]
    async fn a_connection_serves_again_until_the_worker_closes_it() {
        let (listener, connections) = listening().await;
        let worker = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            serve(&mut stream).await;
            serve(&mut stream).await;
            drop(stream);
            let (mut stream, _) = listener.accept().await.unwrap();
            serve(&mut stream).await;
        };
        let client = async {
            for _ in 0..3 {
                assert_eq!(asked(&connections).await, Ok(Bytes::from("ok")));
            }
        };
        tokio::join!(worker, client);
    }

    #[tokio::test]
    async fn a_new_connection_without_an_answer_is_an_error() {
        let (listener, connections) = listening().await;
        let worker = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.read_exact(&mut [0; 3]).await.unwrap();
        };
        let (_, answer) = tokio::join!(worker, asked(&connections));
        assert!(matches!(answer, Err(HttpError::Broken(_))), "{answer:?}");
        drop(listener);
        let answer = asked(&connections).await;
        assert!(matches!(answer, Err(HttpError::Connect(_))), "{answer:?}");
    }

    #[tokio::test]
    async fn what_nobody_uses_is_closed() {
        let (listener, connections) = listening().await;
        let worker = async {
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().await.unwrap();
                serve(&mut stream).await;
                tokio::spawn(async move { stream.read(&mut [0; 1]).await });
            }
        };
        let both = async { tokio::join!(asked(&connections), asked(&connections)) };
        let (_, (one, other)) = tokio::join!(worker, both);
        assert!(one.is_ok() && other.is_ok());
        let kept = || {
            let idle = connections.idle.lock().unwrap();
            idle.iter().map(|(_, since)| *since).collect::<Vec<_>>()
        };
        connections.close_idle(Instant::now());
        let [first, last] = kept()[..] else {
            panic!("two");
        };
        assert!(first < last);
        connections.close_idle(first + POOL_IDLE);
        assert_eq!(kept(), [last]);
        connections.close_idle(last + POOL_IDLE);
        assert_eq!(kept(), []);
    }

    #[tokio::test]
    async fn a_body_has_a_most() {
        let (listener, connections) = listening().await;
        let worker = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            serve(&mut stream).await;
            stream
        };
        let client = async { connections.ask(b"ask").await?.whole(1).await };
        let (_stream, answer) = tokio::join!(worker, client);
        assert_eq!(answer, Err(HttpError::TooLarge(1)));
    }
}
