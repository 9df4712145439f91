//! The body of an answer, as much at a time as there is.

use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use futures::{FutureExt, StreamExt};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until};

use super::client::{self, HttpError};

/// Bytes that are enough for one part.
const MOST_TOGETHER: usize = 32 << 10;
/// Bytes of several chunks, most of the time.
const USUAL_TOGETHER: usize = 4 << 10;
/// Parts of a stream that has begun are at least so far apart. Engines step far more slowly, so
/// only tokens of one step, or of a stream that catches up, wait for each other.
const APART: Duration = Duration::from_millis(1);

/// The HTTP library gives out a body by its chunks, and servers write each token as one.
/// Everything after that, down to the write to the client, costs by the part, so chunks that come
/// within [`APART`], or before the router looks at them, are passed on together.
pub struct Parts {
    chunks: BodyDataStream,
    /// When the last part was given out; `None`: the next one is not to wait.
    last: Option<Instant>,
    /// What ended the last part.
    end: Option<Result<(), HttpError>>,
}

impl Parts {
    pub fn new(body: Body) -> Self {
        Self {
            chunks: body.into_data_stream(),
            last: None,
            end: None,
        }
    }

    /// The part that was given out last counts: the next one keeps its distance from it.
    pub fn keep_apart(&mut self) {
        self.last = Some(Instant::now());
    }

    /// The next part; `None` at the end.
    pub async fn next(&mut self) -> Option<Result<Bytes, HttpError>> {
        if let Some(end) = self.end.take() {
            return end.err().map(Err);
        }
        let first = match self.chunks.next().await? {
            Ok(first) => first,
            Err(error) => return Some(Err(client::broken(error))),
        };
        if let Some(last) = self.last.take() {
            let due = last + APART;
            if Instant::now() < due {
                sleep_until(due).await;
            }
        }
        let mut together: Option<Vec<u8>> = None;
        while together.as_ref().map_or(first.len(), Vec::len) < MOST_TOGETHER {
            // The connection's task gives out the next chunk when the last one was taken.
            yield_now().await;
            match self.chunks.next().now_or_never() {
                None => break,
                Some(None) => {
                    self.end = Some(Ok(()));
                    break;
                }
                Some(Some(Err(error))) => {
                    self.end = Some(Err(client::broken(error)));
                    break;
                }
                Some(Some(Ok(chunk))) => together
                    .get_or_insert_with(|| with_room(&first))
                    .extend_from_slice(&chunk),
            }
        }
        Some(Ok(together.map_or(first, Bytes::from)))
    }
}

/// A copy that more can be added to.
fn with_room(bytes: &[u8]) -> Vec<u8> {
    let mut copy = Vec::with_capacity(bytes.len().max(USUAL_TOGETHER));
    copy.extend_from_slice(bytes);
    copy
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;
    use tokio_stream::wrappers::ReceiverStream;

    use super::*;

    type Chunk = Result<&'static str, std::io::Error>;

    fn parts(chunks: Vec<Chunk>) -> Parts {
        Parts::new(Body::from_stream(futures::stream::iter(chunks)))
    }

    #[tokio::test]
    async fn what_is_there_comes_together() {
        let mut parts = parts(vec![Ok("a"), Ok("b"), Ok("c")]);
        assert_eq!(parts.next().await, Some(Ok(Bytes::from("abc"))));
        assert_eq!(parts.next().await, None);
    }

    #[tokio::test]
    async fn an_error_comes_behind_what_precedes_it() {
        let broken = Err(std::io::Error::other("reset"));
        let mut parts = parts(vec![Ok("a"), broken]);
        assert_eq!(parts.next().await, Some(Ok(Bytes::from("a"))));
        let error = HttpError::Broken("reset".to_owned());
        assert_eq!(parts.next().await, Some(Err(error)));
    }

    #[tokio::test]
    async fn what_is_not_there_yet_is_not_waited_for() {
        let later = futures::stream::once(async { Ok::<_, std::io::Error>("a") });
        let never = futures::stream::pending();
        let mut parts = Parts::new(Body::from_stream(later.chain(never)));
        assert_eq!(parts.next().await, Some(Ok(Bytes::from("a"))));
    }

    #[tokio::test]
    async fn chunks_that_follow_closely_come_together() {
        let (sender, chunks) = mpsc::channel::<Chunk>(3);
        let mut parts = Parts::new(Body::from_stream(ReceiverStream::new(chunks)));
        sender.send(Ok("a")).await.unwrap();
        assert_eq!(parts.next().await, Some(Ok(Bytes::from("a"))));
        let start = Instant::now();
        parts.keep_apart();
        sender.send(Ok("b")).await.unwrap();
        let (part, _) = tokio::join!(parts.next(), sender.send(Ok("c")));
        assert_eq!(part, Some(Ok(Bytes::from("bc"))));
        assert!(start.elapsed() >= APART);
    }

    #[tokio::test]
    async fn a_part_has_a_most() {
        let chunk = "x".repeat(MOST_TOGETHER / 2).leak();
        let mut parts = parts(vec![Ok(chunk), Ok(chunk), Ok(chunk)]);
        for bytes in [2 * chunk.len(), chunk.len()] {
            assert_eq!(parts.next().await.unwrap().unwrap().len(), bytes);
        }
    }
}
