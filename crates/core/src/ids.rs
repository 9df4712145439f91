//! Names of things that are cheap to copy.

use std::fmt;

/// A worker's address in the deployment. It outlives restarts of the process there; when the
/// address leaves the deployment, its id is never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u32);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A model's place in the list of those that are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ModelId(pub u32);

/// The name of a model with its weights and dtypes, as far as KV depends on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Identity(pub [u8; 16]);

impl Identity {
    /// From the wire; `None` when it is not 16 bytes long.
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

/// Between whom KV can move: workers of equal domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct KvDomain {
    /// The protocol in which workers exchange KV.
    pub backend: &'static str,
    /// The model, its weights and dtypes.
    pub identity: Identity,
}

/// What a worker is preferred for. Every worker can do everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    Prefill,
    Decode,
    Mixed,
}

impl Role {
    /// Whether the role asks for prefill legs.
    pub fn prefills(self) -> bool {
        matches!(self, Role::Prefill | Role::Mixed)
    }

    /// Whether the role asks for decode legs.
    pub fn decodes(self) -> bool {
        matches!(self, Role::Decode | Role::Mixed)
    }

    /// The word used in configuration, logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Mixed => "mixed",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
