//! From started generations to an HTTP answer: whole, or as a stream.

use axum::Json;
use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use tokio::time::timeout;

use super::choice::Piece;
use super::running::Running;
use super::shape::Shape;
use super::stream;
use super::usage::{server_timing, timings_json};
use crate::error::ApiError;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
/// Tells a proxy to pass events on at once.
const NO_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

impl<S: Shape> Running<S> {
    /// Waits for the whole answer, or for the beginning of its stream.
    ///
    /// # Errors
    /// What ended the request before anything was sent.
    pub async fn answer(self) -> Result<Response, ApiError> {
        let id = HeaderValue::from_str(&self.identity.id).expect("an id is ASCII");
        let mut response = if self.delivery.stream {
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
        let first = timeout(self.heartbeat, self.next()).await.ok();
        if let Some(Some(Err(error))) = first {
            self.log.outcome = "failed";
            return Err(error);
        }
        let headers = [
            (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
            (header::CACHE_CONTROL, "no-cache"),
            (NO_BUFFERING, "no"),
        ];
        let body = Body::from_stream(stream::events(self, first));
        Ok((headers, body).into_response())
    }

    async fn whole(mut self) -> Result<Response, ApiError> {
        let mut pieces = vec![Piece::default(); self.outputs.choices()];
        while let Some(output) = self.next().await {
            match output {
                Ok(output) => pieces[output.index].append(output.piece),
                Err(error) => {
                    self.log.outcome = "failed";
                    return Err(error);
                }
            }
        }
        let summary = self.outputs.summary();
        self.log.outcome = "finished";
        let choices = pieces
            .into_iter()
            .enumerate()
            .map(|(index, piece)| {
                let prompt_ids = self.prompt_ids(index, !S::PROMPT_IDS_ON_TOP);
                self.shape.whole(index, piece, prompt_ids)
            })
            .collect();
        let mut envelope = self.identity.envelope(S::OBJECT, choices);
        envelope.usage = Some(Some(summary.usage));
        envelope.prompt_token_ids = self.prompt_ids(0, S::PROMPT_IDS_ON_TOP);
        envelope.timings = self
            .delivery
            .timings
            .then(|| timings_json(&summary.timings));
        let timing = [(SERVER_TIMING, server_timing(&summary.timings))];
        Ok((timing, Json(envelope)).into_response())
    }
}
