//! Choices that travel together, and the legs that carry them.

use std::time::Instant;

use tasuki_core::WorkerId;
use tasuki_wire::v1::{LegEndReason, Output};

use super::io::Part;
use super::setbacks::Setbacks;
use super::timing::Account;
use crate::workers::{Seat, WorkerKey};

/// Choices that are served by one attempt at a time.
#[derive(Debug)]
pub struct Group {
    pub choices: Vec<u32>,
    pub state: GroupState,
    /// Workers that failed the group.
    pub avoid: Vec<WorkerId>,
    /// The worker that prefilled the group before, if it is still there.
    pub warm: Option<WorkerId>,
    pub setbacks: Setbacks,
    /// Of its attempts so far, and of those of the group that it was part of.
    pub account: Account,
}

#[derive(Debug)]
pub enum GroupState {
    /// For a placement, tried at `not_before`.
    Waiting {
        not_before: Instant,
        since: Instant,
        /// Nobody could take it: any change among the workers is a new chance.
        for_workers: bool,
    },
    Flying(Box<Flight>),
    /// Every choice ended and nothing is awaited.
    Landed,
}

/// One attempt.
#[derive(Debug)]
pub struct Flight {
    /// `request_id` on the wire.
    pub attempt: String,
    /// Tokens of the choices that earlier attempts produced.
    pub base: usize,
    pub prefill: Leg,
    /// None: the prefill leg is a whole one.
    pub decode: Option<Leg>,
    /// Decode workers that refused the attempt.
    pub refused_by: Vec<WorkerId>,
    pub retargeted: bool,
    /// What decode said before prefill brought the prompt's logprobs, which go first.
    pub held: Vec<Output>,
    pub submitted: Instant,
    /// Set when every choice has ended: until then the legs' own ends are awaited.
    pub settle_until: Option<Instant>,
}

#[derive(Debug)]
pub struct Leg {
    pub seat: Seat,
    pub state: LegState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LegState {
    Running,
    Ended(LegEndReason),
    Lost,
}

impl LegState {
    /// Whether the worker itself failed the leg.
    pub fn is_failure(self) -> bool {
        use LegEndReason as R;
        matches!(self, LegState::Ended(reason)
            if !matches!(reason, R::LegEndFinished | R::LegEndHandedOff | R::LegEndReturned))
    }
}

impl Leg {
    pub fn new(seat: Seat) -> Self {
        Self {
            seat,
            state: LegState::Running,
        }
    }

    pub fn is_running(&self) -> bool {
        self.state == LegState::Running
    }
}

impl Flight {
    /// The part that a worker plays now.
    pub fn part_of(&self, key: WorkerKey) -> Option<Part> {
        if self.prefill.seat.key == key {
            let whole = self.decode.is_none();
            return Some(if whole { Part::Whole } else { Part::Prefill });
        }
        let decode = self.decode.as_ref()?;
        (decode.seat.key == key).then_some(Part::Decode)
    }

    pub fn leg_mut(&mut self, part: Part) -> &mut Leg {
        match (part, &mut self.decode) {
            (Part::Decode, Some(leg)) => leg,
            _ => &mut self.prefill,
        }
    }

    pub fn legs(&self) -> impl Iterator<Item = &Leg> {
        std::iter::once(&self.prefill).chain(self.decode.as_ref())
    }

    pub fn decode_is_running(&self) -> bool {
        self.decode.as_ref().is_some_and(Leg::is_running)
    }
}

impl Group {
    pub fn waiting(choices: Vec<u32>, now: Instant) -> Self {
        Self {
            choices,
            state: GroupState::Waiting {
                not_before: now,
                since: now,
                for_workers: true,
            },
            avoid: Vec::new(),
            warm: None,
            setbacks: Setbacks::default(),
            account: Account::default(),
        }
    }

    pub fn flight(&self) -> Option<&Flight> {
        match &self.state {
            GroupState::Flying(flight) => Some(flight),
            _ => None,
        }
    }

    pub fn flight_mut(&mut self) -> Option<&mut Flight> {
        match &mut self.state {
            GroupState::Flying(flight) => Some(flight),
            _ => None,
        }
    }
}
