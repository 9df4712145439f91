//! The messages to a worker of our own, from the registry to the task of its gRPC stream.
//!
//! ```text
//!  registry ──send──▶ GrpcLink ──channel──▶ outgoing() ──▶ tonic, as fast as the worker reads
//!                        └────── Backlog ◀──┘
//!                                   └─▶ connect: too much waits, so the connection ends
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tasuki_core::Role;
use tasuki_flow::{Grammar, LegSpec, Peer};
use tasuki_wire::v1::RouterMessage;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_stream::{Stream, StreamExt as _};

use super::link::{NewLeg, WorkerLink};
use super::local_leg::LocalLeg;
use super::wire;

/// What may wait for one worker: prompts of 64 million tokens. A worker that reads never has so
/// much waiting. One that does not read, but still reports, is lost then, and its requests go
/// elsewhere.
pub const MOST_BACKLOG_BYTES: usize = 256 << 20;

/// The sending half of a gRPC stream to a worker.
#[derive(Debug)]
pub struct GrpcLink {
    channel: UnboundedSender<Outgoing>,
    backlog: Arc<Backlog>,
}

/// What a worker has not read yet.
#[derive(Debug, Default)]
pub struct Backlog {
    bytes: AtomicUsize,
    exceeded: Notify,
}

/// A message to a worker. It becomes one of the wire in the task of the stream: that copies the
/// prompt, and the registry is locked while a leg is dispatched.
#[derive(Debug)]
pub enum Outgoing {
    Dispatch(String, u64, LegSpec),
    Abort(String, Vec<u32>),
    Retarget(String, Peer),
    SetRole(Role, String, u64),
    ResyncCache,
    FlushCache,
}

/// A link, and the stream of its messages.
pub fn link() -> (
    GrpcLink,
    impl Stream<Item = RouterMessage> + Send + use<>,
    Arc<Backlog>,
) {
    let (channel, receiver) = unbounded_channel();
    let backlog = Arc::new(Backlog::default());
    let link = GrpcLink {
        channel,
        backlog: Arc::clone(&backlog),
    };
    let taken = Arc::clone(&backlog);
    let messages = UnboundedReceiverStream::new(receiver).map(move |message: Outgoing| {
        taken.bytes.fetch_sub(message.bytes(), Ordering::Relaxed);
        wire::outgoing(message)
    });
    (link, messages, backlog)
}

impl Backlog {
    /// Returns when more than [`MOST_BACKLOG_BYTES`] wait. For one task.
    pub async fn exceeded(&self) {
        self.exceeded.notified().await;
    }
}

impl GrpcLink {
    /// False: the stream has ended, or is about to.
    fn send(&self, message: Outgoing) -> bool {
        let new = message.bytes();
        let waiting = self.backlog.bytes.fetch_add(new, Ordering::Relaxed) + new;
        if waiting > MOST_BACKLOG_BYTES {
            self.backlog.exceeded.notify_one();
            return false;
        }
        self.channel.send(message).is_ok()
    }
}

impl Outgoing {
    /// What it holds, about. The rest of a leg is small, or shared with its request.
    fn bytes(&self) -> usize {
        let content = match self {
            Self::Dispatch(_, _, spec) => {
                let text = match &spec.sampling.grammar {
                    None => 0,
                    Some(
                        Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text),
                    ) => text.len(),
                };
                size_of_val(&spec.prompt[..]) + size_of_val(&spec.resumed[..]) + text
            }
            Self::Abort(_, choices) => size_of_val(&choices[..]),
            Self::Retarget(..) | Self::SetRole(..) | Self::ResyncCache | Self::FlushCache => 0,
        };
        size_of::<Self>() + content
    }
}

impl WorkerLink for GrpcLink {
    // A message that is not sent: the stream's task is about to report the loss.

    fn dispatch(&self, leg: NewLeg<'_>, spec: LegSpec) -> Option<LocalLeg> {
        let name = leg.name.to_owned();
        self.send(Outgoing::Dispatch(name, leg.slot.number, spec));
        None
    }

    fn abort(&self, request_id: &str, choices: Vec<u32>) {
        self.send(Outgoing::Abort(request_id.to_owned(), choices));
    }

    fn retarget(&self, request_id: &str, peer: Peer) {
        self.send(Outgoing::Retarget(request_id.to_owned(), peer));
    }

    fn set_role(&self, role: Role, owner: &str, epoch: u64) {
        self.send(Outgoing::SetRole(role, owner.to_owned(), epoch));
    }

    fn resync_cache(&self) {
        self.send(Outgoing::ResyncCache);
    }

    fn flush_cache(&self) -> bool {
        self.send(Outgoing::FlushCache)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::FutureExt as _;
    use tasuki_flow::LegKind;

    use super::*;
    use crate::workers::tests::spec;

    #[tokio::test]
    async fn only_what_was_not_read_counts() {
        let (link, messages, backlog) = link();
        let mut messages = pin!(messages);
        let dispatch = || {
            let spec = LegSpec {
                prompt: vec![0; (MOST_BACKLOG_BYTES / 4) / 4].into(),
                ..spec(LegKind::Prefill)
            };
            link.send(Outgoing::Dispatch("r".to_owned(), 0, spec))
        };
        for _ in 0..5 {
            assert!(dispatch());
            assert!(messages.next().await.is_some());
        }
        assert!((0..3).all(|_| dispatch()));
        assert!(backlog.exceeded().now_or_never().is_none());
        assert!(!dispatch());
        assert!(backlog.exceeded().now_or_never().is_some());
    }
}
