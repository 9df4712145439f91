//! Least expected work among the workers able to do it.
//!
//! A placement is a pair (prefill, decode) of workers between which KV can move; both may
//! be the same one. The cost decides. A role is a small discount, which orders workers that
//! cost about the same; with strict roles it is a condition. Among equal costs an order
//! decides that each request draws anew ([`Choosing::tie`]).
//!
//! A pair's cost is a sum over its workers and the way between them, so each half is looked
//! for alone. Where the way within a machine is cheaper, a machine's own pairs are compared
//! if its prefill worker is cheap enough for that to matter.

pub(crate) mod able;
pub(crate) mod index;
mod limits;
pub(crate) mod pairs;
mod search;
mod tree;

use tasuki_core::{CostModel, WorkerId};

pub use self::index::WorkerIndex;
use crate::Why;

/// Who prefills and who decodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Placement {
    pub prefill: WorkerId,
    pub decode: WorkerId,
    /// Expected time to the last token, and that which others lose by the request; 0 where the
    /// policy computes none.
    pub cost_s: f64,
    /// The costs that were compared, if there are any.
    pub why: Option<Why>,
}

/// The best choice without the workers to avoid; where there is none, without as many of them as
/// leave one, those that failed last first.
pub(crate) fn avoiding(
    avoid: &[WorkerId],
    best: impl Fn(&[WorkerId]) -> Option<Placement>,
) -> Option<Placement> {
    if let Some(found) = best(avoid) {
        return Some(found);
    }
    let (mut found, mut avoided) = (None, Vec::new());
    for worker in avoid.iter().rev() {
        avoided.push(*worker);
        match best(&avoided) {
            None => drop(avoided.pop()),
            some => found = some,
        }
    }
    found.or_else(|| best(&[]))
}

impl Placement {
    /// Whether one worker does both.
    pub fn is_whole(&self) -> bool {
        self.prefill == self.decode
    }
}

/// How to choose.
#[derive(Debug, Clone, Copy)]
pub struct Choosing<'a> {
    pub model: &'a CostModel,
    /// Never place a leg on a worker of another role.
    pub strict_roles: bool,
    /// Orders equally good workers: each value is an order of its own.
    pub tie: u64,
}
