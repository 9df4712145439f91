//! Why a placement was chosen: its cost by parts, and that of the best one of the other kind.

use std::fmt::{Display, Formatter, Result};

/// What a request is expected to cost on one placement, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    pub prefill_s: f64,
    /// What the handoff adds; 0 where one worker does both halves.
    pub handoff_s: f64,
    pub decode_s: f64,
}

impl Cost {
    pub fn total_s(&self) -> f64 {
        self.prefill_s + self.handoff_s + self.decode_s
    }
}

/// What the best placement of the other kind costs, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Other {
    Exactly(f64),
    /// No placement of that kind can be cheaper than that, so none was looked for.
    AtLeast(f64),
}

impl Other {
    pub fn seconds(&self) -> f64 {
        match *self {
            Self::Exactly(s) | Self::AtLeast(s) => s,
        }
    }
}

/// The costs that the placement compared.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Why {
    pub chosen: Cost,
    /// Prefill and decode are on two workers.
    pub is_split: bool,
    /// `None`: there is no placement of the other kind.
    pub other: Option<Other>,
}

impl Display for Why {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let (chosen, other) = match self.is_split {
            true => ("split", "colocated"),
            false => ("colocated", "split"),
        };
        let Cost {
            prefill_s,
            handoff_s,
            decode_s,
        } = self.chosen;
        let total_ms = self.chosen.total_s() * 1e3;
        write!(
            f,
            "{chosen} {total_ms:.1} ms (prefill {:.1}",
            prefill_s * 1e3
        )?;
        if self.is_split {
            write!(f, ", handoff {:.1}", handoff_s * 1e3)?;
        }
        write!(f, ", decode {:.1})", decode_s * 1e3)?;
        match self.other {
            Some(Other::Exactly(s)) => write!(f, "; {other} {:.1} ms", s * 1e3),
            Some(Other::AtLeast(s)) => write!(f, "; {other} at least {:.1} ms", s * 1e3),
            None => Ok(()),
        }
    }
}
