//! Finds the cheapest placement in an index.

use tasuki_core::{Load, ModelId, RequestView, WorkerId, WorkerView};

use super::able::{Able, Domain, able_groups, no_placement};
use super::index::{Member, Place, WorkerIndex};
use super::pairs::{Handoffs, Offer, Pair, Tie};
use super::{Choosing, Placement, avoiding};
use crate::{Cost, NoPlacement, Other, Policy, Why};

impl Policy for WorkerIndex {
    fn update(&mut self, model: ModelId, worker: &WorkerView) {
        self.set(model, worker);
    }

    fn remove(&mut self, worker: WorkerId) {
        self.take(worker);
    }

    fn place(&self, request: &RequestView, how: Choosing<'_>) -> Result<Placement, NoPlacement> {
        let search = Search::new(self, request, how);
        avoiding(&request.avoid, |avoid| search.best(avoid))
            .ok_or_else(|| no_placement(self, &search.able, request, how))
    }

    fn place_decode(
        &self,
        request: &RequestView,
        prefill: WorkerId,
        tried: &[WorkerId],
        how: Choosing<'_>,
    ) -> Option<WorkerId> {
        let domain = self.domain_of(prefill, request)?;
        let machine = self.member(self.place_of(prefill)?)?.machine;
        let search = Search::new(self, request, how);
        search.decode_after(prefill, machine, domain, tried)
    }
}

/// A search for one request.
struct Search<'a> {
    index: &'a WorkerIndex,
    request: &'a RequestView,
    handoffs: Handoffs,
    /// Groups with a worker that takes the request.
    able: Vec<Able<'a>>,
    split: bool,
    tie: Tie,
}

impl<'a> Search<'a> {
    fn new(index: &'a WorkerIndex, request: &'a RequestView, how: Choosing<'_>) -> Self {
        Self {
            able: able_groups(index, request, how),
            handoffs: Handoffs::new(how.model, request),
            split: request.max_tokens > 1,
            index,
            request,
            tie: Tie::new(how.tie),
        }
    }

    fn best(&self, avoid: &[WorkerId]) -> Option<Placement> {
        let one = self.whole(avoid);
        if !self.split || (self.request.keep_whole && one.is_some()) {
            return one.map(|one| self.on_one(one, None));
        }
        let mut two: Option<Pair> = None;
        let mut least_s = f64::INFINITY;
        for (at, able) in self.able.iter().enumerate() {
            let before = &self.able[..at];
            let new = before.iter().all(|known| known.domain != able.domain);
            let Some(domain) = able.domain.filter(|_| new) else {
                continue;
            };
            let floor_s = self.floor_s(domain);
            let may_be_cheaper = one.is_none_or(|one| floor_s < one.cost_s);
            if may_be_cheaper {
                two = Pair::cheaper(two, self.pair(domain, avoid));
            } else if self.workers_of(domain) > 1 {
                least_s = least_s.min(floor_s);
            }
        }
        match (one, two) {
            (Some(one), Some(two)) if two.cost_s < one.cost_s => Some(two.placement(Some(one))),
            (Some(one), two) => {
                let floor = least_s.is_finite().then_some(Other::AtLeast(least_s));
                let compared = two.map(|two| Other::Exactly(two.cost_s));
                Some(self.on_one(one, compared.or(floor)))
            }
            (None, two) => two.map(|two| two.placement(None)),
        }
    }

    /// How many workers a domain has, those included that are not ready.
    fn workers_of(&self, domain: Domain) -> usize {
        let able = self.able.iter();
        let of_domain = able.filter(|able| able.domain == Some(domain));
        of_domain.map(|able| able.group.len()).sum()
    }

    /// One worker is chosen, and not two of `other`.
    fn on_one(&self, one: Offer, other: Option<Other>) -> Placement {
        let place = self.index.place_of(one.id);
        let prefill_s = place.and_then(|place| self.able_at(place));
        let prefill_s = prefill_s.map_or(0.0, |(able, member)| {
            able.prefill_s(&member.load, self.request.cached_tokens(one.id))
        });
        let chosen = Cost {
            prefill_s,
            handoff_s: 0.0,
            decode_s: one.cost_s - prefill_s,
        };
        Placement {
            prefill: one.id,
            decode: one.id,
            cost_s: one.cost_s,
            why: Some(Why {
                chosen,
                is_split: false,
                other,
            }),
        }
    }

    /// What no pair within a domain costs less than.
    fn floor_s(&self, domain: Domain) -> f64 {
        let warm = self.request.warm.iter();
        let cached = warm.map(|warm| self.request.cached_tokens(warm.worker));
        let cached = cached.max().unwrap_or(0);
        let (mut prefill_s, mut decode_s) = (f64::INFINITY, f64::INFINITY);
        for able in self.able.iter().filter(|able| able.domain == Some(domain)) {
            if able.may_prefill {
                prefill_s = able.prefill_s(&able.least, cached).min(prefill_s);
            }
            if able.may_decode {
                decode_s = able.decode_s(&able.least, false).min(decode_s);
            }
        }
        prefill_s + self.handoffs.least_s() + decode_s
    }

    /// The cheapest worker for both halves.
    fn whole(&self, avoid: &[WorkerId]) -> Option<Offer> {
        let may = |able: &Able| able.may_prefill && (able.may_decode || !self.split);
        let skip = |member: &Member| avoid.contains(&member.id);
        let cold = self.least(may, |able, load| able.whole_s(load, 0), skip);
        let warm = self.warm(avoid).filter(|(able, _)| may(able));
        let warm = warm.map(|(able, member)| {
            let cached = self.request.cached_tokens(member.id);
            self.offer(member, able.whole_s(&member.load, cached))
        });
        cold.into_iter().chain(warm).min_by(Offer::compare)
    }

    /// The cheapest pair within a domain, if one may be cheaper than any worker alone.
    ///
    /// Where a worker is the cheapest for both halves, no pair is cheaper than that worker.
    fn pair(&self, domain: Domain, avoid: &[WorkerId]) -> Option<Pair> {
        let prefill = self.prefill(domain, avoid)?;
        let decode = self.decode(domain, avoid);
        let mut best = Pair::of(Some(prefill), decode, &self.handoffs);
        let mut evaluated = Machines::default();
        for (able, member) in self
            .warm(avoid)
            .filter(|(able, _)| able.domain == Some(domain))
        {
            if able.may_decode {
                let warm = self.offer(member, able.decode_s(&member.load, false));
                let pair = Pair::of(Some(prefill), Some(warm), &self.handoffs);
                best = Pair::cheaper(best, pair);
            }
            if self.handoffs.prefer_machines && evaluated.add(member.machine) {
                best = Pair::cheaper(best, self.within(member.machine, domain, avoid));
            }
        }
        let machines = self.handoffs.prefer_machines;
        match (best, decode) {
            (Some(best), Some(decode)) if machines && decode.id != prefill.id => {
                Some(self.any_machine(best, (prefill, decode), domain, avoid, evaluated))
            }
            _ => best,
        }
    }

    /// `best`, or a cheaper pair within a machine. `least` are the cheapest offers for either
    /// half.
    fn any_machine(
        &self,
        mut best: Pair,
        least: (Offer, Offer),
        domain: Domain,
        avoid: &[WorkerId],
        mut evaluated: Machines,
    ) -> Pair {
        let (prefill, decode) = least;
        let mut consider = |machine: u32, best: Pair| {
            if evaluated.add(machine) && self.index.on_machine(machine).len() > 1 {
                let pair = self.within(machine, domain, avoid);
                Pair::cheaper(Some(best), pair).unwrap_or(best)
            } else {
                best
            }
        };
        best = consider(prefill.machine, best);
        // A prefill worker that would not be cheaper with the cheapest decode worker beside it
        // is in no better pair.
        let floor = |prefill: Offer| Pair::at_least(prefill, decode, &self.handoffs);
        if best.compare(&floor(prefill)).is_le() {
            return best;
        }
        let tokens = self.request.total_tokens();
        let of_domain = || self.able.iter().filter(|a| a.domain == Some(domain));
        for able in of_domain().filter(|able| able.may_prefill) {
            let neighbours = of_domain().filter(|other| {
                other.may_decode && self.index.are_neighbours(able.number, other.number)
            });
            let decode_s = neighbours.map(|other| other.decode_s(&other.least, false));
            let Some(decode_s) = decode_s.min_by(f64::total_cmp) else {
                continue;
            };
            let decode_s = decode_s.max(decode.cost_s);
            let floor_s = |load: &Load| {
                let prefill_s = able.prefill_s(load, 0);
                self.handoffs.at_least_s(prefill_s, decode_s)
            };
            let tree = &able.group.tree;
            tree.search(tokens, best.cost_s, floor_s, |slot, _| {
                if let Some(member) = able.group.member(slot)
                    && !avoid.contains(&member.id)
                {
                    let prefill = self.offer(member, able.prefill_s(&member.load, 0));
                    if floor(prefill).compare(&best).is_lt() {
                        best = consider(member.machine, best);
                    }
                }
                best.cost_s
            });
        }
        best
    }

    /// The cheapest pair of workers of one machine, if one may be cheaper than any worker alone.
    fn within(&self, machine: u32, domain: Domain, avoid: &[WorkerId]) -> Option<Pair> {
        let (mut prefill, mut decode, mut warm) = (None, None, Vec::new());
        for &place in self.index.on_machine(machine) {
            let Some((able, member)) = self.able_at(place) else {
                continue;
            };
            if able.domain != Some(domain) || avoid.contains(&member.id) {
                continue;
            }
            if able.may_prefill {
                let cached = self.request.cached_tokens(member.id);
                let offer = self.offer(member, able.prefill_s(&member.load, cached));
                prefill = Offer::cheaper(prefill, Some(offer));
            }
            if able.may_decode {
                let offer = self.offer(member, able.decode_s(&member.load, false));
                if self.handoffs.is_warm(member.id) {
                    warm.push(offer);
                } else {
                    decode = Offer::cheaper(decode, Some(offer));
                }
            }
        }
        let decode = warm.into_iter().chain(decode);
        let pairs = decode.filter_map(|decode| Pair::of(prefill, Some(decode), &self.handoffs));
        pairs.min_by(Pair::compare)
    }

    /// The cheapest decode worker for what `prefill`, a worker of that machine, does.
    fn decode_after(
        &self,
        prefill: WorkerId,
        machine: u32,
        domain: Domain,
        tried: &[WorkerId],
    ) -> Option<WorkerId> {
        let may = |able: &Able| able.may_decode && able.domain == Some(domain);
        let skip = |member: &Member| member.id == prefill || tried.contains(&member.id);
        let far_s = self.handoffs.between_machines_s();
        let mut best = self.least(may, |able, load| able.decode_s(load, false) + far_s, skip);
        // To these the way may be cheaper.
        let near = self.index.on_machine(machine).iter();
        let near = near.filter_map(|place| self.able_at(*place));
        for (able, member) in near.chain(self.warm(&[])) {
            if may(able) && !skip(member) {
                let mut offer = self.offer(member, able.decode_s(&member.load, false));
                offer.cost_s += self.handoffs.added_s(machine, &offer);
                best = Offer::cheaper(best, Some(offer));
            }
        }
        best.map(|offer| offer.id)
    }

    fn prefill(&self, domain: Domain, avoid: &[WorkerId]) -> Option<Offer> {
        let may = |able: &Able| able.may_prefill && able.domain == Some(domain);
        let skip = |member: &Member| avoid.contains(&member.id);
        let cold = self.least(may, |able, load| able.prefill_s(load, 0), skip);
        let warm = self.warm(avoid).filter(|(able, _)| may(able));
        let warm = warm.map(|(able, member)| {
            let cached = self.request.cached_tokens(member.id);
            self.offer(member, able.prefill_s(&member.load, cached))
        });
        cold.into_iter().chain(warm).min_by(Offer::compare)
    }

    fn decode(&self, domain: Domain, avoid: &[WorkerId]) -> Option<Offer> {
        let may = |able: &Able| able.may_decode && able.domain == Some(domain);
        let skip = |member: &Member| avoid.contains(&member.id);
        self.least(may, |able, load| able.decode_s(load, false), skip)
    }

    /// The cheapest worker of the groups that may, but for those to skip.
    fn least(
        &self,
        may: impl Fn(&Able) -> bool,
        cost_s: impl Fn(&Able, &Load) -> f64,
        skip: impl Fn(&Member) -> bool,
    ) -> Option<Offer> {
        let mut best: Option<Offer> = None;
        let tokens = self.request.total_tokens();
        let groups = self.able.iter().filter(|able| may(able));
        let least_s = |able: &Able| cost_s(able, &able.least);
        let first = groups
            .clone()
            .min_by(|one, other| least_s(one).total_cmp(&least_s(other)));
        let number = first.map(|able| able.number);
        let others = groups.filter(|able| Some(able.number) != number);
        for able in first.into_iter().chain(others) {
            let cost_s = |load: &Load| cost_s(able, load);
            let limit_s = |best: Option<Offer>| best.map_or(f64::INFINITY, |best| best.cost_s);
            let tree = &able.group.tree;
            tree.search(tokens, limit_s(best), cost_s, |slot, cost_s| {
                let id = able.group.ids[slot];
                if best.is_none_or(|best| self.tie.precedes((cost_s, id), &best))
                    && let Some(member) = able.group.member(slot)
                    && self.request.allows(id)
                    && !skip(member)
                {
                    best = Some(self.offer(member, cost_s));
                }
                limit_s(best)
            });
        }
        best
    }

    fn offer(&self, member: &Member, cost_s: f64) -> Offer {
        Offer::new(member.id, member.machine, cost_s, &self.tie)
    }

    /// The workers that have part of the prompt and take the request.
    fn warm(&self, avoid: &[WorkerId]) -> impl Iterator<Item = (&Able<'a>, &'a Member)> {
        let warm = self.request.warm.iter().map(|warm| warm.worker);
        let warm = warm.filter(|worker| !avoid.contains(worker));
        warm.filter_map(|worker| self.able_at(self.index.place_of(worker)?))
    }

    /// A worker, if it takes the request.
    fn able_at(&self, place: Place) -> Option<(&Able<'a>, &'a Member)> {
        let able = self.able.iter().find(|able| able.number == place.group)?;
        let member = able.group.member(place.slot)?;
        member.takes(self.request).then_some((able, member))
    }
}

/// A set of numbers of machines.
#[derive(Debug, Default)]
struct Machines(Vec<u64>);

impl Machines {
    /// False: it is there already.
    fn add(&mut self, machine: u32) -> bool {
        let (word, bit) = (machine as usize / 64, 1 << (machine % 64));
        if word >= self.0.len() {
            self.0.resize(word + 1, 0);
        }
        let new = self.0[word] & bit == 0;
        self.0[word] |= bit;
        new
    }
}
