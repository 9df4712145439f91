//! Passing an answer on, whole or as a stream.

use std::sync::LazyLock;
use std::time::Instant;

use axum::body::Bytes;
use axum::http::{StatusCode, header};
use memchr::memmem::Finder;
use tasuki_flow::{LegEndReason, Opaque, Output};

use super::client::{HttpError, MOST_ANSWER_BYTES};
use super::exchange::Exchange;
use super::leg::{Failure, Leg, MOST_LOGGED};
use super::parts::Parts;
use super::sglang;
use crate::alarm::Alarm;
use crate::foreign::events::{self, Data, Splitter};
use crate::foreign::request::{Answer, ForeignRequest, Head, PromptLogprobs, Usage};
use crate::foreign::template::Template;

/// Where a chunk's text is, in chat and in completions.
static TEXTS: LazyLock<[Finder<'static>; 2]> =
    LazyLock::new(|| [Finder::new(br#""content":"#), Finder::new(br#""text":"#)]);

/// Of a stream before its first token: the message's role, and comments.
const MOST_HELD_BYTES: usize = 16 << 20;

/// An answer that is not streamed counts for at most so many tokens.
const MOST_TOKENS: u64 = 1 << 20;

impl Leg<'_> {
    pub async fn forward_whole(
        &self,
        answer: Exchange<'_>,
        told: Option<PromptLogprobs>,
    ) -> Result<(), Failure> {
        let head = head_of(&answer);
        let answer = answer.whole(MOST_ANSWER_BYTES).await?;
        let usage = events::usage_of(&answer);
        let tokens = usage.map_or(1, |usage| usage.completion_tokens.clamp(1, MOST_TOKENS));
        let merged = told.and_then(|told| sglang::merge(&answer, &told));
        let answer = Answer {
            head: Some(head),
            bytes: merged.map_or(answer, Bytes::from),
            usage,
            room: None,
        };
        self.output(answer, tokens as usize, Instant::now());
        Ok(())
    }

    pub async fn forward(
        &self,
        request: &ForeignRequest,
        answer: Exchange<'_>,
        told: Option<PromptLogprobs>,
    ) -> Result<(), Failure> {
        let mut head = Some(head_of(&answer));
        let mut parts = Parts::new(answer);
        let mut splitter = Splitter::default();
        // What comes before the first token waits for it: until then another worker may serve.
        let mut held: Vec<u8> = Vec::new();
        let mut seen = Seen::default();
        let mut stalled = Alarm::new();
        // One look at the clock serves all that is done with a part.
        let mut now = parts.read_at();
        // Only the worker is waited for here: a slow client is waited for below.
        loop {
            let next = self.before_stalled(&mut stalled, &seen, now, parts.next());
            let part = match next.await {
                Ok(None) => break,
                // The client has all: how the connection ends does not matter.
                Ok(Some(Err(_))) | Err(_) if seen.is_whole() => break,
                Ok(Some(part)) => part.map_err(|error| self.broken(&seen, &error))?,
                Err(stalled) => return Err(stalled),
            };
            now = parts.read_at();
            let part = splitter.push(part);
            let part = part.map_err(|error| Failure::failed(error.to_string()))?;
            let (whole, error) = seen.read(&part);
            let whole = part.slice_ref(whole);
            let ready = if seen.begun && held.is_empty() {
                whole
            } else {
                held.extend_from_slice(&whole);
                match seen.begun {
                    true => std::mem::take(&mut held).into(),
                    false if held.len() > MOST_HELD_BYTES => {
                        return Err(self.broken(&seen, &HttpError::TooLarge(MOST_HELD_BYTES)));
                    }
                    false => Bytes::new(),
                }
            };
            if !ready.is_empty() {
                let bytes = match &told {
                    Some(told) => sglang::merge_events(&ready, told).into(),
                    None => ready,
                };
                let mut room = request.room_now(bytes.len());
                if room.is_none() {
                    room = request.room(bytes.len()).await;
                    now = Instant::now();
                }
                let answer = Answer {
                    room,
                    head: head.take(),
                    bytes,
                    usage: seen.usage.take(),
                };
                self.output(answer, std::mem::take(&mut seen.tokens), now);
                parts.keep_apart(now);
            }
            if let Some((status, message, data)) = error {
                return Err(self.error_event(&seen, status, message, data));
            }
        }
        match (seen.done, seen.begun) {
            (true, true) => Ok(()),
            (true, false) => Err(Failure::failed("a stream without output")),
            _ => Err(self.broken(&seen, &HttpError::Broken("no [DONE]".to_owned()))),
        }
    }

    /// What comes next of the stream, within the limit since `last` for one that has begun.
    async fn before_stalled<T>(
        &self,
        alarm: &mut Alarm,
        seen: &Seen,
        last: Instant,
        next: impl Future<Output = T>,
    ) -> Result<T, Failure> {
        let limit = self.site.stalled.filter(|_| seen.begun);
        alarm.set(limit.map(|limit| last + limit));
        alarm.before(next).await.ok_or_else(|| {
            let (limit, tokens) = (limit.unwrap_or_default(), seen.total);
            Failure::failed(format!("nothing for {limit:?}, after {tokens} tokens"))
        })
    }

    fn broken(&self, seen: &Seen, error: &HttpError) -> Failure {
        let message = format!("{error}, after {} tokens", seen.total);
        match seen.begun {
            true => Failure::failed(message),
            false => self.broke(message),
        }
    }

    fn error_event(
        &self,
        seen: &Seen,
        status: Option<u16>,
        message: String,
        data: Bytes,
    ) -> Failure {
        let status = status.and_then(|status| StatusCode::from_u16(status).ok());
        match status.filter(StatusCode::is_client_error) {
            Some(status) => Failure {
                answer: Some(Opaque::new(Answer {
                    head: Some(Head {
                        status,
                        content_type: Some(header::HeaderValue::from_static("application/json")),
                    }),
                    bytes: data,
                    usage: None,
                    room: None,
                })),
                ..Failure::new(LegEndReason::Rejected, message)
            },
            None if seen.begun => Failure::failed(message),
            None => self.broke(message),
        }
    }

    fn output(&self, answer: Answer, tokens: usize, now: Instant) {
        let output = Output {
            // Not zeroed memory, which takes longer for so little.
            tokens: std::iter::repeat_n(0, tokens).collect(),
            frame: Some(Opaque::new(answer)),
            ..Output::default()
        };
        self.reports.output_at(output, now);
    }
}

/// What was seen of a stream so far.
#[derive(Default)]
struct Seen {
    begun: bool,
    done: bool,
    /// That were not passed on yet, and all.
    tokens: usize,
    total: usize,
    usage: Option<Usage>,
    /// A chunk that is a token, without a usage.
    token: Template,
}

/// Its status, its message, and the event's data.
type ErrorEvent = (Option<u16>, String, Bytes);

impl Seen {
    /// Whether nothing may follow.
    fn is_whole(&self) -> bool {
        self.done && self.begun
    }

    /// Reads whole events; gives back those before an error, and the error.
    fn read<'a>(&mut self, part: &'a Bytes) -> (&'a [u8], Option<ErrorEvent>) {
        for (start, data) in events::located(part) {
            if self.token.text(data).is_some() {
                self.tokens += 1;
                self.total += 1;
                continue;
            }
            match Data::of(data, self.begun) {
                Data::Done => self.done = true,
                Data::Error(error) => {
                    let message: String = error.message.chars().take(MOST_LOGGED).collect();
                    let event = (error.status(), message, part.slice_ref(data));
                    return (&part[..start], Some(event));
                }
                Data::Token(usage) => {
                    self.begun = true;
                    self.tokens += 1;
                    self.total += 1;
                    self.usage = usage.or(self.usage);
                    if usage.is_none() {
                        self.token.keep_by(data, &*TEXTS);
                    }
                }
                Data::Other(usage) => self.usage = usage.or(self.usage),
            }
        }
        (part, None)
    }
}

/// The first error among the events of a stream: its status, and its message.
pub fn first_error(events: &Bytes) -> Option<(Option<u16>, String)> {
    let (_, error) = Seen::default().read(events);
    error.map(|(status, message, _)| (status, message))
}

fn head_of(answer: &Exchange<'_>) -> Head {
    Head {
        status: answer.status(),
        content_type: answer.content_type(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream's events, its text among them as it is written.
    fn events(texts: &[&str], more: &str) -> Vec<Bytes> {
        let chunk = |text: &&str| {
            let choice = format!(r#"{{"delta":{{"content":"{text}"}},"finish_reason":null}}"#);
            Bytes::from(format!(
                "data: {{\"id\":\"x\",\"choices\":[{choice}]{more}}}\n\n"
            ))
        };
        texts.iter().map(chunk).collect()
    }

    #[test]
    fn a_chunk_counts_the_same_whether_it_is_compared_or_parsed() {
        let usage = r#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}"#;
        let others = [
            format!("data: {usage}\n\n: note\n\ndata: [DONE]\n\n"),
            "data: {\"id\":\"x\",\"choices\":[]}\n\n".to_owned(),
            "data: {\"error\":{\"message\":\"m\",\"code\":500}}\n\n".to_owned(),
        ];
        let texts = ["a", "", "\\\"choices\\\":[]", "{\\n", "c\\\\", "d"];
        for more in [
            "",
            r#","usage":null"#,
            r#","usage":{"completion_tokens":1}"#,
        ] {
            let mut compared = Seen::default();
            for part in events(&texts, more)
                .into_iter()
                .chain(others.clone().map(Bytes::from))
            {
                let mut parsed = Seen {
                    token: Template::default(),
                    usage: compared.usage,
                    ..compared
                };
                let found = compared.read(&part);
                assert_eq!(found, parsed.read(&part));
                assert_eq!(
                    (
                        compared.begun,
                        compared.done,
                        compared.tokens,
                        compared.total,
                        compared.usage
                    ),
                    (
                        parsed.begun,
                        parsed.done,
                        parsed.tokens,
                        parsed.total,
                        parsed.usage
                    ),
                    "{part:?}"
                );
            }
            assert_eq!((compared.total, compared.done), (texts.len(), true));
        }
    }
}
