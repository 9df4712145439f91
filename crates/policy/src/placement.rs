//! Least expected work among the workers able to do it.
//!
//! A placement is a pair (prefill, decode) of workers of equal identity; both may
//! be the same one. Roles are preferences: they bind while a healthy worker has
//! the wanted role, and yield after, unless roles are strict.

use tasuki_core::{CostModel, Health, RequestView, Role, WorkerId, WorkerView};

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
    let identity = workers.iter().find(|w| w.id == prefill)?.identity;
    let fitting = able(workers, request).ok()?;
    let decoders = wanted(&fitting, Role::decodes, config);
    let model = CostModel::new(config.cost, fitting.iter().copied());
    let candidates = decoders.into_iter().filter(|worker| {
        worker.id != prefill && worker.identity == identity && !tried.contains(&worker.id)
    });
    let costs = candidates.map(|worker| {
        let cost_s = model.decode_s(worker, request, false);
        (worker.id, cost_s)
    });
    least(costs.collect(), tie).map(|(id, _)| id)
}

/// Ready workers that the request fits on; at least one.
fn able<'a>(
    workers: &'a [WorkerView],
    request: &RequestView,
) -> Result<Vec<&'a WorkerView>, NoPlacement> {
    let tokens = request.total_tokens();
    let limit = |workers: &mut dyn Iterator<Item = &WorkerView>| {
        workers.map(|w| w.capacity.max_model_len_tokens).max()
    };
    if let Some(limit_tokens) = limit(&mut workers.iter())
        && tokens > u64::from(limit_tokens)
    {
        return Err(NoPlacement::TooLarge {
            tokens,
            limit_tokens,
        });
    }
    let ready = || workers.iter().filter(|w| w.health == Health::Ready);
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

/// Workers of a wanted role; anybody when there is none, unless roles are strict.
fn wanted<'a>(
    workers: &[&'a WorkerView],
    wants: fn(Role) -> bool,
    config: &PolicyConfig,
) -> Vec<&'a WorkerView> {
    let matching: Vec<&WorkerView> = workers.iter().copied().filter(|w| wants(w.role)).collect();
    if matching.is_empty() && !config.strict_roles {
        workers.to_vec()
    } else {
        matching
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
    let prefillers = wanted(workers, Role::prefills, config);
    if prefillers.is_empty() {
        let role = Role::Prefill;
        return Err(NoPlacement::NoRole { role });
    }
    if request.max_tokens <= 1 {
        let whole: Vec<_> = prefillers.into_iter().map(|w| (w, w)).collect();
        return cheapest(&whole, request, config, tie).ok_or(NoPlacement::NoWorker);
    }
    let decoders = wanted(workers, Role::decodes, config);
    if decoders.is_empty() {
        let role = Role::Decode;
        return Err(NoPlacement::NoRole { role });
    }
    let mut pairs = pairs(&prefillers, &decoders);
    if pairs.is_empty() && !config.strict_roles {
        pairs = self::pairs(workers, workers);
    }
    if request.keep_whole {
        let whole: Vec<_> = if config.strict_roles {
            pairs
                .iter()
                .copied()
                .filter(|(p, d)| p.id == d.id)
                .collect()
        } else {
            workers.iter().map(|&w| (w, w)).collect()
        };
        if !whole.is_empty() {
            pairs = whole;
        }
    }
    cheapest(&pairs, request, config, tie).ok_or(NoPlacement::NoPair)
}

type Pair<'a> = (&'a WorkerView, &'a WorkerView);

fn pairs<'a>(prefillers: &[&'a WorkerView], decoders: &[&'a WorkerView]) -> Vec<Pair<'a>> {
    let mut pairs = Vec::with_capacity(prefillers.len() * decoders.len());
    for &prefill in prefillers {
        for &decode in decoders {
            if prefill.identity == decode.identity {
                pairs.push((prefill, decode));
            }
        }
    }
    pairs
}

fn cheapest(
    pairs: &[Pair<'_>],
    request: &RequestView,
    config: &PolicyConfig,
    tie: u64,
) -> Option<Placement> {
    let fleet = pairs
        .iter()
        .flat_map(|(prefill, decode)| [*prefill, *decode]);
    let model = CostModel::new(config.cost, fleet);
    let costs = pairs.iter().map(|(prefill, decode)| {
        let placement = (prefill.id, decode.id);
        (placement, pair_cost_s(&model, prefill, decode, request))
    });
    least(costs.collect(), tie).map(|((prefill, decode), cost_s)| Placement {
        prefill,
        decode,
        cost_s,
    })
}

fn pair_cost_s(
    model: &CostModel,
    prefill: &WorkerView,
    decode: &WorkerView,
    request: &RequestView,
) -> f64 {
    let whole = prefill.id == decode.id;
    let handoff_s = if whole { 0.0 } else { model.handoff_s(request) };
    model.first_token_s(prefill, request) + handoff_s + model.decode_s(decode, request, whole)
}

/// The cheapest candidate; among equals the one that `tie` points at.
fn least<T: Copy>(costs: Vec<(T, f64)>, tie: u64) -> Option<(T, f64)> {
    let lowest = costs.iter().map(|(_, cost)| *cost).min_by(f64::total_cmp)?;
    let limit = lowest + lowest.abs() * 1e-9;
    let equals: Vec<(T, f64)> = costs.into_iter().filter(|(_, c)| *c <= limit).collect();
    let at = usize::try_from(tie % equals.len() as u64).expect("less than a length");
    Some(equals[at])
}
