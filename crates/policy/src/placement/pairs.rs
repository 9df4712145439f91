//! The cheapest pair of two workers. A pair's cost is a sum over its workers and the way
//! between them, so each half is looked for alone, and the time is linear in the workers.

use std::cmp::Ordering;

use tasuki_core::{CostModel, RequestView, WorkerId, WorkerView};

use super::{Placement, same_machine};

/// A worker and what one half of the request costs there.
#[derive(Debug, Clone, Copy)]
pub struct Offer {
    pub id: WorkerId,
    machine: u32,
    pub cost_s: f64,
    tie: u64,
}

impl Offer {
    pub fn new(worker: &WorkerView, cost_s: f64, tie: u64) -> Self {
        Self {
            id: worker.id,
            machine: worker.machine,
            cost_s,
            tie,
        }
    }

    fn compare(&self, other: &Self) -> Ordering {
        let costs = self.cost_s.total_cmp(&other.cost_s);
        costs.then_with(|| self.order().cmp(&other.order()))
    }

    /// Among equal costs.
    fn order(&self) -> u64 {
        mix(u64::from(self.id.0) ^ mix(self.tie))
    }
}

/// A bijection that leaves no pattern (splitmix64's).
fn mix(value: u64) -> u64 {
    let mut x = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The two cheapest offers: where one worker is the cheapest for both halves, a pair has
/// the second one.
#[derive(Debug, Clone, Copy, Default)]
pub struct Least {
    pub first: Option<Offer>,
    second: Option<Offer>,
}

impl Least {
    pub fn add(&mut self, offer: Offer) {
        let less = |than: &Option<Offer>| than.is_none_or(|than| offer.compare(&than).is_lt());
        if less(&self.first) {
            self.second = self.first.replace(offer);
        } else if less(&self.second) {
            self.second = Some(offer);
        }
    }

    fn iter(&self) -> impl Iterator<Item = Offer> {
        self.first.into_iter().chain(self.second)
    }
}

/// What handoffs of one request add.
#[derive(Debug, Clone, Copy)]
pub struct Handoffs {
    /// Which worker has part of the prompt, and what handoffs to it add.
    warm: Option<(WorkerId, Ways)>,
    cold: Ways,
    /// It matters on which machine a decode worker is.
    prefer_machines: bool,
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
        let warm = request.warm.map(|warm| (warm.worker, ways(warm.tokens)));
        let cold = ways(0);
        let mut all = [cold].into_iter().chain(warm.map(|(_, ways)| ways));
        Self {
            warm,
            cold,
            prefer_machines: all.any(|ways| ways.within_machine_s < ways.between_machines_s),
        }
    }

    fn is_warm(&self, worker: WorkerId) -> bool {
        self.warm.is_some_and(|(warm, _)| warm == worker)
    }

    /// What a handoff from a worker of one machine adds.
    pub fn added_s(&self, from_machine: u32, decode: &Offer) -> f64 {
        let ways = match self.warm {
            Some((warm, ways)) if warm == decode.id => ways,
            _ => self.cold,
        };
        if same_machine(from_machine, decode.machine) {
            ways.within_machine_s
        } else {
            ways.between_machines_s
        }
    }
}

/// Offers for one half, as far as they can be part of the cheapest pair.
#[derive(Debug, Clone, Default)]
pub struct Side {
    least: Least,
    /// By machine, where it matters; 0 stays empty.
    by_machine: Vec<Least>,
    warm: Option<Offer>,
}

impl Side {
    pub fn add(&mut self, offer: Offer, handoffs: &Handoffs) {
        self.least.add(offer);
        let machine = offer.machine as usize;
        if machine != 0 && handoffs.prefer_machines {
            if machine >= self.by_machine.len() {
                self.by_machine.resize(machine + 1, Least::default());
            }
            self.by_machine[machine].add(offer);
        }
        if handoffs.is_warm(offer.id) {
            self.warm = Some(offer);
        }
    }

    /// The cheapest pair of this side's workers, which prefill, with the other's.
    pub fn with(&self, decode: &Self, handoffs: &Handoffs) -> Option<Pair> {
        let pairs = |prefill: &Least, decode: &Least, warm: Option<Offer>| {
            let mut best: Option<Pair> = None;
            for other in decode.iter().chain(warm) {
                for one in prefill.iter().filter(|one| one.id != other.id) {
                    let pair = Pair::new(one, other, handoffs);
                    if best.is_none_or(|best| pair.compare(&best).is_lt()) {
                        best = Some(pair);
                    }
                }
            }
            best
        };
        let machines = (0u32..).zip(self.by_machine.iter().zip(&decode.by_machine));
        let within = machines.filter_map(|(machine, (prefill, others))| {
            let warm = decode.warm.filter(|warm| warm.machine == machine);
            pairs(prefill, others, warm)
        });
        let anywhere = pairs(&self.least, &decode.least, decode.warm);
        within.chain(anywhere).min_by(Pair::compare)
    }
}

/// Two workers, and what the request costs on them.
#[derive(Debug, Clone, Copy)]
pub struct Pair {
    prefill: Offer,
    decode: Offer,
    cost_s: f64,
}

impl Pair {
    fn new(prefill: Offer, decode: Offer, handoffs: &Handoffs) -> Self {
        let handoff_s = handoffs.added_s(prefill.machine, &decode);
        Self {
            prefill,
            decode,
            cost_s: prefill.cost_s + handoff_s + decode.cost_s,
        }
    }

    pub fn compare(&self, other: &Self) -> Ordering {
        let costs = self.cost_s.total_cmp(&other.cost_s);
        costs
            .then_with(|| self.prefill.compare(&other.prefill))
            .then_with(|| self.decode.compare(&other.decode))
    }

    pub fn placement(&self) -> Placement {
        Placement {
            prefill: self.prefill.id,
            decode: self.decode.id,
            cost_s: self.cost_s,
        }
    }
}
