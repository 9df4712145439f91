//! Choices that are served together, and the legs of their attempt.

use std::time::Duration;

use tasuki_core::{FailureKind, FirstToken, HandoffKind, Payload, Positions, WorkerId};

use super::io::RetryReason;
use super::retries::RetryCounts;
use super::timing::PhaseSums;
use crate::leg::{LegEndReason, LegKind, Output};
use crate::worker_ref::{LegId, WorkerKey, WorkerRef};

/// Choices that are served by one attempt at a time.
#[derive(Debug)]
pub struct Group {
    pub choices: Vec<u32>,
    pub state: GroupState,
    /// Workers that failed the group, the last one last.
    pub avoid: Vec<WorkerId>,
    /// The worker that prefilled the group before, if it is still there.
    pub warm: Option<WorkerId>,
    pub retries: RetryCounts,
    /// Its next attempt is a retry that the budget of all requests must allow.
    pub needs_budget: bool,
    /// Of its attempts so far, and of those of the group that it was part of.
    pub phases: PhaseSums,
}

#[derive(Debug)]
pub enum GroupState {
    /// For a placement, tried at `not_before`.
    Waiting {
        not_before: Duration,
        since: Duration,
        /// No worker could take it: ask again as soon as any worker changes.
        for_workers: bool,
    },
    Running(Box<Attempt>),
    /// Every choice ended and nothing is awaited.
    Ended,
}

/// One attempt to serve a group.
#[derive(Debug)]
pub struct Attempt {
    pub number: u32,
    /// Tokens of the choices that earlier attempts produced.
    pub base: usize,
    /// The only leg when `decode` is `None`.
    pub prefill: Leg,
    pub decode: Option<Leg>,
    /// Decode workers that refused the attempt.
    pub refused_by: Vec<WorkerId>,
    pub retargeted: bool,
    /// Output of the decode leg that came before the prompt's logprobs, which go first.
    pub held: Vec<Output>,
    pub started: Duration,
    /// When the last token came, once decode has begun.
    pub last_decoded: Option<Duration>,
    /// Set when every choice has ended: until then the legs' own ends are awaited.
    pub settle_until: Option<Duration>,
}

/// One leg of an attempt.
#[derive(Debug)]
pub struct Leg {
    pub worker: WorkerRef,
    pub state: LegState,
    /// Tokens received, by choice of the group; only where positions are counted.
    received: Vec<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LegState {
    /// A decode leg that is not dispatched before there is a ticket, and perhaps elsewhere.
    AwaitingTicket,
    Running,
    Ended(LegEndReason),
    Lost,
}

impl Leg {
    pub fn new(worker: WorkerRef) -> Self {
        Self {
            worker,
            state: LegState::Running,
            received: Vec::new(),
        }
    }

    /// Where a run of `tokens` begins, if the worker leaves the counting to us. `base`: where
    /// the leg began. `choice`: an index into those of the group.
    pub fn count(&mut self, base: usize, choice: usize, tokens: usize) -> Option<usize> {
        if self.worker.capabilities.positions == Positions::Exact {
            return None;
        }
        if self.received.len() <= choice {
            self.received.resize(choice + 1, 0);
        }
        let position = base + self.received[choice];
        self.received[choice] += tokens;
        Some(position)
    }

    pub fn is_running(&self) -> bool {
        self.state == LegState::Running
    }

    /// Whether the worker itself failed the leg.
    pub fn has_failed(&self) -> bool {
        use LegEndReason as R;
        matches!(self.state, LegState::Ended(reason)
            if !matches!(reason, R::Finished | R::HandedOff | R::Returned))
    }
}

impl Attempt {
    /// What a worker does for the attempt now.
    pub fn kind_on(&self, key: WorkerKey) -> Option<LegKind> {
        if self.prefill.worker.key == key {
            let colocated = self.decode.is_none();
            return Some(if colocated {
                LegKind::Colocated
            } else {
                LegKind::Prefill
            });
        }
        let decode = self.decode.as_ref()?;
        (decode.worker.key == key).then_some(LegKind::Decode)
    }

    pub fn leg_mut(&mut self, kind: LegKind) -> &mut Leg {
        match (kind, &mut self.decode) {
            (LegKind::Decode, Some(leg)) => leg,
            _ => &mut self.prefill,
        }
    }

    pub fn legs(&self) -> impl Iterator<Item = &Leg> {
        std::iter::once(&self.prefill).chain(self.decode.as_ref())
    }

    pub fn decode_is_running(&self) -> bool {
        self.decode.as_ref().is_some_and(Leg::is_running)
    }

    /// Whether prefill runs to its end before decode begins.
    pub fn is_serial(&self) -> bool {
        self.prefill.worker.capabilities.handoff == HandoffKind::Ticket
    }

    /// Whether output of the decode leg begins with the first token that clients get.
    pub fn decode_is_first(&self) -> bool {
        let worker = &self.prefill.worker;
        self.decode.is_some() && worker.capabilities.first_token == FirstToken::Decode
    }

    /// The leg that decodes.
    pub fn decoding(&self) -> &Leg {
        self.decode.as_ref().unwrap_or(&self.prefill)
    }

    /// When its worker counts as stalled, if no token comes before. `limit`: without a token.
    pub fn stalled_at(&self, limit: Option<Duration>) -> Option<Duration> {
        let leg = self.decoding();
        let watched = leg.worker.capabilities.payload == Payload::Tokens;
        let running = leg.is_running() && self.settle_until.is_none();
        let since = self.last_decoded.filter(|_| watched && running)?;
        since.checked_add(limit?)
    }

    /// Workers that the next attempt avoids; the one to be avoided most is the last.
    ///
    /// A handoff that fails may be the fault of either side. Those that refused before the decode
    /// leg was sent elsewhere come first.
    pub fn at_fault(&self, reason: RetryReason) -> Vec<WorkerId> {
        let lost = LegState::Ended(LegEndReason::KvLost);
        let of_handoff = self.decode.as_ref().is_some_and(|decode| match reason {
            RetryReason::Failed(kind) => kind == FailureKind::Transport,
            // With the prefill worker gone its KV is, too.
            _ => decode.state == lost && self.prefill.state != LegState::Lost,
        });
        let failed = matches!(reason, RetryReason::Failed(_) | RetryReason::Refused);
        let legs = self.decode.iter().chain([&self.prefill]);
        let legs = legs.filter(|leg| of_handoff || (failed && leg.has_failed()));
        let legs: Vec<WorkerId> = legs.map(|leg| leg.worker.key.worker).collect();
        let refused = self.refused_by.iter().copied();
        let mut at_fault: Vec<WorkerId> = refused.filter(|one| !legs.contains(one)).collect();
        at_fault.extend(legs);
        at_fault
    }

    /// The name of this attempt's leg on a worker.
    pub fn leg_on(&self, worker: WorkerKey) -> LegId {
        LegId {
            worker,
            attempt: self.number,
        }
    }
}

impl Group {
    pub fn waiting(choices: Vec<u32>) -> Self {
        Self {
            choices,
            state: GroupState::Waiting {
                not_before: Duration::ZERO,
                since: Duration::ZERO,
                for_workers: true,
            },
            avoid: Vec::new(),
            warm: None,
            retries: RetryCounts::default(),
            needs_budget: false,
            phases: PhaseSums::default(),
        }
    }

    /// When something has to happen by itself. `stalled`: how long decode goes without a token.
    pub fn deadline(&self, stalled: Option<Duration>) -> Option<Duration> {
        match &self.state {
            GroupState::Waiting { not_before, .. } => Some(*not_before),
            GroupState::Running(attempt) => {
                attempt.settle_until.or_else(|| attempt.stalled_at(stalled))
            }
            GroupState::Ended => None,
        }
    }

    pub fn attempt(&self) -> Option<&Attempt> {
        match &self.state {
            GroupState::Running(attempt) => Some(attempt),
            _ => None,
        }
    }

    pub fn attempt_mut(&mut self) -> Option<&mut Attempt> {
        match &mut self.state {
            GroupState::Running(attempt) => Some(attempt),
            _ => None,
        }
    }
}
