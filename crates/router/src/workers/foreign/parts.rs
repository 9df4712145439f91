//! The body of an answer, as much at a time as there is.

use axum::body::{Body, BodyDataStream, Bytes};
use futures::{FutureExt, StreamExt};
use tokio::task::yield_now;

use super::client::{self, HttpError};

/// Bytes that are enough for one part.
const MOST_TOGETHER: usize = 32 << 10;

/// The HTTP library gives out a body by its chunks, and servers write each token as one. What
/// has been received by the time that it is looked at is passed on together: everything after
/// that, down to the write to the client, costs by the part, so a router that is busy has less to
/// do for each token. One that is not passes each on as it comes.
pub struct Parts {
    chunks: BodyDataStream,
    /// What ended the last part.
    end: Option<Result<(), HttpError>>,
}

impl Parts {
    pub fn new(body: Body) -> Self {
        Self {
            chunks: body.into_data_stream(),
            end: None,
        }
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
                    .get_or_insert_with(|| first.to_vec())
                    .extend_from_slice(&chunk),
            }
        }
        Some(Ok(together.map_or(first, Bytes::from)))
    }
}

#[cfg(test)]
mod tests {
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
    async fn a_part_has_a_most() {
        let chunk = "x".repeat(MOST_TOGETHER / 2).leak();
        let mut parts = parts(vec![Ok(chunk), Ok(chunk), Ok(chunk)]);
        for bytes in [2 * chunk.len(), chunk.len()] {
            assert_eq!(parts.next().await.unwrap().unwrap().len(), bytes);
        }
    }
}
