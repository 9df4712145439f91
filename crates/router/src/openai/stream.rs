//! An answer as server-sent events, worded by a [`Wording`]. While there is nothing to send, a
//! comment goes out at each heartbeat.

use axum::body::Bytes;
use futures::Stream;

use super::outputs::Output;
use super::running::Running;
use super::wording::{Events, Wording};
use crate::alarm::Alarm;
use crate::error::ApiError;

type Next = Option<Result<Output, ApiError>>;

/// The events of a request. `first` is its first output; `None`: it waits for that
/// still, and a comment comes first. The request is aborted when the stream is dropped.
pub fn events<W: Wording>(
    running: Running<W>,
    first: Option<Next>,
) -> impl Stream<Item = Bytes> + Send {
    let state = State {
        running,
        next: first.map_or(Pending::Late, Pending::There),
        opened: false,
        ended: false,
        quiet: Alarm::new(),
    };
    // Boxed: it is moved for every part.
    futures::stream::unfold(Box::new(state), |mut state| async move {
        let events = state.events().await?;
        Some((events, state))
    })
}

/// What a stream begins with.
enum Pending {
    There(Next),
    /// The first output is late: its place is taken by a comment.
    Late,
    /// Nothing: the next output is to be waited for.
    Awaited,
}

struct State<W> {
    running: Running<W>,
    next: Pending,
    /// What comes before the first output was sent.
    opened: bool,
    ended: bool,
    /// Goes off when there was nothing for too long.
    quiet: Alarm,
}

impl<W: Wording> State<W> {
    /// The next bytes of the body, never none before its end.
    async fn events(&mut self) -> Option<Bytes> {
        if self.ended {
            return None;
        }
        let mut events = Events::default();
        while events.0.is_empty() {
            let next = match std::mem::replace(&mut self.next, Pending::Awaited) {
                Pending::There(next) => Some(next),
                Pending::Late => None,
                Pending::Awaited => {
                    let run = &mut self.running.run;
                    self.quiet.within(Some(run.heartbeat), run.next()).await
                }
            };
            match next {
                Some(next) => self.take(next, &mut events),
                None => events.heartbeat(),
            }
        }
        Some(events.0.into())
    }

    fn take(&mut self, next: Next, events: &mut Events) {
        let Running { wording, run } = &mut self.running;
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
