//! Small writes of several buffers as one of one buffer.
//!
//! HTTP frames each chunk of a stream with bytes before and behind it. The system takes longer for
//! four buffers of some bytes each than for their copy.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes that are copied: more than a chunk of a stream has.
const MOST_COPIED: usize = 1 << 10;

/// A stream whose small writes are of one buffer.
pub struct SmallWrites<S>(pub S);

impl<S: AsyncRead + Unpin> AsyncRead for SmallWrites<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for SmallWrites<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let stream = Pin::new(&mut self.0);
        let length: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        if buffers.len() == 1 || length > MOST_COPIED {
            return stream.poll_write_vectored(context, buffers);
        }
        let mut copy = [0; MOST_COPIED];
        let mut end = 0;
        for buffer in buffers {
            copy[end..end + buffer.len()].copy_from_slice(buffer);
            end += buffer.len();
        }
        stream.poll_write(context, &copy[..end])
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    #[tokio::test]
    async fn what_is_written_arrives_in_order_whatever_its_size() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        let mut client = SmallWrites(client);
        assert!(client.is_write_vectored());
        let mut expected = Vec::new();
        for sizes in [
            [0, 3, 2],
            [1000, 20, 4],
            [1000, 20, 5],
            [0, 9000, 1],
            [7, 0, 0],
        ] {
            let parts = sizes.map(|size| vec![size as u8; size]);
            let buffers = [&parts[0], &parts[1], &parts[2]].map(|part| IoSlice::new(part));
            let written = client.write_vectored(&buffers).await.unwrap();
            assert_eq!(written, parts.concat().len());
            expected.extend(parts.concat());
        }
        drop(client);
        let mut all = Vec::new();
        server.read_to_end(&mut all).await.unwrap();
        assert_eq!(all, expected);
    }
}
