//! The queue of events between a request's task and its client, bounded however slowly the
//! client reads.
//!
//! Beyond some events, tokens of a choice join those of it that wait already, so a token costs
//! 4 bytes and not an event. What a client asked for besides, log probabilities, still adds
//! up: with too many bytes waiting the client has lost its request.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tasuki_core::FailureKind;
use tasuki_flow::{Event, ServeError, TokenLogprob, TopLogprob};
use tokio::sync::Notify;

use crate::attached::Attached;

/// While no more events wait, each is handed out as it came.
const EVENTS_APART: usize = 32;
/// Of one event that is handed out: it becomes JSON at once.
const TOKENS_AT_ONCE: usize = 256;
/// What may wait for each choice of a request: 131,072 tokens, or 2,000 with 20 log
/// probabilities each.
pub const MOST_BYTES_PER_CHOICE: usize = 512 << 10;

/// A queue for a request of so many choices.
pub fn channel(choices: u32) -> (EventSender, EventReceiver) {
    let shared = Arc::new(Shared {
        queue: Mutex::new(Queue::default()),
        most_bytes: MOST_BYTES_PER_CHOICE * choices as usize,
        closed: Notify::new(),
    });
    let sender = EventSender(Arc::new(Sending(Arc::clone(&shared))));
    let receiver = EventReceiver {
        shared,
        settled: false,
    };
    (sender, receiver)
}

/// The request's end of the queue.
#[derive(Clone)]
pub struct EventSender(Arc<Sending>);

/// The client's end of the queue.
pub struct EventReceiver {
    shared: Arc<Shared>,
    /// See [`EventReceiver::is_settled`].
    settled: bool,
}

/// Gone with the last sender.
struct Sending(Arc<Shared>);

struct Shared {
    queue: Mutex<Queue>,
    most_bytes: usize,
    closed: Notify,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Event>,
    /// Of tokens and their log probabilities.
    bytes: usize,
    /// No event follows.
    ended: bool,
    /// The client is gone, or was given up.
    closed: bool,
    /// It waits for an event.
    reader: Option<Waker>,
}

impl EventSender {
    /// Hands an event over; to a client that is gone it does nothing. Whether the client
    /// keeps up: one that has let too much wait loses its request with this event.
    pub fn send(&self, event: Event) -> bool {
        let shared = &self.0.0;
        let mut queue = shared.lock();
        if queue.closed {
            return true;
        }
        queue.push(event);
        let keeps_up = queue.bytes <= shared.most_bytes;
        if !keeps_up {
            queue.give_up(shared.most_bytes);
            shared.closed.notify_one();
        }
        let reader = queue.reader.take();
        drop(queue);
        if let Some(reader) = reader {
            reader.wake();
        }
        keeps_up
    }

    #[cfg(test)]
    pub fn is_closed(&self) -> bool {
        self.0.0.lock().closed
    }

    /// Returns when nothing is read any more. For one task at a time.
    pub async fn closed(&self) {
        let shared = &self.0.0;
        while !shared.lock().closed {
            shared.closed.notified().await;
        }
    }
}

impl EventReceiver {
    /// The next event; `None` after the last one. `work`: what makes events, and is to go on
    /// here and now before there is nothing.
    pub fn poll(
        &mut self,
        work: Option<&Attached>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Event>> {
        self.settled = false;
        let Some(work) = work else {
            return self.poll_recv(context);
        };
        let mut queue = self.shared.lock();
        if let Some(event) = queue.next() {
            return Poll::Ready(event);
        }
        // It does not wait: it looks again when the work has gone on.
        queue.reader = None;
        drop(queue);
        let goes_on = work.poll(context).is_pending();
        let mut queue = self.shared.lock();
        let Some(event) = queue.next() else {
            queue.wait(context);
            return Poll::Pending;
        };
        self.settled = goes_on && queue.waiting.is_empty();
        Poll::Ready(event)
    }

    /// Whether the event that was ready last is the last one for now, and the work wakes whom it was
    /// ready for when it can go on: there is no need to ask for another event before.
    pub fn is_settled(&self) -> bool {
        self.settled
    }

    fn poll_recv(&self, context: &Context<'_>) -> Poll<Option<Event>> {
        let mut queue = self.shared.lock();
        let event = queue.next();
        if event.is_none() {
            queue.wait(context);
        }
        event.map_or(Poll::Pending, Poll::Ready)
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        let mut queue = self.0.lock();
        queue.ended = true;
        let reader = queue.reader.take();
        drop(queue);
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

impl Drop for EventReceiver {
    fn drop(&mut self) {
        let mut queue = self.shared.lock();
        queue.closed = true;
        queue.waiting.clear();
        drop(queue);
        self.shared.closed.notify_one();
    }
}

impl Shared {
    /// A panic elsewhere leaves the queue usable: every change is complete in itself.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn push(&mut self, event: Event) {
        self.bytes += bytes(&event);
        if self.waiting.len() < EVENTS_APART {
            self.waiting.push_back(event);
            return;
        }
        let left = self.join(event);
        self.waiting.extend(left);
    }

    /// Adds tokens to those of their choice that wait; back, if there are none.
    fn join(&mut self, event: Event) -> Option<Event> {
        let Event::Tokens {
            choice,
            tokens,
            logprobs,
            finish,
        } = event
        else {
            return Some(event);
        };
        let of_choice = self
            .waiting
            .iter_mut()
            .rev()
            .find_map(|waiting| match waiting {
                Event::Tokens {
                    choice: other,
                    tokens,
                    logprobs,
                    finish,
                } if *other == choice => Some((tokens, logprobs, finish)),
                _ => None,
            });
        let Some((known, known_logprobs, last)) = of_choice else {
            return Some(Event::Tokens {
                choice,
                tokens,
                logprobs,
                finish,
            });
        };
        known.extend(tokens);
        known_logprobs.extend(logprobs);
        *last = finish;
        None
    }

    /// Its reader is woken for the next event.
    fn wait(&mut self, context: &Context<'_>) {
        match &mut self.reader {
            Some(reader) => reader.clone_from(context.waker()),
            None => self.reader = Some(context.waker().clone()),
        }
    }

    /// The next event or the end, if either is there.
    fn next(&mut self) -> Option<Option<Event>> {
        match self.pop() {
            None if self.ended || self.closed => Some(None),
            event => event.map(Some),
        }
    }

    fn pop(&mut self) -> Option<Event> {
        let mut event = self.waiting.pop_front()?;
        if let Some(rest) = split(&mut event) {
            self.waiting.push_front(rest);
        }
        self.bytes -= bytes(&event);
        Some(event)
    }

    /// The client gets an error in place of what waits.
    fn give_up(&mut self, most_bytes: usize) {
        self.waiting.clear();
        self.bytes = 0;
        self.closed = true;
        self.waiting.push_back(Event::Failed(ServeError::Failed {
            kind: FailureKind::Client,
            message: format!(
                "The answer is read too slowly: {most_bytes} bytes of tokens wait to be read, the \
                 limit."
            ),
        }));
    }
}

/// Leaves a part of an event that is not too large; the rest, if there is one.
fn split(event: &mut Event) -> Option<Event> {
    let Event::Tokens {
        choice,
        tokens,
        logprobs,
        finish,
    } = event
    else {
        return None;
    };
    if tokens.len() <= TOKENS_AT_ONCE {
        return None;
    }
    let rest = tokens.split_off(TOKENS_AT_ONCE);
    let at = TOKENS_AT_ONCE.min(logprobs.len());
    Some(Event::Tokens {
        choice: *choice,
        tokens: rest,
        logprobs: logprobs.split_off(at),
        finish: finish.take(),
    })
}

/// What tokens hold, to be counted.
fn bytes(event: &Event) -> usize {
    let Event::Tokens {
        tokens, logprobs, ..
    } = event
    else {
        return 0;
    };
    let top: usize = logprobs.iter().map(|logprob| logprob.top.len()).sum();
    size_of_val(&tokens[..])
        + logprobs.len() * size_of::<TokenLogprob>()
        + top * size_of::<TopLogprob>()
}

#[cfg(test)]
mod tests;
