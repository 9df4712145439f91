//! Words of options that choose one of several.

use clap::ValueEnum;
use tasuki_policy::{PolicyKind, Rule};

use crate::serve::OnKvLoss;
use crate::workers::RolesMode;

/// The words for [`OnKvLoss`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvLoss {
    /// Prefill again.
    Recompute,
    /// Fail the request.
    Fail,
}

/// The words for [`RolesMode`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Roles {
    /// Workers keep the roles that they were started with.
    Fixed,
    /// The router moves workers among the roles where that pays for itself.
    Follow,
}

impl From<Roles> for RolesMode {
    fn from(given: Roles) -> Self {
        match given {
            Roles::Fixed => Self::Fixed,
            Roles::Follow => Self::Follow,
        }
    }
}

/// How the access log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AccessLog {
    Off,
    /// As other lines of the log.
    Text,
    /// One JSON object a line.
    Json,
}

/// The words for [`PolicyKind`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    /// The least expected time of the request and of those that it delays.
    Cost,
    /// One worker after another.
    RoundRobin,
    /// The worker with the fewest requests.
    LeastLoaded,
    /// Of two workers that are drawn, the one with fewer requests.
    PowerOfTwo,
    /// The same worker for the requests of a tenant, or where none is named for prompts
    /// that begin alike, unless it has many more requests than others.
    ConsistentHash,
    /// The same worker for prompts that begin alike, unless it has many more requests than
    /// others.
    PrefixHash,
}

impl From<Policy> for PolicyKind {
    fn from(given: Policy) -> Self {
        match given {
            Policy::Cost => Self::Cost,
            Policy::RoundRobin => Self::Simple(Rule::RoundRobin),
            Policy::LeastLoaded => Self::Simple(Rule::LeastLoaded),
            Policy::PowerOfTwo => Self::Simple(Rule::PowerOfTwo),
            Policy::ConsistentHash => Self::Simple(Rule::ConsistentHash),
            Policy::PrefixHash => Self::Simple(Rule::PrefixHash),
        }
    }
}

impl From<KvLoss> for OnKvLoss {
    fn from(given: KvLoss) -> Self {
        match given {
            KvLoss::Recompute => Self::Recompute,
            KvLoss::Fail => Self::Fail,
        }
    }
}
