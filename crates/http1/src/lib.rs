//! HTTP/1.1 as a client of event streams needs it: a request in one write, and
//! an answer that is decoded where it lies, a whole read at a time.
//!
//! A general client hands every chunk of a body from task to task, which costs
//! more than reading the chunk's JSON. The load generator shares the machine with
//! what it measures, and the router passes every token of other engines' workers on.

#[cfg(test)]
mod fuzz_tests;
mod head;
#[cfg(test)]
mod tests;

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use futures::FutureExt;
use httparse::{EMPTY_HEADER, Status};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};

use self::head::Framing;
pub use self::head::Head;

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
    /// So many bytes of it are known to be no whole head.
    incomplete: usize,
    #[cfg(test)]
    parses: usize,
    read_bytes: usize,
    /// The last read filled its buffer, so more may have come.
    is_full: bool,
}

impl Connection {
    /// `read_bytes`: what is read at once at most.
    pub fn new(io: Box<dyn Io>, read_bytes: usize) -> Self {
        Self {
            io,
            buffer: BytesMut::with_capacity(read_bytes),
            incomplete: 0,
            #[cfg(test)]
            parses: 0,
            read_bytes,
            is_full: false,
        }
    }

    /// Whether the server has neither closed the connection nor sent anything, as far as is
    /// known now. For one that is kept: anything else says that it is of no use.
    pub fn is_quiet(&mut self) -> bool {
        self.buffer.is_empty() && self.read().now_or_never().is_none()
    }

    /// Whether there was more than what has been decoded, as far as the last read shows.
    pub fn may_have_more(&self) -> bool {
        self.is_full || !self.buffer.is_empty()
    }

    /// Sends a whole request and waits for the answer's head. None: the server
    /// closed the connection without a word, as it may with one it has kept.
    ///
    /// # Errors
    /// What broke.
    pub async fn ask(&mut self, request: &[u8]) -> io::Result<Option<Head>> {
        let mut left = request;
        let mut sent = None;
        loop {
            if sent.is_none() {
                sent = poll_fn(|context| self.poll_send(context, &mut left)).now_or_never();
            }
            if let Some(mut head) = self.head()? {
                // A server that refuses a request may not read the rest of it.
                if sent.is_none() && head.status < 400 {
                    sent = Some(poll_fn(|context| self.poll_send(context, &mut left)).await);
                }
                head.keeps_alive &= matches!(sent, Some(Ok(())));
                return Ok(Some(head));
            }
            let read = poll_fn(|context| {
                if sent.is_none()
                    && let Poll::Ready(done) = self.poll_send(context, &mut left)
                {
                    sent = Some(done);
                }
                pin!(self.read()).poll(context)
            });
            if read.await? == 0 {
                sent.transpose()?;
                return match self.buffer.is_empty() {
                    true => Ok(None),
                    false => Err(closed("in the head of its answer")),
                };
            }
        }
    }

    /// Sends what is left of a request.
    fn poll_send(&mut self, context: &mut Context<'_>, left: &mut &[u8]) -> Poll<io::Result<()>> {
        let mut io = Pin::new(&mut self.io);
        while !left.is_empty() {
            match ready!(io.as_mut().poll_write(context, left))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => *left = &left[written..],
            }
        }
        io.poll_flush(context)
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
        let room = self.buffer.capacity() - self.buffer.len();
        let read = self.io.read_buf(&mut self.buffer).await?;
        self.is_full = read == room;
        Ok(read)
    }

    /// The head, once it is there as a whole; informational ones are skipped.
    fn head(&mut self) -> io::Result<Option<Head>> {
        // A head ends with a line. It is not parsed again for every byte of a long line.
        while self.incomplete == 0 || self.buffer[self.incomplete..].contains(&b'\n') {
            #[cfg(test)]
            {
                self.parses += 1;
            }
            let mut headers = [EMPTY_HEADER; MAX_HEADERS];
            let mut response = httparse::Response::new(&mut headers);
            match response.parse(&self.buffer).map_err(io::Error::other)? {
                Status::Complete(length) if length > MAX_HEAD_BYTES => return Err(endless()),
                Status::Partial => break,
                Status::Complete(length) => {
                    let informs = response.code.is_some_and(|code| code < 200);
                    let head = (!informs).then(|| Head::new(&response)).transpose()?;
                    self.incomplete = 0;
                    self.buffer.advance(length);
                    if head.is_some() {
                        return Ok(head);
                    }
                }
            }
        }
        if self.buffer.len() > MAX_HEAD_BYTES {
            return Err(endless());
        }
        self.incomplete = self.buffer.len();
        Ok(None)
    }
}

fn closed(when: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::UnexpectedEof,
        format!("the server closed the connection {when}"),
    )
}

fn endless() -> io::Error {
    io::Error::other("the head of its answer has no end")
}
