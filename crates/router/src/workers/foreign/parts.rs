//! The body of a streamed answer, as much at a time as there is.

use std::time::{Duration, Instant};

use axum::body::Bytes;
use futures::FutureExt;
use tokio::time::sleep_until;

use super::client::HttpError;
use super::exchange::Exchange;

/// Bytes that are enough for one part.
const MOST_TOGETHER: usize = 32 << 10;
/// Bytes of one to three chunks, and still of a size that allocators hand out quickly.
const USUAL_TOGETHER: usize = 1 << 10;
/// Parts of a stream that has begun are at least so far apart. Engines step far more slowly, so
/// only tokens of one step, or of a stream that catches up, wait for each other.
const APART: Duration = Duration::from_millis(1);

/// Servers write each token as a chunk of its own. Everything after that, down to the write to the
/// client, costs by the part, so chunks that come within [`APART`], or before the router looks at
/// them, are passed on together.
pub struct Parts<'a> {
    answer: Exchange<'a>,
    /// When the last part was given out; `None`: the next one is not to wait.
    last: Option<Instant>,
    /// When the newest part was read.
    read_at: Instant,
    /// What broke behind the last part.
    error: Option<HttpError>,
}

impl<'a> Parts<'a> {
    pub fn new(answer: Exchange<'a>) -> Self {
        Self {
            answer,
            last: None,
            read_at: Instant::now(),
            error: None,
        }
    }

    /// The part that was given out last counts: the next one keeps its distance from it.
    pub fn keep_apart(&mut self, now: Instant) {
        self.last = Some(now);
    }

    /// When the part that was given out last was read.
    pub fn read_at(&self) -> Instant {
        self.read_at
    }

    /// The next part; `None` at the end.
    pub async fn next(&mut self) -> Option<Result<Bytes, HttpError>> {
        if let Some(error) = self.error.take() {
            return Some(Err(error));
        }
        let mut part = Vec::with_capacity(USUAL_TOGETHER);
        match self.answer.read(&mut part).await {
            Ok(true) => {}
            Ok(false) => return None,
            Err(error) if part.is_empty() => return Some(Err(error)),
            Err(error) => self.error = Some(error),
        }
        self.read_at = Instant::now();
        let mut waited = false;
        if let Some(last) = self.last.take() {
            let due = last + APART;
            if self.read_at < due {
                sleep_until(due.into()).await;
                self.read_at = Instant::now();
                waited = true;
            }
        }
        while self.error.is_none()
            && part.len() < MOST_TOGETHER
            && (waited || self.answer.may_have_more())
        {
            match self.answer.read(&mut part).now_or_never() {
                None | Some(Ok(false)) => break,
                Some(Ok(true)) => {}
                Some(Err(error)) => {
                    self.error = Some(error);
                    break;
                }
            }
        }
        Some(Ok(part.into()))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncWriteExt, DuplexStream};

    use super::super::exchange::testing::{answer, connections};
    use super::*;

    async fn write(worker: &mut DuplexStream, bytes: &[u8]) {
        worker.write_all(bytes).await.unwrap();
    }

    #[tokio::test]
    async fn what_is_there_comes_together_and_nothing_else_is_waited_for() {
        let connections = connections();
        let (answer, mut worker) = answer(&connections, "").await;
        let mut parts = Parts::new(answer);
        write(&mut worker, b"a").await;
        write(&mut worker, b"b").await;
        assert_eq!(parts.next().await, Some(Ok(Bytes::from("ab"))));
        assert!(parts.next().now_or_never().is_none());
        drop(worker);
        assert_eq!(parts.next().await, None);
    }

    #[tokio::test]
    async fn chunks_that_follow_closely_come_together() {
        let connections = connections();
        let (answer, mut worker) = answer(&connections, "").await;
        let mut parts = Parts::new(answer);
        write(&mut worker, b"a").await;
        assert_eq!(parts.next().await, Some(Ok(Bytes::from("a"))));
        let start = Instant::now();
        parts.keep_apart(Instant::now());
        write(&mut worker, b"b").await;
        let (part, ()) = tokio::join!(parts.next(), write(&mut worker, b"c"));
        assert_eq!(part, Some(Ok(Bytes::from("bc"))));
        assert!(start.elapsed() >= APART);
    }

    #[tokio::test]
    async fn an_error_comes_behind_what_precedes_it() {
        let connections = connections();
        let (answer, mut worker) = answer(&connections, "Transfer-Encoding: chunked\r\n").await;
        let mut parts = Parts::new(answer);
        write(&mut worker, b"1\r\na\r\nx\r\n").await;
        assert_eq!(parts.next().await, Some(Ok(Bytes::from("a"))));
        let error = HttpError::Broken("a chunk has no size".to_owned());
        assert_eq!(parts.next().await, Some(Err(error)));
    }

    #[tokio::test]
    async fn a_part_has_a_most() {
        let connections = connections();
        let (answer, mut worker) = answer(&connections, "").await;
        let mut parts = Parts::new(answer);
        write(&mut worker, &vec![b'x'; 3 * MOST_TOGETHER]).await;
        drop(worker);
        let mut lengths = Vec::new();
        while let Some(part) = parts.next().await {
            lengths.push(part.unwrap().len());
        }
        assert_eq!(lengths, [MOST_TOGETHER; 3]);
    }
}
