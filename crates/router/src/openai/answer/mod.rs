//! A request under way and its answer, whole or as a stream of server-sent events. While a stream has
//! nothing to send, a comment goes out at each heartbeat.
//!
//! [`outputs`] merges what the workers generate and [`choice`] makes text of it; the endpoint's
//! [`Wording`] makes JSON of the text.

pub mod choice;
pub mod logprobs;
pub mod outputs;
pub mod size;
pub mod usage;
pub mod wording;

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::Stream;
use tokio::time::timeout;

use self::choice::Piece;
use self::outputs::{Output, Outputs};
use self::usage::server_timing;
use self::wording::{AnswerInfo, Events, Wording};
use crate::access_log::{Ended, RequestLog};
use crate::alarm::{Alarm, Deadline};
use crate::api_keys::CallerPermit;
use crate::error::ApiError;
use crate::event_body::EventBody;
use crate::gate::Permit;
use crate::heartbeat::Pending;
use crate::openai::request::delivery::Delivery;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
/// Tells a proxy to pass events on at once.
const NO_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// A request and the form of its answer.
pub struct RunningAnswer<W> {
    pub wording: W,
    pub run: Run,
}

/// Everything that an answer needs but its form.
pub struct Run {
    pub info: AnswerInfo,
    pub delivery: Delivery,
    pub outputs: Outputs,
    pub log: RequestLog,
    pub deadline: Deadline,
    /// After so long without an output a stream sends a comment.
    pub heartbeat: Duration,
    pub _permit: Permit,
    pub _caller_permit: Option<CallerPermit>,
}

impl Drop for Run {
    fn drop(&mut self) {
        self.log.write(|| Ended {
            usage: self.outputs.summary().usage,
            timings: self.outputs.known_timings(),
            finishes: self.outputs.finishes(),
        });
    }
}

impl Run {
    /// The next piece of any choice; `None` when all have ended. After an error nothing
    /// follows.
    pub async fn next(&mut self) -> Option<Result<Output, ApiError>> {
        match self.deadline.limit(self.outputs.next()).await {
            Ok(next) => next.map(|next| next.map_err(ApiError::from)),
            Err(late) => Some(Err(late)),
        }
    }

    /// The prompt's ids if they were asked for and belong `here`.
    pub fn prompt_ids(&self, index: usize, here: bool) -> Option<Vec<u32>> {
        (self.delivery.return_token_ids && here).then(|| self.outputs.prompt_tokens(index).to_vec())
    }
}

impl<W: Wording> RunningAnswer<W> {
    /// Waits for the whole answer, or for the beginning of its stream.
    ///
    /// # Errors
    /// What ended the request before anything was sent.
    pub async fn answer(self) -> Result<Response, ApiError> {
        let id = HeaderValue::from_str(&self.run.info.id).expect("an id is ASCII");
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
        let body = Body::new(EventBody::new(events(self, first)));
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

type Next = Option<Result<Output, ApiError>>;

/// The events of a request. `first` is its first output; `None`: it waits for that
/// still, and a comment comes first. The request is aborted when the stream is dropped.
fn events<W: Wording>(
    running: RunningAnswer<W>,
    first: Option<Next>,
) -> impl Stream<Item = Bytes> + Send {
    let state = EventStream {
        running,
        next: Pending::new(first),
        opened: false,
        ended: false,
        quiet: Alarm::new(),
        written: Events::default(),
    };
    // Boxed: it is moved for every part.
    futures::stream::unfold(Box::new(state), |mut state| async move {
        let events = state.events().await?;
        Some((events, state))
    })
}

struct EventStream<W> {
    running: RunningAnswer<W>,
    next: Pending<Next>,
    /// What comes before the first output was sent.
    opened: bool,
    ended: bool,
    /// Goes off when there was nothing for too long.
    quiet: Alarm,
    /// To be sent.
    written: Events,
}

impl<W: Wording> EventStream<W> {
    /// The next bytes of the body, never none before its end.
    async fn events(&mut self) -> Option<Bytes> {
        if self.ended {
            return None;
        }
        while self.written.is_empty() {
            let next = match self.next.take() {
                Pending::There(next) => Some(next),
                Pending::Late => None,
                Pending::Awaited => {
                    let run = &mut self.running.run;
                    self.quiet.within(Some(run.heartbeat), run.next()).await
                }
            };
            match next {
                Some(next) => self.write(next),
                None => self.written.heartbeat(),
            }
        }
        Some(self.written.take())
    }

    fn write(&mut self, next: Next) {
        let RunningAnswer { wording, run } = &mut self.running;
        let events = &mut self.written;
        match next {
            Some(Ok(output)) => {
                if !std::mem::replace(&mut self.opened, true) {
                    wording.open(run, events);
                }
                wording.output(run, output, events);
            }
            Some(Err(error)) => {
                self.ended = true;
                run.log.end.fail(&error);
                wording.fail(run, &error, events);
            }
            None => {
                self.ended = true;
                run.log.end.finish();
                wording.close(run, events);
            }
        }
    }
}
