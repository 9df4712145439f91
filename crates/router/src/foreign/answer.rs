//! The answer to a request of another engine's model, as it comes: parts of the worker's, a
//! comment while there is nothing, at most one error event.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::Response;
use hyper::body::{Body, Frame};
use serde_json::json;
use tasuki_flow::Opaque;

use super::request::{Answer, Usage};
use super::resume::Resumption;
use super::serve::response_of;
use crate::access_log::{Ended, RequestLog};
use crate::alarm::Alarm;
use crate::alarm::Deadline;
use crate::api_keys::CallerPermit;
use crate::app::App;
use crate::error::ApiError;
use crate::gate::Permit;
use crate::heartbeat::{HEARTBEAT, Pending};
use crate::openai;
use crate::serve::api::{Arrival, Event, Generating, Generation, ServeError, Timings};
use crate::woken::Woken;

/// A request under way. Dropped: its workers' connections close.
pub struct Answering {
    pub app: Arc<App>,
    pub generating: Generating,
    pub generation: Generation,
    /// Goes on elsewhere after a loss, if the request allows it.
    pub resumption: Option<Resumption>,
    pub log: RequestLog,
    pub deadline: Deadline,
    /// By the worker's account, or by parts of the answer.
    pub usage: Option<Usage>,
    pub tokens: u64,
    /// Once the answer has ended.
    pub timings: Option<Timings>,
    pub _permit: Permit,
    pub _caller_permit: Option<CallerPermit>,
}

/// What comes next.
pub enum Next {
    /// An [`Answer`].
    Part(Opaque),
    Done,
    Failed(Ending),
}

/// Why there is no more.
pub enum Ending {
    Error(ApiError),
    /// The worker's own refusal, an [`Answer`].
    Refused(Opaque),
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.log.write(|| {
            let timings = self.timings.clone();
            let timings = timings.unwrap_or_else(|| self.generating.account.read());
            Ended {
                usage: self.whole_usage(),
                timings,
                finishes: Vec::new(),
            }
        });
    }
}

impl Answering {
    fn whole_usage(&self) -> openai::Usage {
        let usage = self.usage.unwrap_or(Usage {
            prompt_tokens: 0,
            completion_tokens: self.tokens,
            prompt_tokens_details: None,
        });
        let cached = usage
            .prompt_tokens_details
            .and_then(|details| details.cached_tokens);
        openai::Usage::new(
            usage.prompt_tokens,
            usage.completion_tokens,
            cached.unwrap_or(0),
        )
    }

    pub async fn next(&mut self) -> Next {
        poll_fn(|context| self.poll_next(context)).await
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Next> {
        loop {
            // What is there is taken, however late.
            let Poll::Ready(event) = self.generating.poll_next(context) else {
                let late = ready!(self.deadline.poll(context));
                return Poll::Ready(self.failed(Ending::Error(late)));
            };
            if let Some(next) = self.take(event) {
                return Poll::Ready(next);
            }
        }
    }

    /// Whether there is no need to ask for more until whom this was polled for is woken.
    fn is_settled(&self) -> bool {
        self.generating.events.is_settled() && self.deadline.is_watched()
    }

    /// What an event is for the client; `None`: nothing, and another one follows.
    fn take(&mut self, event: Option<Event>) -> Option<Next> {
        let next = match event {
            Some(Event::Frame { frame, tokens }) => {
                self.tokens += u64::from(tokens);
                Next::Part(self.observe(frame)?)
            }
            Some(Event::Tokens { .. } | Event::PromptLogprobs(_)) => return None,
            Some(Event::Done(timings)) => {
                self.timings = Some(*timings);
                self.log.end.finish();
                Next::Done
            }
            Some(Event::Failed(ServeError::Answered(answer))) => {
                self.failed(Ending::Refused(answer))
            }
            Some(Event::Failed(error)) => {
                if matches!(error, ServeError::Failed { .. }) && self.resume() {
                    return None;
                }
                self.failed(Ending::Error(error.into()))
            }
            None => {
                let error = ApiError::Failed("The answer broke off.".to_owned());
                self.failed(Ending::Error(error))
            }
        };
        Some(next)
    }

    /// Takes note of a part; `None` where nothing of it is for the client.
    fn observe(&mut self, frame: Opaque) -> Option<Opaque> {
        let answer = frame.get::<Answer>()?;
        let Some(resumption) = &mut self.resumption else {
            self.usage = answer.usage.or(self.usage);
            return Some(frame);
        };
        let usage = answer.usage.map(|usage| resumption.of_all(usage));
        self.usage = usage.or(self.usage);
        let went_on = resumption.goes_on();
        let taken = resumption.take(&answer.bytes);
        if resumption.goes_on() && !went_on {
            self.app.generator.count_resumed();
        }
        let bytes = match taken {
            Some(bytes) => bytes,
            None => return Some(frame),
        };
        (!bytes.is_empty()).then(|| {
            Opaque::new(Answer {
                head: answer.head.clone(),
                bytes,
                usage: None,
                room: None,
            })
        })
    }

    /// Begins again with the prompt and the text so far. False: the request does not allow it.
    fn resume(&mut self) -> bool {
        let Some(next) = self
            .resumption
            .as_mut()
            .and_then(|r| r.next(&self.generation))
        else {
            return false;
        };
        tracing::warn!(
            request_id = next.request_id,
            tokens = self.tokens,
            "the worker was lost in the middle of its answer: it is to go on with another one"
        );
        self.generating.account.goes_on();
        let arrival = Arrival {
            received: Instant::now(),
            trace: self.log.trace.clone(),
        };
        self.generating = self.app.generator.generate(next, arrival);
        true
    }

    fn failed(&mut self, ending: Ending) -> Next {
        match &ending {
            Ending::Error(error) => self.log.end.fail(error),
            Ending::Refused(answer) => {
                let head = answer
                    .get::<Answer>()
                    .and_then(|answer| answer.head.as_ref());
                let status = head.map_or(StatusCode::BAD_REQUEST, |head| head.status);
                let reason = "the worker rejected the request";
                self.log.end.fail_with(status, reason.to_owned());
            }
        }
        Next::Failed(ending)
    }

    /// What the client gets where nothing was sent yet.
    pub fn refusal(self, ending: Ending) -> Result<Response, ApiError> {
        match ending {
            Ending::Error(error) => Err(error),
            Ending::Refused(answer) => match answer.get::<Answer>() {
                Some(answer) => Ok(response_of(answer)),
                None => Err(ApiError::Failed("The worker refused.".to_owned())),
            },
        }
    }
}

/// The body of a streamed answer. Its connection asks several times for each part; it is polled
/// only when there may be something.
pub struct AnswerBody {
    parts: Parts,
    woken: Woken,
}

impl AnswerBody {
    /// `first`: its first part; `None`: it waits for that still.
    pub fn new(answering: Answering, first: Option<Next>, heartbeat: Duration) -> Self {
        let mut parts = Parts {
            answering,
            next: Pending::new(first),
            sending: None,
            ended: false,
            heartbeat,
            quiet: Alarm::new(),
        };
        parts.quiet.set(Some(Instant::now() + heartbeat));
        let woken = Woken::new();
        Self { parts, woken }
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Self { parts, woken } = &mut *self;
        // The connection has taken it over.
        parts.sending = None;
        let polled = woken.poll_once(context, |context| parts.poll(context));
        let Poll::Ready((part, settled)) = polled else {
            return Poll::Pending;
        };
        if !settled {
            woken.set();
        }
        Poll::Ready(part.map(|part| Ok(Frame::data(part))))
    }
}

struct Parts {
    answering: Answering,
    next: Pending<Next>,
    /// Its room is given back when the next one is asked for.
    sending: Option<Opaque>,
    ended: bool,
    heartbeat: Duration,
    /// Goes off when there was nothing for so long.
    quiet: Alarm,
}

impl Parts {
    /// The next part, and whether it is the last one until this is woken.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<(Option<Bytes>, bool)> {
        if self.ended {
            return Poll::Ready((None, false));
        }
        let mut settled = false;
        let next = match self.next.take() {
            Pending::There(next) => Some(next),
            Pending::Late => None,
            Pending::Awaited => match self.answering.poll_next(context) {
                Poll::Ready(next) => {
                    settled = self.answering.is_settled() && self.quiet.is_watched();
                    Some(next)
                }
                Poll::Pending => {
                    ready!(self.quiet.poll(context));
                    None
                }
            },
        };
        self.quiet.set(Some(Instant::now() + self.heartbeat));
        let part = match next {
            None => Some(Bytes::from_static(HEARTBEAT)),
            Some(Next::Part(frame)) => {
                let bytes = frame.get::<Answer>().map(|answer| answer.bytes.clone());
                self.sending = Some(frame);
                bytes
            }
            Some(Next::Done) => None,
            Some(Next::Failed(ending)) => {
                self.ended = true;
                Some(error_event(&ending))
            }
        };
        Poll::Ready((part, settled && !self.ended))
    }
}

fn error_event(ending: &Ending) -> Bytes {
    let data = match ending {
        Ending::Error(error) => serde_json::to_vec(&error.body()).ok(),
        // On one line, whoever wrote it, and with the name that clients look for.
        Ending::Refused(answer) => answer.get::<Answer>().and_then(|answer| {
            let mut said: serde_json::Value = serde_json::from_slice(&answer.bytes).ok()?;
            if said.get("object").is_some_and(|object| object == "error") {
                said = json!({"error": said});
            }
            serde_json::to_vec(&said).ok()
        }),
    };
    let unknown = || {
        json!({"error": {"message": "The worker refused."}})
            .to_string()
            .into()
    };
    let data = data.unwrap_or_else(unknown);
    [b"event: error\ndata: ", &data[..], b"\n\n"]
        .concat()
        .into()
}
