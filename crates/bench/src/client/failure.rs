//! Why a request was not answered in full.

use std::borrow::Cow;

/// Longest quotation of what a server said.
const QUOTED_CHARS: usize = 200;

/// A request's failure. Each variant is a kind that is counted by itself.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Failure {
    #[error("nobody listens at {address}")]
    Refused { address: String },
    #[error("cannot connect to {address}: {reason}")]
    Connect { address: String, reason: String },
    #[error("no TLS connection to {address}: {reason}")]
    Tls { address: String, reason: String },
    #[error("no connection to {address} after {limit_s} s")]
    ConnectTimeout { address: String, limit_s: u64 },
    #[error("HTTP {status}: {body}")]
    Status { status: u16, body: String },
    #[error("the answer is {content_type}, not an event stream: {body}")]
    NotAStream { content_type: String, body: String },
    #[error(
        "the answer has the Content-Encoding {coding}, though none was asked for: have the server \
         or a proxy before it send answers uncompressed"
    )]
    Encoded { coding: String },
    #[error("not a chunk of an answer: {event} ({reason})")]
    BadEvent { event: String, reason: String },
    #[error("error event: {message}")]
    ErrorEvent { message: String },
    #[error("the connection broke: {reason}")]
    Disconnected { reason: String },
    #[error("the stream ended after {output_tokens} tokens without a finish reason and [DONE]")]
    Truncated { output_tokens: u32 },
    #[error("the answer has no token")]
    Empty,
    #[error("not answered after {limit_s} s")]
    Timeout { limit_s: f64 },
    /// In simulated time.
    #[error("{reason}")]
    Simulated { reason: String },
    /// Not the server's fault: the run was stopped.
    #[error("the run was stopped")]
    Interrupted,
}

impl Failure {
    /// The name under which it is counted.
    pub fn kind(&self) -> Cow<'static, str> {
        Cow::Borrowed(match self {
            Self::Refused { .. } => "connection refused",
            Self::Connect { .. } => "connection failed",
            Self::Tls { .. } => "TLS failed",
            Self::ConnectTimeout { .. } => "connection timeout",
            Self::Status { status, .. } => return Cow::Owned(format!("HTTP {status}")),
            Self::NotAStream { .. } => "not a stream",
            Self::Encoded { .. } => "compressed answer",
            Self::BadEvent { .. } => "bad event",
            Self::ErrorEvent { .. } => "error event",
            Self::Disconnected { .. } => "disconnected",
            Self::Truncated { .. } => "truncated stream",
            Self::Empty => "empty answer",
            Self::Timeout { .. } => "timeout",
            Self::Simulated { .. } => "failed",
            Self::Interrupted => "interrupted",
        })
    }
}

/// The beginning of what a server sent, in one line.
pub fn quote(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let mut words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some((end, _)) = words.char_indices().nth(QUOTED_CHARS) {
        words.truncate(end);
        words.push('…');
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quotation_is_one_short_line() {
        assert_eq!(quote(b" a\n  b\xff "), "a b\u{fffd}");
        assert_eq!(quote("é".repeat(300).as_bytes()).chars().count(), 201);
    }
}
