//! Offers of workers for one half of a request, and pairs of them.

use std::cmp::Ordering;

use tasuki_core::{CostModel, RequestView, WorkerId, mix};

use super::Placement;
use crate::{Cost, Other, Why};

/// A worker and what one half of the request costs there.
#[derive(Debug, Clone, Copy)]
pub struct Offer {
    pub id: WorkerId,
    pub machine: u32,
    pub cost_s: f64,
    /// Among equal costs.
    order: u64,
}

impl Offer {
    pub fn new(id: WorkerId, machine: u32, cost_s: f64, tie: &Tie) -> Self {
        Self {
            id,
            machine,
            cost_s,
            order: tie.order(id),
        }
    }

    pub fn compare(&self, other: &Self) -> Ordering {
        let costs = self.cost_s.total_cmp(&other.cost_s);
        costs.then_with(|| self.order.cmp(&other.order))
    }

    /// The cheaper one of two.
    pub fn cheaper(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        one.into_iter().chain(other).min_by(Self::compare)
    }
}

/// An order of workers of equal cost.
#[derive(Debug, Clone, Copy)]
pub struct Tie(u64);

impl Tie {
    /// Each number is an order of its own.
    pub fn new(tie: u64) -> Self {
        Self(mix(tie))
    }

    pub fn order(&self, id: WorkerId) -> u64 {
        mix(u64::from(id.0) ^ self.0)
    }

    /// Whether the offer of a worker at a cost would come before another one.
    pub fn precedes(&self, (cost_s, id): (f64, WorkerId), other: &Offer) -> bool {
        cost_s < other.cost_s || (cost_s == other.cost_s && self.order(id) < other.order)
    }
}

/// What handoffs of one request add.
#[derive(Debug, Clone)]
pub struct Handoffs {
    /// Which workers have part of the prompt, and what handoffs to each add.
    warm: Vec<(WorkerId, Ways)>,
    cold: Ways,
    /// It matters on which machine a decode worker is.
    pub prefer_machines: bool,
}

#[derive(Debug, Clone, Copy)]
struct Ways {
    within_machine_s: f64,
    between_machines_s: f64,
}

impl Handoffs {
    pub fn new(model: &CostModel, request: &RequestView) -> Self {
        let ways = |held| Ways {
            within_machine_s: model.handoff_s(request, held, true),
            between_machines_s: model.handoff_s(request, held, false),
        };
        let warm = request.warm.iter();
        let warm: Vec<_> = warm.map(|warm| (warm.worker, ways(warm.tokens))).collect();
        let cold = ways(0);
        let prefers = |ways: &Ways| ways.within_machine_s < ways.between_machines_s;
        let prefer_machines = prefers(&cold) || warm.iter().any(|(_, ways)| prefers(ways));
        Self {
            prefer_machines,
            warm,
            cold,
        }
    }

    pub fn is_warm(&self, worker: WorkerId) -> bool {
        self.warm.iter().any(|(warm, _)| *warm == worker)
    }

    /// What a handoff from a worker of one machine adds. 0 is no machine.
    pub fn added_s(&self, from_machine: u32, decode: &Offer) -> f64 {
        let warm = self.warm.iter().find(|(warm, _)| *warm == decode.id);
        let ways = warm.map_or(&self.cold, |(_, ways)| ways);
        if from_machine == decode.machine && from_machine != 0 {
            ways.within_machine_s
        } else {
            ways.between_machines_s
        }
    }

    /// To any worker but the warm ones.
    pub fn between_machines_s(&self) -> f64 {
        self.cold.between_machines_s
    }

    /// What a handoff adds at least.
    pub fn least_s(&self) -> f64 {
        let ways = self.warm.iter().map(|(_, ways)| ways).chain([&self.cold]);
        ways.map(|ways| ways.within_machine_s)
            .fold(f64::INFINITY, f64::min)
    }

    /// What a pair of workers costs at least, by its halves; not with a warm decode worker.
    pub fn at_least_s(&self, prefill_s: f64, decode_s: f64) -> f64 {
        prefill_s + self.cold.within_machine_s + decode_s
    }
}

/// Two workers, and what the request costs on them.
#[derive(Debug, Clone, Copy)]
pub struct Pair {
    prefill: Offer,
    decode: Offer,
    pub cost_s: f64,
}

impl Pair {
    /// `None` where there are not two workers.
    pub fn of(prefill: Option<Offer>, decode: Option<Offer>, handoffs: &Handoffs) -> Option<Self> {
        let (prefill, decode) = prefill.zip(decode)?;
        let handoff_s = handoffs.added_s(prefill.machine, &decode);
        (prefill.id != decode.id).then_some(Self {
            prefill,
            decode,
            cost_s: prefill.cost_s + handoff_s + decode.cost_s,
        })
    }

    /// No pair of this prefill worker precedes it, if none decodes before `decode`.
    pub fn at_least(prefill: Offer, decode: Offer, handoffs: &Handoffs) -> Self {
        Self {
            prefill,
            decode,
            cost_s: handoffs.at_least_s(prefill.cost_s, decode.cost_s),
        }
    }

    pub fn compare(&self, other: &Self) -> Ordering {
        let costs = self.cost_s.total_cmp(&other.cost_s);
        costs
            .then_with(|| self.prefill.compare(&other.prefill))
            .then_with(|| self.decode.compare(&other.decode))
    }

    /// The cheaper one of two.
    pub fn cheaper(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        one.into_iter().chain(other).min_by(Self::compare)
    }

    /// These two are chosen, and not `one`.
    pub fn placement(&self, one: Option<Offer>) -> Placement {
        let chosen = Cost {
            prefill_s: self.prefill.cost_s,
            handoff_s: self.cost_s - self.prefill.cost_s - self.decode.cost_s,
            decode_s: self.decode.cost_s,
        };
        Placement {
            prefill: self.prefill.id,
            decode: self.decode.id,
            cost_s: self.cost_s,
            why: Some(Why {
                chosen,
                is_split: true,
                other: one.map(|one| Other::Exactly(one.cost_s)),
            }),
        }
    }
}
