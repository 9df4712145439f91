//! From started generations to an HTTP answer: whole, or as a stream.

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use tokio::time::timeout;

use super::choice::Piece;
use super::running::Running;
use super::stream;
use super::usage::server_timing;
use super::wording::Wording;
use crate::error::ApiError;
use crate::event_body::EventBody;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
/// Tells a proxy to pass events on at once.
const NO_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

impl<W: Wording> Running<W> {
    /// Waits for the whole answer, or for the beginning of its stream.
    ///
    /// # Errors
    /// What ended the request before anything was sent.
    pub async fn answer(self) -> Result<Response, ApiError> {
        let id = HeaderValue::from_str(&self.run.identity.id).expect("an id is ASCII");
        let mut response = if self.run.delivery.stream {
            self.stream().await?
        } else {
            self.whole().await?
        };
        response.headers_mut().insert(REQUEST_ID, id);
        Ok(response)
    }

    async fn stream(mut self) -> Result<Response, ApiError> {
        // Until the first output the status can still tell of an error. A longer wait needs
        // the headers: proxies cut connections that stay silent.
        let first = timeout(self.run.heartbeat, self.run.next()).await.ok();
        if let Some(Some(Err(error))) = first {
            self.run.log.end.fail(&error);
            return Err(error);
        }
        let headers = [
            (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
            (header::CACHE_CONTROL, "no-cache"),
            (NO_BUFFERING, "no"),
        ];
        self.run.log.end.begin(StatusCode::OK);
        let body = Body::new(EventBody::new(stream::events(self, first)));
        Ok((headers, body).into_response())
    }

    async fn whole(mut self) -> Result<Response, ApiError> {
        let run = &mut self.run;
        let mut pieces = vec![Piece::default(); run.outputs.choices()];
        while let Some(output) = run.next().await {
            match output {
                Ok(output) => pieces[output.index].append(output.piece),
                Err(error) => {
                    run.log.end.fail(&error);
                    return Err(error);
                }
            }
        }
        run.log.end.finish();
        let mut response = self.wording.whole(&self.run, pieces);
        let timing = server_timing(&self.run.outputs.summary().timings);
        response.headers_mut().insert(SERVER_TIMING, timing);
        Ok(response)
    }
}
