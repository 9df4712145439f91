//! The body of an answer that is a stream of events.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Bytes;
use futures::Stream;
use hyper::body::{Body, Frame};

use crate::woken::Woken;

/// A stream as a body. Its connection asks several times for each part; the stream is polled only
/// when there may be something.
pub struct EventBody<S> {
    stream: Pin<Box<S>>,
    woken: Woken,
}

impl<S> EventBody<S> {
    pub fn new(stream: S) -> Self {
        Self {
            stream: Box::pin(stream),
            woken: Woken::new(),
        }
    }
}

impl<S: Stream<Item = Bytes>> Body for EventBody<S> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Self { stream, woken } = &mut *self;
        let polled = woken.poll(context, |context| stream.as_mut().poll_next(context));
        polled.map(|part| part.map(|part| Ok(Frame::data(part))))
    }
}
