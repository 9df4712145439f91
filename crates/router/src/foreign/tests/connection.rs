//! A request in the task of a connection, as the router's server has it.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::http::Request;
use axum::response::Response;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tower::ServiceExt;

use crate::attached;

/// The answer to a request. Like a server with a full buffer, its connection asks for no more of
/// the body than is read; it ends when the answer, or the wait for it, is dropped.
pub async fn answer(routes: Router, request: Request<Body>) -> Response {
    let (mut to, response) = oneshot::channel();
    tokio::spawn(attached::run(async move {
        let answered = tokio::select! {
            answered = routes.oneshot(request) => answered.unwrap_or_else(|never| match never {}),
            () = to.closed() => return,
        };
        let (head, mut body) = answered.into_parts();
        let (parts, received) = mpsc::channel(1);
        let received = Body::from_stream(ReceiverStream::new(received));
        if to.send(Response::from_parts(head, received)).is_err() {
            return;
        }
        while let Ok(room) = parts.reserve().await {
            let part = poll_fn(|context| Pin::new(&mut body).poll_frame(context));
            let part = tokio::select! {
                part = part => part,
                () = parts.closed() => return,
            };
            let Some(Ok(part)) = part else {
                return;
            };
            let Ok(part) = part.into_data() else {
                return;
            };
            room.send(Ok::<_, Infallible>(part));
        }
    }));
    response.await.expect("the connection answers")
}
