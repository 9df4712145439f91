//! What one request costs on the workers of a group.

use tasuki_core::{HandoffKind, Indivisible, KvDomain, Load, Price, RequestView, Role};

use super::Choosing;
use super::index::{Group, Kind, WorkerIndex};
use crate::NoPlacement;

/// Workers between which a request's KV can move, and by which kind of handoff.
pub type Domain = (KvDomain, HandoffKind);

/// A group of workers, and what the request costs there.
pub struct Able<'a> {
    pub number: usize,
    pub group: &'a Group,
    /// The least of each part.
    pub least: Load,
    price: Price,
    /// What prefill and decode cost more here for the role.
    preference_s: [f64; 2],
    pub may_prefill: bool,
    pub may_decode: bool,
    pub domain: Option<Domain>,
}

impl<'a> Able<'a> {
    /// `None`: no worker of the group takes the request.
    pub fn new(
        number: usize,
        group: &'a Group,
        request: &RequestView,
        how: Choosing<'_>,
    ) -> Option<Self> {
        let least = group.tree.least();
        let takes = u64::from(least.limit_tokens) >= request.total_tokens().max(1);
        if !takes || !group.kind.may_run(request) {
            return None;
        }
        if request.only.is_some() && !group.members().any(|member| member.takes(request)) {
            return None;
        }
        let price = how.model.price(group.kind.hardware, request);
        let (role, role_use) = (group.kind.role, group.kind.role_use);
        let other_role_s = |asks: bool| if asks { 0.0 } else { role_use.other_role_s() };
        Some(Self {
            number,
            group,
            least: least.load,
            price,
            preference_s: [
                price.prefill_preference_s(role) + other_role_s(role.prefills()),
                price.decode_preference_s(role) + other_role_s(role.decodes()),
            ],
            may_prefill: group.kind.may_prefill(how),
            may_decode: group.kind.may_decode(how),
            domain: group.kind.handoff_domain(request),
        })
    }

    pub fn role(&self) -> Role {
        self.group.kind.role
    }

    pub fn prefill_s(&self, load: &Load, cached: u32) -> f64 {
        self.price.prefill_s(load, cached) + self.preference_s[0]
    }

    pub fn decode_s(&self, load: &Load, whole: bool) -> f64 {
        self.price.decode_s(load, whole) + self.preference_s[1]
    }

    pub fn whole_s(&self, load: &Load, cached: u32) -> f64 {
        self.prefill_s(load, cached) + self.decode_s(load, true)
    }
}

/// The groups with a worker that takes the request.
pub fn able_groups<'a>(
    index: &'a WorkerIndex,
    request: &RequestView,
    how: Choosing<'_>,
) -> Vec<Able<'a>> {
    let groups = index.groups.iter().enumerate();
    let able = groups.filter_map(|(number, group)| Able::new(number, group, request, how));
    able.collect()
}

/// Why no worker takes the request, or no pair of those that do.
pub fn no_placement(
    index: &WorkerIndex,
    able: &[Able<'_>],
    request: &RequestView,
    how: Choosing<'_>,
) -> NoPlacement {
    if able.is_empty() {
        let reason = index.reason(request, |_| true);
        return reason.unwrap_or(NoPlacement::NoWorker);
    }
    // Workers of a role may be missing because none of them takes the request.
    let missing = |role, may: fn(&Kind, Choosing<'_>) -> bool| {
        let reason = index.reason(request, |kind| may(kind, how));
        let limit = reason.filter(|reason| reason.is_limit());
        let none = match request.only {
            None => NoPlacement::NoRole { role },
            Some(_) => NoPlacement::NoAdapter,
        };
        limit.unwrap_or(none)
    };
    if !able.iter().any(|able| able.may_prefill) {
        missing(Role::Prefill, Kind::may_prefill)
    } else if request.max_tokens > 1 && !able.iter().any(|able| able.may_decode) {
        missing(Role::Decode, Kind::may_decode)
    } else {
        no_handoff(index, able, request, how).unwrap_or(NoPlacement::NoPair)
    }
}

/// If workers could hand over other requests, but not this one.
fn no_handoff(
    index: &WorkerIndex,
    able: &[Able<'_>],
    request: &RequestView,
    how: Choosing<'_>,
) -> Option<NoPlacement> {
    let hands_over = |able: &Able<'_>| able.group.kind.handoff != HandoffKind::None;
    if !able.iter().any(hands_over) || able.iter().any(|able| able.domain.is_some()) {
        return None;
    }
    let alone = |group: &Group| {
        let kind = &group.kind;
        kind.model == request.model && kind.may_prefill(how) && kind.may_decode(how)
    };
    let mut groups = index.groups.iter();
    Some(NoPlacement::NoHandoff {
        why: request.indivisible.unwrap_or(Indivisible::Sequences),
        for_good: !groups
            .any(|group| group.members().any(|one| request.allows(one.id)) && alone(group)),
    })
}
