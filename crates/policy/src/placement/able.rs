//! What one request costs on the workers of a group.

use tasuki_core::{HandoffKind, KvDomain, Load, Price, RequestView, Role, RoleUse};

use super::Choosing;
use super::index::{Group, WorkerIndex};
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
        let price = how.model.price(group.kind.hardware, request);
        let (role, role_use) = (group.kind.role, group.kind.role_use);
        let any = !how.strict_roles && role_use != RoleUse::Only;
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
            may_prefill: any || role.prefills(),
            may_decode: any || role.decodes(),
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

/// Why there is no placement though workers take the request.
pub fn no_pair(able: &[Able<'_>], request: &RequestView) -> NoPlacement {
    let missing = if !able.iter().any(|able| able.may_prefill) {
        Role::Prefill
    } else if request.max_tokens > 1 && !able.iter().any(|able| able.may_decode) {
        Role::Decode
    } else {
        return NoPlacement::NoPair;
    };
    NoPlacement::NoRole { role: missing }
}
