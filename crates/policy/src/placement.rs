//! Least expected work among the workers able to do it.
//!
//! A placement is a pair (prefill, decode) of workers between which KV can move; both may
//! be the same one. Roles are preferences: they bind while a healthy worker has
//! the wanted role, and yield after, unless roles are strict.

use std::collections::BTreeMap;

use tasuki_core::{
    CostModel, HandoffKind, Health, KvDomain, RequestView, Role, WorkerId, WorkerView,
};

use crate::{NoPlacement, PolicyConfig};

/// Who prefills and who decodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Placement {
    pub prefill: WorkerId,
    pub decode: WorkerId,
    /// Expected time to the last token.
    pub cost_s: f64,
}

impl Placement {
    /// Whether one worker does both.
    pub fn is_whole(&self) -> bool {
        self.prefill == self.decode
    }
}

/// Chooses the pair for a request.
///
/// `tie` breaks ties between equally good workers; a rotating counter spreads
/// them. The answer is a function of the arguments alone.
///
/// # Errors
///
/// [`NoPlacement`] says which kind of worker is missing.
pub fn place(
    workers: &[WorkerView],
    request: &RequestView,
    config: &PolicyConfig,
    tie: u64,
) -> Result<Placement, NoPlacement> {
    let fitting = able(workers, request)?;
    let preferred: Vec<&WorkerView> = fitting
        .iter()
        .copied()
        .filter(|worker| !request.avoid.contains(&worker.id))
        .collect();
    match best(&preferred, request, config, tie) {
        Err(_) if preferred.len() < fitting.len() => best(&fitting, request, config, tie),
        answer => answer,
    }
}

/// Chooses another decode worker for a request that `prefill` is working on or
/// has finished; never one of `tried`. `None` when a new placement is the better way.
pub fn place_decode(
    workers: &[WorkerView],
    request: &RequestView,
    prefill: WorkerId,
    tried: &[WorkerId],
    config: &PolicyConfig,
    tie: u64,
) -> Option<WorkerId> {
    let prefill = workers.iter().find(|w| w.id == prefill)?;
    let domain = handoff_domain(prefill, request)?;
    let fitting = able(workers, request).ok()?;
    let decoders = Half::among(&fitting, Role::Decode, config)
        .ok()?
        .of(&fitting);
    let model = CostModel::new(config.cost, fitting.iter().copied());
    let candidates = decoders.into_iter().filter(|worker| {
        let reaches = handoff_domain(worker, request) == Some(domain);
        worker.id != prefill.id && reaches && !tried.contains(&worker.id)
    });
    let offer = |worker: &WorkerView| (worker.id, model.decode_s(worker, request, false));
    let offers: Vec<Offer> = candidates.map(offer).collect();
    least(offers.iter().copied(), tie).map(|((id, _), _)| id)
}

/// Ready workers that the request fits on; at least one.
fn able<'a>(
    workers: &'a [WorkerView],
    request: &RequestView,
) -> Result<Vec<&'a WorkerView>, NoPlacement> {
    let tokens = request.total_tokens();
    let resumes = |w: &&WorkerView| request.resumed_tokens == 0 || w.capabilities.resumes;
    let known = || workers.iter().filter(resumes);
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

/// Whether a worker of some role may do one half of a request.
#[derive(Clone, Copy)]
struct Half {
    wants: fn(Role) -> bool,
    /// Nobody has the role, and roles yield.
    anybody: bool,
}

impl Half {
    fn among(
        workers: &[&WorkerView],
        role: Role,
        config: &PolicyConfig,
    ) -> Result<Self, NoPlacement> {
        let wants = match role {
            Role::Decode => Role::decodes,
            Role::Prefill | Role::Mixed => Role::prefills,
        };
        let anybody = !workers.iter().any(|worker| wants(worker.role));
        if anybody && config.strict_roles {
            return Err(NoPlacement::NoRole { role });
        }
        Ok(Self { wants, anybody })
    }

    fn of<'a>(self, workers: &[&'a WorkerView]) -> Vec<&'a WorkerView> {
        let may = |worker: &&WorkerView| self.anybody || (self.wants)(worker.role);
        workers.iter().copied().filter(may).collect()
    }
}

fn best(
    workers: &[&WorkerView],
    request: &RequestView,
    config: &PolicyConfig,
    tie: u64,
) -> Result<Placement, NoPlacement> {
    if workers.is_empty() {
        return Err(NoPlacement::NoWorker);
    }
    let search = Search {
        model: CostModel::new(config.cost, workers.iter().copied()),
        request,
        tie,
    };
    let prefillers = Half::among(workers, Role::Prefill, config)?.of(workers);
    if request.max_tokens <= 1 {
        return search.whole(&prefillers).ok_or(NoPlacement::NoWorker);
    }
    let decode = Half::among(workers, Role::Decode, config)?;
    let decoders = decode.of(workers);
    let both = decode.of(&prefillers);
    if request.keep_whole {
        let able = if config.strict_roles { &both } else { workers };
        if let Some(whole) = search.whole(able) {
            return Ok(whole);
        }
    }
    search
        .cheaper(search.whole(&both), search.split(&prefillers, &decoders))
        .or_else(|| {
            // Each role has workers, but of different domains.
            let yields = !config.strict_roles;
            let anybody = || search.cheaper(search.whole(workers), search.split(workers, workers));
            yields.then(anybody).flatten()
        })
        .ok_or(NoPlacement::NoPair)
}

/// Workers between which a request's KV can move, and by which kind of handoff.
type Domain = (KvDomain, HandoffKind);

/// Where a worker can hand the request over, if it can.
fn handoff_domain(worker: &WorkerView, request: &RequestView) -> Option<Domain> {
    let can = &worker.capabilities;
    let splits = request.choices == 1 || can.splits_choices;
    (splits && can.handoff != HandoffKind::None).then_some((worker.domain, can.handoff))
}

/// A worker and what one half of the request costs there.
type Offer = (WorkerId, f64);

/// The search for the cheapest placement. A pair's cost is a sum over its two workers, so
/// each half is looked for alone, and the time is linear in the workers.
struct Search<'a> {
    model: CostModel,
    request: &'a RequestView,
    tie: u64,
}

impl Search<'_> {
    /// The cheapest worker that does both halves.
    fn whole(&self, workers: &[&WorkerView]) -> Option<Placement> {
        let cost_s = |worker: &&WorkerView| {
            let (model, request) = (&self.model, self.request);
            let first_s = model.first_token_s(worker, request);
            (worker.id, first_s + model.decode_s(worker, request, true))
        };
        let offers: Vec<Offer> = workers.iter().map(cost_s).collect();
        let ((id, cost_s), _) = least(offers.iter().copied(), self.tie)?;
        Some(Placement {
            prefill: id,
            decode: id,
            cost_s,
        })
    }

    /// The cheapest pair of two workers of one domain.
    fn split(&self, prefillers: &[&WorkerView], decoders: &[&WorkerView]) -> Option<Placement> {
        let mut domains: BTreeMap<Domain, (Vec<Offer>, Vec<Offer>)> = BTreeMap::new();
        let domain = |worker: &WorkerView| handoff_domain(worker, self.request);
        for worker in prefillers {
            let Some(domain) = domain(worker) else {
                continue;
            };
            let cost_s = self.model.first_token_s(worker, self.request);
            let (prefill, _) = domains.entry(domain).or_default();
            prefill.push((worker.id, cost_s));
        }
        for worker in decoders {
            let cost_s = self.model.decode_s(worker, self.request, false);
            let domain = domain(worker);
            if let Some((_, decode)) = domain.and_then(|domain| domains.get_mut(&domain)) {
                decode.push((worker.id, cost_s));
            }
        }
        domains
            .values()
            .map(|(prefill, decode)| self.two_of(prefill, decode))
            .fold(None, |best, pair| self.cheaper(best, pair))
    }

    /// The cheapest pair of different workers: one of the two halves has its cheapest worker.
    fn two_of(&self, prefill: &[Offer], decode: &[Offer]) -> Option<Placement> {
        let handoff_s = self.model.handoff_s(self.request);
        let pair = |((prefill, first_s), (decode, decode_s)): (Offer, Offer)| Placement {
            prefill,
            decode,
            cost_s: first_s + handoff_s + decode_s,
        };
        let (first, tie) = least(prefill.iter().copied(), self.tie)?;
        let partner = least(others(decode, first.0), tie).map(|(decode, _)| pair((first, decode)));
        let (last, tie) = least(decode.iter().copied(), self.tie)?;
        if first.0 != last.0 {
            return partner;
        }
        let turned = least(others(prefill, last.0), tie).map(|(prefill, _)| pair((prefill, last)));
        self.cheaper(partner, turned)
    }

    fn cheaper(&self, one: Option<Placement>, other: Option<Placement>) -> Option<Placement> {
        let offers = [one, other].into_iter().flatten();
        let ((best, _), _) = least(offers.map(|p| (p, p.cost_s)), self.tie)?;
        Some(best)
    }
}

fn others(offers: &[Offer], but: WorkerId) -> impl Iterator<Item = Offer> + Clone {
    offers.iter().copied().filter(move |(id, _)| *id != but)
}

/// The cheapest candidate; among equals the one that `tie` points at. With it what is left
/// of `tie` for an independent choice.
fn least<T: Copy>(
    costs: impl Iterator<Item = (T, f64)> + Clone,
    tie: u64,
) -> Option<((T, f64), u64)> {
    let lowest = costs.clone().map(|(_, cost)| cost).min_by(f64::total_cmp)?;
    let limit = lowest + lowest.abs() * 1e-9;
    let equals = costs.filter(|(_, cost)| *cost <= limit);
    let count = equals.clone().count() as u64;
    let at = usize::try_from(tie % count).expect("less than a count");
    Some((equals.clone().nth(at)?, tie / count))
}
