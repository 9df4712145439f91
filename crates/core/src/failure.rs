//! What is at fault when a request fails, and whether a retry can help.

use std::fmt;

/// What is at fault. `proto/tasuki/v1/worker.proto` has the meaning of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FailureKind {
    Client,
    Model,
    Memory,
    Device,
    Transport,
    Overload,
}

/// Whether another attempt at the same request can succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// Every worker gives the same answer.
    Never,
    /// Another worker's attempt tells a broken worker from a request that fails everywhere.
    Once,
    /// As often as the router's limits allow.
    Again,
}

impl FailureKind {
    pub const ALL: [Self; 6] = [
        Self::Client,
        Self::Model,
        Self::Memory,
        Self::Device,
        Self::Transport,
        Self::Overload,
    ];

    /// Whether a retry can help. Every decision to retry reads this.
    pub fn retry(self) -> Retry {
        match self {
            Self::Client => Retry::Never,
            Self::Model => Retry::Once,
            Self::Memory | Self::Device | Self::Transport | Self::Overload => Retry::Again,
        }
    }

    /// The word in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Model => "model",
            Self::Memory => "memory",
            Self::Device => "device",
            Self::Transport => "transport",
            Self::Overload => "overload",
        }
    }

    /// The `code` of an OpenAI error body.
    pub fn code(self) -> &'static str {
        match self {
            Self::Client => "client_failure",
            Self::Model => "model_failure",
            Self::Memory => "memory_failure",
            Self::Device => "device_failure",
            Self::Transport => "transport_failure",
            Self::Overload => "overload_failure",
        }
    }
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
