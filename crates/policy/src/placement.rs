//! Least expected work among the workers able to do it.
//!
//! A placement is a pair (prefill, decode) of workers between which KV can move; both may
//! be the same one. The cost decides. A role is a small discount, which orders workers that
//! cost about the same; with strict roles it is a condition.

mod pairs;

use tasuki_core::{
    CostModel, HandoffKind, Health, KvDomain, Load, Price, RequestView, Role, WorkerId, WorkerView,
};

use self::pairs::{Handoffs, Least, Offer, Pair, Side};
use crate::NoPlacement;

/// Who prefills and who decodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Placement {
    pub prefill: WorkerId,
    pub decode: WorkerId,
    /// Expected time to the last token, and that which others lose by the request.
    pub cost_s: f64,
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

impl Choosing<'_> {
    /// Whether a worker of that role may prefill, and whether it may decode.
    fn halves(&self, role: Role) -> (bool, bool) {
        let any = !self.strict_roles;
        (any || role.prefills(), any || role.decodes())
    }
}

/// Chooses the pair for a request. The answer is a function of the arguments alone.
///
/// # Errors
///
/// [`NoPlacement`] says which kind of worker is missing.
pub fn place(
    workers: &[&WorkerView],
    request: &RequestView,
    how: Choosing<'_>,
) -> Result<Placement, NoPlacement> {
    let fitting = able(workers, request)?;
    let preferred: Vec<&WorkerView> = fitting
        .iter()
        .copied()
        .filter(|worker| !request.avoid.contains(&worker.id))
        .collect();
    match best(&preferred, request, how) {
        Err(_) if preferred.len() < fitting.len() => best(&fitting, request, how),
        answer => answer,
    }
}

/// Chooses another decode worker for a request that `prefill` is working on or
/// has finished; never one of `tried`. `None` when a new placement is the better way.
pub fn place_decode(
    workers: &[&WorkerView],
    request: &RequestView,
    prefill: WorkerId,
    tried: &[WorkerId],
    how: Choosing<'_>,
) -> Option<WorkerId> {
    let prefill = workers.iter().find(|w| w.id == prefill)?;
    let domain = handoff_domain(prefill, request)?;
    let fitting = able(workers, request).ok()?;
    let quotes = Quotes::new(request, how);
    let mut least = Least::default();
    for worker in fitting {
        let reaches = handoff_domain(worker, request) == Some(domain);
        let may = how.halves(worker.role).1 && !tried.contains(&worker.id);
        if worker.id != prefill.id && reaches && may {
            let mut offer = quotes.of(worker).decode();
            offer.cost_s += quotes.handoffs.added_s(prefill.machine, &offer);
            least.add(offer);
        }
    }
    least.first.map(|offer| offer.id)
}

/// Ready workers that the request fits on; at least one.
fn able<'a>(
    workers: &[&'a WorkerView],
    request: &RequestView,
) -> Result<Vec<&'a WorkerView>, NoPlacement> {
    let tokens = request.total_tokens();
    let resumes = |w: &&WorkerView| request.resumed_tokens == 0 || w.capabilities.resumes;
    let known = || workers.iter().copied().filter(resumes);
    if !workers.is_empty() && known().next().is_none() {
        return Err(NoPlacement::CannotResume);
    }
    let limit = |workers: &mut dyn Iterator<Item = &WorkerView>| {
        workers.map(|w| w.capacity.max_model_len_tokens).max()
    };
    if let Some(limit_tokens) = limit(&mut known())
        && tokens > u64::from(limit_tokens)
    {
        return Err(NoPlacement::TooLarge {
            tokens,
            limit_tokens,
        });
    }
    let ready = || known().filter(|w| w.health == Health::Ready);
    let limit_tokens = limit(&mut ready()).ok_or(NoPlacement::NoWorker)?;
    if tokens > u64::from(limit_tokens) {
        return Err(NoPlacement::NoneLargeEnough {
            tokens,
            limit_tokens,
        });
    }
    Ok(ready()
        .filter(|w| u64::from(w.capacity.max_model_len_tokens) >= tokens)
        .collect())
}

fn best(
    workers: &[&WorkerView],
    request: &RequestView,
    how: Choosing<'_>,
) -> Result<Placement, NoPlacement> {
    let quotes = Quotes::new(request, how);
    let split = request.max_tokens > 1;
    let mut both = Least::default();
    let mut domains: Vec<(Domain, Side, Side)> = Vec::new();
    let (mut prefills, mut decodes) = (false, false);
    for worker in workers {
        let quote = quotes.of(worker);
        let (may_prefill, may_decode) = how.halves(worker.role);
        (prefills, decodes) = (prefills || may_prefill, decodes || may_decode);
        if may_prefill && (may_decode || !split) {
            both.add(quote.whole());
        }
        let Some(domain) = handoff_domain(worker, request).filter(|_| split) else {
            continue;
        };
        let known = domains.iter().position(|(known, ..)| *known == domain);
        let at = known.unwrap_or_else(|| {
            domains.push((domain, Side::default(), Side::default()));
            domains.len() - 1
        });
        let (_, prefill, decode) = &mut domains[at];
        if may_prefill {
            prefill.add(quote.prefill(), &quotes.handoffs);
        }
        if may_decode {
            decode.add(quote.decode(), &quotes.handoffs);
        }
    }
    for (found, role) in [(prefills, Role::Prefill), (decodes || !split, Role::Decode)] {
        if !workers.is_empty() && !found {
            return Err(NoPlacement::NoRole { role });
        }
    }
    let one = both.first.map(|offer| Placement {
        prefill: offer.id,
        decode: offer.id,
        cost_s: offer.cost_s,
    });
    if request.keep_whole && one.is_some() {
        return one.ok_or(NoPlacement::NoWorker);
    }
    let pairs = domains.iter();
    let two = pairs
        .filter_map(|(_, prefill, decode)| prefill.with(decode, &quotes.handoffs))
        .min_by(Pair::compare)
        .map(|pair| pair.placement());
    match (one, two) {
        (Some(one), Some(two)) if two.cost_s < one.cost_s => Ok(two),
        (one, two) => one.or(two).ok_or(if workers.is_empty() {
            NoPlacement::NoWorker
        } else {
            NoPlacement::NoPair
        }),
    }
}

/// Workers between which a request's KV can move, and by which kind of handoff.
type Domain = (KvDomain, HandoffKind);

/// Where a worker can hand the request over, if it can.
fn handoff_domain(worker: &WorkerView, request: &RequestView) -> Option<Domain> {
    let can = &worker.capabilities;
    let splits = request.choices == 1 || can.splits_choices;
    (splits && can.handoff != HandoffKind::None).then_some((worker.domain, can.handoff))
}

fn same_machine(one: u32, other: u32) -> bool {
    one == other && one != 0
}

/// What one request costs, by hardware class.
struct Quotes<'a> {
    prices: Vec<Price>,
    handoffs: Handoffs,
    request: &'a RequestView,
    tie: u64,
}

impl<'a> Quotes<'a> {
    fn new(request: &'a RequestView, how: Choosing<'_>) -> Self {
        let classes = how.model.hardware.rates().len().max(1);
        Self {
            prices: (0..classes)
                .map(|class| how.model.price(class, request))
                .collect(),
            handoffs: Handoffs::new(how.model, request),
            request,
            tie: how.tie,
        }
    }

    fn of(&'a self, worker: &'a WorkerView) -> Quote<'a> {
        let known = self.prices.get(worker.hardware);
        Quote {
            price: known.unwrap_or(&self.prices[0]),
            load: Load::of(worker),
            cached: self.request.cached_tokens(worker.id),
            worker,
            tie: self.tie,
        }
    }
}

/// What a request costs on one worker.
struct Quote<'a> {
    price: &'a Price,
    load: Load,
    cached: u32,
    worker: &'a WorkerView,
    tie: u64,
}

impl Quote<'_> {
    fn prefill_s(&self) -> f64 {
        self.price.prefill_s(&self.load, self.cached)
            + self.price.prefill_preference_s(self.worker.role)
    }

    fn decode_s(&self, whole: bool) -> f64 {
        self.price.decode_s(&self.load, whole) + self.price.decode_preference_s(self.worker.role)
    }

    fn prefill(&self) -> Offer {
        Offer::new(self.worker, self.prefill_s(), self.tie)
    }

    fn decode(&self) -> Offer {
        Offer::new(self.worker, self.decode_s(false), self.tie)
    }

    fn whole(&self) -> Offer {
        Offer::new(
            self.worker,
            self.prefill_s() + self.decode_s(true),
            self.tie,
        )
    }
}
