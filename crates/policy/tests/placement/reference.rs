//! The placement by definition: every pair is looked at.

use std::cmp::Ordering;

use tasuki_core::{
    HandoffKind, Health, Indivisible, Load, ModelId, RequestView, Role, RoleUse, WorkerId,
    WorkerView, mix,
};
use tasuki_policy::{Choosing, NoPlacement, Placement};

type Workers<'a> = &'a [&'a (ModelId, WorkerView)];

/// What [`tasuki_policy::WorkerIndex::place`] answers.
pub fn place(
    workers: Workers<'_>,
    request: &RequestView,
    how: Choosing<'_>,
) -> Result<Placement, NoPlacement> {
    let allowed = workers
        .iter()
        .copied()
        .filter(|(_, w)| request.allows(w.id));
    let placed = place_allowed(&allowed.collect::<Vec<_>>(), request, how);
    placed.map_err(|reason| match reason {
        NoPlacement::NoWorker
        | NoPlacement::NoRole { .. }
        | NoPlacement::AllDraining
        | NoPlacement::OtherIdentity
            if request.only.is_some() =>
        {
            NoPlacement::NoAdapter
        }
        reason => reason,
    })
}

fn place_allowed(
    workers: Workers<'_>,
    request: &RequestView,
    how: Choosing<'_>,
) -> Result<Placement, NoPlacement> {
    let able = able(workers, request)?;
    let best = best(&preferred(&able, request, how), request, how);
    best.ok_or_else(|| {
        let missing = |role, may: fn(Role) -> bool| {
            let may = |w: &WorkerView| is_free(w, how) || may(w.role);
            if able.iter().any(|w| may(w)) {
                return None;
            }
            let of_role: Vec<_> = workers.iter().copied().filter(|(_, w)| may(w)).collect();
            let limit = self::able(&of_role, request).err().filter(is_limit);
            Some(limit.unwrap_or(NoPlacement::NoRole { role }))
        };
        if let Some(prefill) = missing(Role::Prefill, Role::prefills) {
            prefill
        } else if let Some(decode) = missing(Role::Decode, Role::decodes)
            && request.max_tokens > 1
        {
            decode
        } else {
            no_handoff(workers, &able, request, how).unwrap_or(NoPlacement::NoPair)
        }
    })
}

fn no_handoff(
    workers: Workers<'_>,
    able: &[&WorkerView],
    request: &RequestView,
    how: Choosing<'_>,
) -> Option<NoPlacement> {
    let has_one = |w: &&WorkerView| w.capabilities.handoff != HandoffKind::None;
    if !able.iter().any(has_one) || able.iter().any(|w| hands_over(w, request)) {
        return None;
    }
    let alone = |w: &WorkerView| is_free(w, how) || (w.role.prefills() && w.role.decodes());
    let mut of_model = workers.iter().filter(|(model, _)| *model == request.model);
    Some(NoPlacement::NoHandoff {
        why: request.indivisible.unwrap_or(Indivisible::Sequences),
        for_good: !of_model.any(|(_, w)| alone(w)),
    })
}

/// What [`tasuki_policy::WorkerIndex::place_decode`] answers.
pub fn place_decode(
    workers: Workers<'_>,
    request: &RequestView,
    prefill: WorkerId,
    tried: &[WorkerId],
    how: Choosing<'_>,
) -> Option<WorkerId> {
    let (_, prefill) = workers.iter().find(|(_, w)| w.id == prefill)?;
    let may = |w: &&WorkerView| {
        let role = is_free(w, how) || w.role.decodes();
        role && request.allows(w.id)
            && w.id != prefill.id
            && !tried.contains(&w.id)
            && moves(prefill, w, request)
    };
    let decode = able(workers, request).ok()?.into_iter().filter(may);
    let costs = decode.map(|decode| {
        let handoff_s = handoff_s(prefill, decode, request, how);
        (decode_s(decode, request, how, false) + handoff_s, decode.id)
    });
    let best = costs.min_by(|one, other| compare(*one, *other, how));
    best.map(|(_, id)| id)
}

/// Whether a policy may answer so, by whatever order.
pub fn is_allowed(
    workers: Workers<'_>,
    request: &RequestView,
    how: Choosing<'_>,
    (prefill, decode): (WorkerId, WorkerId),
) -> bool {
    let Ok(able) = able(workers, request) else {
        return false;
    };
    let able: Vec<_> = able.into_iter().filter(|w| request.allows(w.id)).collect();
    let options = options(&preferred(&able, request, how), request, how);
    options
        .wholes
        .iter()
        .any(|one| (one.1, one.1) == (prefill, decode))
        || options
            .pairs
            .iter()
            .any(|two| (two.1.1, two.2.1) == (prefill, decode))
}

/// Without the workers to avoid, those that failed last first, as far as that leaves options.
fn preferred<'a>(
    able: &[&'a WorkerView],
    request: &RequestView,
    how: Choosing<'_>,
) -> Vec<&'a WorkerView> {
    let mut left = able.to_vec();
    for avoided in request.avoid.iter().rev() {
        let others = left.iter().copied().filter(|w| w.id != *avoided);
        let others: Vec<_> = others.collect();
        if !options(&others, request, how).is_empty() {
            left = others;
        }
    }
    left
}

/// Whether it is the request that asks for too much.
fn is_limit(reason: &NoPlacement) -> bool {
    matches!(
        reason,
        NoPlacement::TooLarge { .. }
            | NoPlacement::NoneLargeEnough { .. }
            | NoPlacement::TooManyChoices { .. }
            | NoPlacement::NoneForChoices { .. }
    )
}

/// Whether a worker may do what its role does not say.
fn is_free(worker: &WorkerView, how: Choosing<'_>) -> bool {
    !how.strict_roles && worker.capabilities.role_use != RoleUse::Only
}

/// A worker and its cost.
type Offer = (f64, WorkerId);

/// What a policy may choose from.
struct Options {
    wholes: Vec<Offer>,
    pairs: Vec<(f64, Offer, Offer)>,
}

impl Options {
    fn is_empty(&self) -> bool {
        self.wholes.is_empty() && self.pairs.is_empty()
    }
}

/// Ready workers that the request fits on; at least one.
fn able<'a>(
    workers: Workers<'a>,
    request: &RequestView,
) -> Result<Vec<&'a WorkerView>, NoPlacement> {
    let tokens = request.total_tokens();
    let of_model = || workers.iter().filter(|(model, _)| *model == request.model);
    let ours = |w: &WorkerView| request.bound_to.is_none_or(|id| w.domain.identity == id);
    let (may, others): (Vec<_>, Vec<_>) = of_model().map(|(_, w)| w).partition(|w| ours(w));
    let is = |workers: &[&WorkerView], health| workers.iter().any(|w| w.health == health);
    let resumes = |w: &&&WorkerView| request.resumed_tokens == 0 || w.capabilities.resumes;
    let known: Vec<&WorkerView> = may.iter().filter(resumes).copied().collect();
    if !may.is_empty() && known.is_empty() {
        return Err(NoPlacement::CannotResume);
    }
    let is_ready = |w: &&WorkerView| w.health == Health::Ready;
    let ready: Vec<&WorkerView> = known.iter().copied().filter(is_ready).collect();
    let limit = |workers: &[&WorkerView]| {
        let limits = workers.iter().map(|w| w.capacity.max_model_len_tokens);
        limits.max().filter(|limit| u64::from(*limit) < tokens)
    };
    if let Some(limit_tokens) = limit(&known) {
        return Err(NoPlacement::TooLarge {
            tokens,
            limit_tokens,
        });
    }
    let long = |w: &&WorkerView| u64::from(w.capacity.max_model_len_tokens) >= tokens;
    let wide = |w: &&WorkerView| w.capacity.max_sequences >= request.choices;
    let choices = request.choices;
    let most_choices = |workers: &[&WorkerView]| {
        let limits = workers.iter().copied().filter(long);
        let most = limits.map(|w| w.capacity.max_sequences).max();
        most.filter(|most| *most < choices)
    };
    if let Some(limit_choices) = most_choices(&known) {
        return Err(NoPlacement::TooManyChoices {
            choices,
            tokens,
            limit_choices,
        });
    }
    if let Some(limit_tokens) = limit(&ready) {
        return Err(NoPlacement::NoneLargeEnough {
            tokens,
            limit_tokens,
        });
    }
    if let Some(limit_choices) = most_choices(&ready) {
        return Err(NoPlacement::NoneForChoices {
            choices,
            tokens,
            limit_choices,
        });
    }
    if !ready.is_empty() {
        return Ok(ready.into_iter().filter(long).filter(wide).collect());
    }
    Err(if is(&may, Health::Draining) {
        NoPlacement::AllDraining
    } else if is(&others, Health::Ready) {
        NoPlacement::OtherIdentity
    } else {
        NoPlacement::NoWorker
    })
}

fn options(workers: &[&WorkerView], request: &RequestView, how: Choosing<'_>) -> Options {
    let split = request.max_tokens > 1;
    let may_prefill = |w: &WorkerView| is_free(w, how) || w.role.prefills();
    let may_decode = |w: &WorkerView| is_free(w, how) || w.role.decodes();
    let alone = |w: &&&WorkerView| may_prefill(w) && (may_decode(w) || !split);
    let wholes = workers.iter().filter(alone).map(|w| {
        let cost_s = prefill_s(w, request, how) + decode_s(w, request, how, true);
        (cost_s, w.id)
    });
    let wholes: Vec<Offer> = wholes.collect();
    let mut pairs = Vec::new();
    if !split || (request.keep_whole && !wholes.is_empty()) {
        return Options { wholes, pairs };
    }
    for prefill in workers.iter().filter(|w| may_prefill(w)) {
        let prefill_s = prefill_s(prefill, request, how);
        for decode in workers.iter().filter(|w| may_decode(w)) {
            if prefill.id != decode.id && moves(prefill, decode, request) {
                let decode_s = decode_s(decode, request, how, false);
                let cost_s = prefill_s + handoff_s(prefill, decode, request, how) + decode_s;
                pairs.push((cost_s, (prefill_s, prefill.id), (decode_s, decode.id)));
            }
        }
    }
    Options { wholes, pairs }
}

fn best(workers: &[&WorkerView], request: &RequestView, how: Choosing<'_>) -> Option<Placement> {
    let Options { wholes, pairs } = options(workers, request, how);
    let one = wholes
        .into_iter()
        .min_by(|one, other| compare(*one, *other, how));
    let one = one.map(|(cost_s, id)| Placement {
        prefill: id,
        decode: id,
        cost_s,
        why: None,
    });
    let two = pairs.into_iter().min_by(|one, other| {
        let costs = one.0.total_cmp(&other.0);
        costs
            .then_with(|| compare(one.1, other.1, how))
            .then_with(|| compare(one.2, other.2, how))
    });
    let two = two.map(|(cost_s, (_, prefill), (_, decode))| Placement {
        prefill,
        decode,
        cost_s,
        why: None,
    });
    match (one, two) {
        (Some(one), Some(two)) if two.cost_s < one.cost_s => Some(two),
        (one, two) => one.or(two),
    }
}

/// Whether the request's KV can move between two workers.
fn moves(prefill: &WorkerView, decode: &WorkerView, request: &RequestView) -> bool {
    hands_over(prefill, request)
        && hands_over(decode, request)
        && prefill.domain == decode.domain
        && prefill.capabilities.handoff == decode.capabilities.handoff
}

/// Whether a worker has a handoff for the request.
fn hands_over(worker: &WorkerView, request: &RequestView) -> bool {
    let can = &worker.capabilities;
    (request.choices == 1 || can.splits_choices)
        && can.handoff != HandoffKind::None
        && match request.indivisible {
            None => true,
            Some(Indivisible::EchoLogprobs | Indivisible::Choices) => false,
            Some(_) => can.handoff == HandoffKind::Concurrent,
        }
}

fn other_role_s(worker: &WorkerView, asks: bool) -> f64 {
    let role_use = worker.capabilities.role_use;
    if asks { 0.0 } else { role_use.other_role_s() }
}

fn prefill_s(worker: &WorkerView, request: &RequestView, how: Choosing<'_>) -> f64 {
    let price = how.model.price(worker.hardware, request);
    price.prefill_s(&Load::of(worker), request.cached_tokens(worker.id))
        + (price.prefill_preference_s(worker.role) + other_role_s(worker, worker.role.prefills()))
}

fn decode_s(worker: &WorkerView, request: &RequestView, how: Choosing<'_>, whole: bool) -> f64 {
    let price = how.model.price(worker.hardware, request);
    price.decode_s(&Load::of(worker), whole)
        + (price.decode_preference_s(worker.role) + other_role_s(worker, worker.role.decodes()))
}

fn handoff_s(
    prefill: &WorkerView,
    decode: &WorkerView,
    request: &RequestView,
    how: Choosing<'_>,
) -> f64 {
    let held = request.warm.iter().find(|warm| warm.worker == decode.id);
    let same_machine = prefill.machine == decode.machine && prefill.machine != 0;
    let held = held.map_or(0, |warm| warm.tokens);
    how.model.handoff_s(request, held, same_machine)
}

/// By cost, and in the order of the tie where costs are equal.
fn compare(one: Offer, other: Offer, how: Choosing<'_>) -> Ordering {
    let order = |id: WorkerId| mix(u64::from(id.0) ^ mix(how.tie));
    let costs = one.0.total_cmp(&other.0);
    costs.then_with(|| order(one.1).cmp(&order(other.1)))
}
