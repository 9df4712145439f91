//! Streams that have nothing to send yet, or for long, send a comment at each heartbeat.

/// A comment, which clients ignore: proxies see that the connection is alive.
pub const HEARTBEAT: &[u8] = b": the request is still being processed\n\n";

/// What a stream has to send next.
pub enum Pending<Next> {
    There(Next),
    /// The first output is late: its place is taken by a comment.
    Late,
    /// Nothing: the next output is to be waited for.
    Awaited,
}

impl<Next> Pending<Next> {
    /// `first`: the first output; `None`: it is late.
    pub fn new(first: Option<Next>) -> Self {
        first.map_or(Self::Late, Self::There)
    }

    /// Takes it: after that the next one is to be waited for.
    pub fn take(&mut self) -> Self {
        std::mem::replace(self, Self::Awaited)
    }
}
