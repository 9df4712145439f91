//! A request in the task of a connection, as the router's server has it.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::http::Request;
use axum::response::Response;
use futures::FutureExt;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tower::ServiceExt;

use super::vllm::{COMPLETIONS, tuned};
use crate::app::HttpSettings;
use crate::attached;
use crate::routes::routes;
use crate::workers::testing::soon;

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

async fn is_comment(body: &mut Body) -> bool {
    let part = poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await;
    let part = part.expect("it goes on").unwrap().into_data().unwrap();
    part.starts_with(b":")
}

/// Whenever the connection asks there is a part, so its answer never waits before the silence.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn an_answer_that_never_waited_has_comments_when_its_worker_falls_silent() {
    let quick = |_: &mut _, http: &mut HttpSettings| http.heartbeat = Duration::from_millis(100);
    let (router, workers, _fabric) = tuned(&[""], quick).await;
    workers[0].set(|manner| {
        manner.tokens = 50;
        manner.pause_after = Some(8);
        manner.padding = 60_000;
    });
    let body = r#"{"model":"theirs","prompt":"a","stream":true,"max_tokens":50}"#;
    let request = Request::post(COMPLETIONS).body(Body::from(body)).unwrap();
    let answered = routes(Arc::clone(&router.app)).oneshot(request);
    let connection = attached::run(async move {
        let mut body = answered.await.unwrap().into_body();
        loop {
            sleep(Duration::from_millis(20)); // other threads go on
            if is_comment(&mut body).await {
                return;
            }
        }
    });
    soon("a comment", connection).await;
}

/// The task is woken for a part and for the time at once, and takes the part.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_part_that_comes_with_the_time_for_a_comment_does_not_end_the_comments() {
    let heartbeat = Duration::from_millis(100);
    let quick = |_: &mut _, http: &mut HttpSettings| http.heartbeat = heartbeat;
    let (router, workers, _fabric) = tuned(&[""], quick).await;
    workers[0].set(|manner| {
        manner.tokens = 50;
        manner.pause_after = Some(1);
    });
    let body = r#"{"model":"theirs","prompt":"a","stream":true,"max_tokens":50}"#;
    let request = Request::post(COMPLETIONS).body(Body::from(body)).unwrap();
    let answered = routes(Arc::clone(&router.app)).oneshot(request);
    let worker = &workers[0];
    let connection = attached::run(async move {
        let mut body = answered.await.unwrap().into_body();
        for parts in 2.. {
            while is_comment(&mut body).now_or_never().is_some() {}
            worker.set(|manner| manner.pause_after = Some(parts));
            sleep(2 * heartbeat); // other threads go on
            // Otherwise the part came after the time.
            if !is_comment(&mut body).await {
                break;
            }
        }
        assert!(is_comment(&mut body).await);
    });
    soon("a comment", connection).await;
}
