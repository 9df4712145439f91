//! Which of several routers moves roles.
//!
//! Every role has an owner and an epoch, and workers report both to all routers. The router that
//! set the latest epoch owns the roles. It sets one again now and then, unchanged, which shows the
//! others that it is there. One that sees no new epoch for a while takes the roles over with the
//! next epoch. Of two that do so at once one prevails: both tell the worker that has the latest
//! epoch, which takes one of them and reports it to both.

use std::time::Duration;

use tasuki_core::{Role, WorkerId};

/// Begins the name of an owner that follows the load; an operator's setting has another one.
pub const OWNER_PREFIX: &str = "follow:";
/// Owner of a role that a worker started with.
const STARTED: &str = "start";
/// How often the owner shows that it is there.
const CLAIM_EVERY: Duration = Duration::from_secs(2);
/// An owner that was silent for so long is succeeded.
const SILENT_AFTER: Duration = Duration::from_secs(7);

/// Whether an operator set a role: it stays until the worker starts again.
pub fn is_pinned(owner: &str) -> bool {
    !(owner.is_empty() || owner == STARTED || owner.starts_with(OWNER_PREFIX))
}

/// A worker's role, and who set it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held<'a> {
    pub worker: WorkerId,
    pub role: Role,
    pub owner: &'a str,
    pub epoch: u64,
}

/// What this router is to do about the roles' ownership.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// They are another router's.
    Follow,
    /// They are ours.
    Own,
    /// Set this role, which the worker has already, with [`Ownership::next_epoch`].
    Set(WorkerId, Role),
}

/// What one router knows of the roles' owner.
#[derive(Debug, Clone)]
pub struct Ownership {
    name: String,
    /// The latest epoch and its owner.
    latest: (u64, String),
    /// When that was seen first.
    since: Duration,
    claimed: Option<Duration>,
    /// Times that this router became the owner.
    pub taken: u64,
    owns: bool,
}

impl Ownership {
    /// `name`: of this router; no other one may have it.
    pub fn new(name: &str, now: Duration) -> Self {
        Self {
            name: format!("{OWNER_PREFIX}{name}"),
            latest: (0, String::new()),
            since: now,
            claimed: None,
            taken: 0,
            owns: false,
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn owns(&self) -> bool {
        self.owns
    }

    /// For the next setting: later than any that a worker has.
    pub fn next_epoch(&self) -> u64 {
        self.latest.0 + 1
    }

    /// Looks at the roles that workers report.
    pub fn look<'a>(&mut self, held: impl Iterator<Item = Held<'a>>, now: Duration) -> Claim {
        let mut highest = 0;
        let mut latest: Option<Held<'a>> = None;
        let mut first: Option<Held<'a>> = None;
        for one in held {
            highest = highest.max(one.epoch);
            if !is_pinned(one.owner) {
                first.get_or_insert(one);
            }
            let later = |known: Held<'_>| (one.epoch, one.owner) > (known.epoch, known.owner);
            if one.owner.starts_with(OWNER_PREFIX) && latest.is_none_or(later) {
                latest = Some(one);
            }
        }
        let owner = latest.map_or("", |one| one.owner);
        if highest > self.latest.0 || (highest == self.latest.0 && owner != self.latest.1) {
            self.since = now;
        }
        // Where the worker with the latest one left, the epoch still counts.
        self.latest = (highest.max(self.latest.0), owner.to_owned());
        let owned = owner == self.name;
        self.taken += u64::from(owned && !self.owns);
        self.owns = owned;
        let Some(told) = latest.or(first) else {
            return Claim::Follow;
        };
        let silent = now.saturating_sub(self.since) >= SILENT_AFTER;
        let nobody = latest.is_none();
        let due = |every| {
            self.claimed
                .is_none_or(|at| now.saturating_sub(at) >= every)
        };
        let claims = if owned {
            due(CLAIM_EVERY)
        } else {
            (silent || nobody) && due(SILENT_AFTER)
        };
        if claims {
            self.claimed = Some(now);
            return Claim::Set(told.worker, told.role);
        }
        if owned { Claim::Own } else { Claim::Follow }
    }

    /// A role was set, which claims the roles too.
    pub fn on_set(&mut self, now: Duration) {
        self.claimed = Some(now);
    }
}
