//! HTTP/1.1 as a client of event streams needs it: a request in one write, and
//! an answer that is decoded where it lies, a whole read at a time.
//!
//! A general client hands every chunk of a body from task to task, which costs
//! more than reading the chunk's JSON. The load generator shares the machine with
//! what it measures, and the router passes every token of other engines' workers on.

use std::io;

use bytes::{Buf, BytesMut};
use futures::FutureExt;
use httparse::{EMPTY_HEADER, Status, parse_chunk_size};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

const MAX_HEADERS: usize = 100;
const MAX_HEAD_BYTES: usize = 256 << 10;

/// A connection's two directions.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// One connection, between two answers or within one.
pub struct Connection {
    io: Box<dyn Io>,
    /// Received and not yet decoded.
    buffer: BytesMut,
    read_bytes: usize,
}

/// The beginning of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    pub status: u16,
    /// As it was written; empty: it has none.
    pub content_type: String,
    /// The connection may carry another request after this answer.
    pub keeps_alive: bool,
    framing: Framing,
}

/// Where a body ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Framing {
    /// After so many bytes more.
    Length(u64),
    Chunked(Chunked),
    UntilClosed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chunked {
    /// A line with a chunk's size comes next.
    Size,
    /// So many bytes of a chunk are left.
    Data(u64),
    /// The line end after a chunk's data.
    DataEnd,
    /// Lines after the last chunk, up to an empty one.
    Trailer,
    End,
}

impl Connection {
    /// `read_bytes`: what is read at once at most.
    pub fn new(io: Box<dyn Io>, read_bytes: usize) -> Self {
        Self {
            io,
            buffer: BytesMut::with_capacity(read_bytes),
            read_bytes,
        }
    }

    /// Whether the server has neither closed the connection nor sent anything, as far as is
    /// known now. For one that is kept: anything else says that it is of no use.
    pub fn is_quiet(&mut self) -> bool {
        self.buffer.is_empty() && self.read().now_or_never().is_none()
    }

    /// Sends a whole request and waits for the answer's head. None: the server
    /// closed the connection without a word, as it may with one it has kept.
    ///
    /// # Errors
    /// What broke.
    pub async fn ask(&mut self, request: &[u8]) -> io::Result<Option<Head>> {
        let sent = async {
            self.io.write_all(request).await?;
            self.io.flush().await
        };
        // A server that refuses a request may not read the rest of it.
        let sent = sent.await;
        loop {
            if let Some(head) = self.head()? {
                return Ok(Some(head));
            }
            if self.read().await? == 0 {
                sent?;
                return match self.buffer.is_empty() {
                    true => Ok(None),
                    false => Err(closed("in the head of its answer")),
                };
            }
        }
    }

    /// Waits for more of the body and calls `take` with its pieces, in place;
    /// false when the body is over. `head` keeps where the body stands.
    ///
    /// # Errors
    /// What broke, and what `take` says.
    pub async fn body<E: From<io::Error>>(
        &mut self,
        head: &mut Head,
        mut take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        if head.framing.is_over() {
            return Ok(false);
        }
        if self.buffer.is_empty() && self.read().await? == 0 {
            if head.framing != Framing::UntilClosed {
                return Err(closed("in the middle of its answer").into());
            }
            head.framing = Framing::Length(0);
            return Ok(false);
        }
        let before = self.buffer.len();
        while let Some(piece) = head.framing.piece(&mut self.buffer)? {
            take(&self.buffer[..piece])?;
            self.buffer.advance(piece);
        }
        // Only the beginning of a line is there: it needs more to be of use.
        if self.buffer.len() == before && !head.framing.is_over() && self.read().await? == 0 {
            return Err(closed("in the middle of its answer").into());
        }
        Ok(true)
    }

    async fn read(&mut self) -> io::Result<usize> {
        self.buffer.reserve(self.read_bytes);
        self.io.read_buf(&mut self.buffer).await
    }

    /// The head, once it is there as a whole; informational ones are skipped.
    fn head(&mut self) -> io::Result<Option<Head>> {
        loop {
            let mut headers = [EMPTY_HEADER; MAX_HEADERS];
            let mut response = httparse::Response::new(&mut headers);
            match response.parse(&self.buffer).map_err(io::Error::other)? {
                Status::Partial if self.buffer.len() > MAX_HEAD_BYTES => {
                    return Err(io::Error::other("the head of its answer has no end"));
                }
                Status::Partial => return Ok(None),
                Status::Complete(length) => {
                    let head = Head::new(&response);
                    self.buffer.advance(length);
                    if head.status >= 200 {
                        return Ok(Some(head));
                    }
                }
            }
        }
    }
}

fn closed(when: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::UnexpectedEof,
        format!("the server closed the connection {when}"),
    )
}

impl Head {
    fn new(response: &httparse::Response<'_, '_>) -> Self {
        let value = |name: &str| {
            let mut headers = response.headers.iter();
            let header = headers.find(|header| header.name.eq_ignore_ascii_case(name))?;
            Some(String::from_utf8_lossy(header.value).into_owned())
        };
        let word = |name| value(name).map(|value| value.to_ascii_lowercase());
        let connection = word("connection").unwrap_or_default();
        let status = response.code.unwrap_or_default();
        let length = value("content-length").and_then(|length| length.trim().parse().ok());
        let chunked = word("transfer-encoding").is_some_and(|how| how.contains("chunked"));
        let framing = match length {
            _ if status == 204 || status == 304 => Framing::Length(0),
            _ if chunked => Framing::Chunked(Chunked::Size),
            Some(length) => Framing::Length(length),
            None => Framing::UntilClosed,
        };
        let keeps_alive = match response.version {
            Some(1) => !connection.contains("close"),
            _ => connection.contains("keep-alive"),
        };
        Self {
            status,
            content_type: value("content-type").unwrap_or_default(),
            keeps_alive: keeps_alive && framing != Framing::UntilClosed,
            framing,
        }
    }

    /// Whether the whole body was taken.
    pub fn is_over(&self) -> bool {
        self.framing.is_over()
    }
}

impl Framing {
    fn is_over(self) -> bool {
        matches!(self, Self::Length(0) | Self::Chunked(Chunked::End))
    }

    /// How many bytes of body lie at the beginning of `buffer`, once what is
    /// not body before them is gone. None: there is no more of it.
    fn piece(&mut self, buffer: &mut BytesMut) -> io::Result<Option<usize>> {
        let length = match self {
            Self::UntilClosed => buffer.len(),
            Self::Length(left) => take_up_to(left, buffer),
            Self::Chunked(chunked) => chunked.piece(buffer)?,
        };
        Ok((length > 0).then_some(length))
    }
}

impl Chunked {
    fn piece(&mut self, buffer: &mut BytesMut) -> io::Result<usize> {
        loop {
            match self {
                Self::Data(0) => *self = Self::DataEnd,
                Self::Data(left) => return Ok(take_up_to(left, buffer)),
                Self::DataEnd if buffer.len() < 2 => return Ok(0),
                Self::DataEnd => {
                    if !buffer.starts_with(b"\r\n") {
                        return Err(io::Error::other("a chunk is longer than its size says"));
                    }
                    buffer.advance(2);
                    *self = Self::Size;
                }
                Self::Size => match parse_chunk_size(buffer) {
                    Ok(Status::Complete((length, size))) => {
                        buffer.advance(length);
                        *self = if size == 0 {
                            Self::Trailer
                        } else {
                            Self::Data(size)
                        };
                    }
                    Ok(Status::Partial) => return Ok(0),
                    Err(_) => return Err(io::Error::other("a chunk has no size")),
                },
                Self::Trailer => {
                    let Some(end) = memchr::memchr(b'\n', buffer) else {
                        return Ok(0);
                    };
                    let is_empty = buffer[..end].trim_ascii().is_empty();
                    buffer.advance(end + 1);
                    if is_empty {
                        *self = Self::End;
                    }
                }
                Self::End => return Ok(0),
            }
        }
    }
}

/// As much of `left` as is there.
fn take_up_to(left: &mut u64, buffer: &BytesMut) -> usize {
    let length = (buffer.len() as u64).min(*left);
    *left -= length;
    length as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a client makes of `answer`, received `step` bytes at a time.
    async fn received(answer: &[u8], step: usize) -> io::Result<(Head, String)> {
        let (ours, mut theirs) = tokio::io::duplex(step);
        let answer = answer.to_vec();
        tokio::spawn(async move {
            let mut request = [0; 3];
            theirs.read_exact(&mut request).await.unwrap();
            let _ = theirs.write_all(&answer).await;
        });
        let mut connection = Connection::new(Box::new(ours), 64);
        let mut head = connection
            .ask(b"ask")
            .await?
            .ok_or_else(|| closed("at once"))?;
        let mut body = Vec::new();
        while connection
            .body(&mut head, |piece| {
                body.extend_from_slice(piece);
                Ok::<(), io::Error>(())
            })
            .await?
        {}
        Ok((head, String::from_utf8(body).unwrap()))
    }

    #[tokio::test]
    async fn bodies_are_whole_however_they_are_framed_and_cut() {
        for (answer, keeps_alive) in [
            (
                "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nall of it",
                true,
            ),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n\
                 4\r\nall \r\n5;x=1\r\nof it\r\n0\r\nTrailer: x\r\n\r\n",
                false,
            ),
            (
                "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\nall of it",
                false,
            ),
            (
                "HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nall of it",
                false,
            ),
        ] {
            for step in [1, 2, 3, 7, 1000] {
                let (head, body) = received(answer.as_bytes(), step).await.unwrap();
                assert_eq!(
                    (head.status, body.as_str()),
                    (200, "all of it"),
                    "{answer} by {step}"
                );
                assert_eq!(head.keeps_alive, keeps_alive, "{answer}");
            }
        }
        let (head, body) = received(b"HTTP/1.1 204 None\r\n\r\n", 9).await.unwrap();
        assert_eq!((head.status, body.as_str()), (204, ""));
    }

    #[tokio::test]
    async fn a_closed_connection_is_not_quiet_and_an_early_answer_counts() {
        let (ours, mut theirs) = tokio::io::duplex(100);
        let mut connection = Connection::new(Box::new(ours), 64);
        assert!(connection.is_quiet());
        let refusal = b"HTTP/1.1 413 Too large\r\nContent-Length: 0\r\n\r\n";
        theirs.write_all(refusal).await.unwrap();
        drop(theirs);
        let head = connection.ask(&[b'x'; 1000]).await.unwrap();
        assert_eq!(head.map(|head| head.status), Some(413));
        assert!(!connection.is_quiet());
    }

    #[tokio::test]
    async fn what_is_cut_off_or_no_http_is_an_error() {
        for (answer, says) in [
            ("", "at once"),
            ("HTTP/1.1 200", "in the head"),
            (
                "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nall",
                "in the middle",
            ),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nal",
                "in the middle",
            ),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nall \r\n",
                "in the middle",
            ),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nall \r\n",
                "longer",
            ),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
                "no size",
            ),
            ("SSH-2.0-OpenSSH_9.9\r\n", "invalid"),
        ] {
            for step in [1, 1000] {
                let error = received(answer.as_bytes(), step)
                    .await
                    .unwrap_err()
                    .to_string();
                assert!(error.contains(says), "{answer:?} by {step}: {error}");
            }
        }
    }
}
