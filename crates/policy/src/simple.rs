//! Policies that compute no cost: roles decide what a worker does, and a rule chooses among equals.
//!
//! A worker of role prefill computes a prompt and hands it over, a mixed one serves a request
//! alone. Where no worker of the right role takes a request, any other serves it alone, unless
//! roles are strict. The time of a placement is linear in the workers.

mod rule;

use tasuki_core::{ModelId, RequestView, WorkerId, WorkerView};

pub use self::rule::Rule;
use self::rule::{Half, pick};
use crate::placement::able::{Able, able_groups, no_placement};
use crate::placement::avoiding;
use crate::placement::index::Member;
use crate::{Choosing, NoPlacement, Placement, Policy, WorkerIndex};

/// A policy by one rule.
#[derive(Debug)]
pub struct SimplePolicy {
    rule: Rule,
    index: WorkerIndex,
}

impl SimplePolicy {
    /// A policy that knows no worker yet.
    pub fn new(rule: Rule) -> Self {
        Self {
            rule,
            index: WorkerIndex::default(),
        }
    }
}

impl Policy for SimplePolicy {
    fn update(&mut self, model: ModelId, worker: &WorkerView) {
        self.index.update(model, worker);
    }

    fn remove(&mut self, worker: WorkerId) {
        self.index.remove(worker);
    }

    fn place(&self, request: &RequestView, how: Choosing<'_>) -> Result<Placement, NoPlacement> {
        let able = able_groups(&self.index, request, how);
        let choice = |avoid: &[WorkerId]| {
            Choice {
                rule: self.rule,
                request,
                how,
                groups: groups(&able, request, |id| !avoid.contains(&id)),
            }
            .pair()
        };
        avoiding(&request.avoid, choice)
            .ok_or_else(|| no_placement(&self.index, &able, request, how))
    }

    fn place_decode(
        &self,
        request: &RequestView,
        prefill: WorkerId,
        tried: &[WorkerId],
        how: Choosing<'_>,
    ) -> Option<WorkerId> {
        let domain = self.index.domain_of(prefill, request)?;
        let able = able_groups(&self.index, request, how);
        let new = |id: WorkerId| id != prefill && !tried.contains(&id);
        let choice = Choice {
            rule: self.rule,
            request,
            how,
            groups: groups(&able, request, new),
        };
        let reaches = |able: &Able<'_>| able.may_decode && able.domain == Some(domain);
        choice
            .pick(Half::Decode, |able| reaches(able) && able.role().decodes())
            .or_else(|| choice.pick(Half::Decode, reaches))
            .map(|(_, member)| member.id)
    }
}

/// Groups with those of their workers that take a request.
type Groups<'a> = Vec<(&'a Able<'a>, Vec<&'a Member>)>;

fn groups<'a>(
    able: &'a [Able<'a>],
    request: &RequestView,
    may: impl Fn(WorkerId) -> bool,
) -> Groups<'a> {
    let takes = |member: &&Member| member.takes(request) && may(member.id);
    let groups = able
        .iter()
        .map(|able| (able, able.group.members().filter(takes).collect()));
    groups
        .filter(|(_, members): &(_, Vec<_>)| !members.is_empty())
        .collect()
}

/// The choice of one request's workers.
struct Choice<'a> {
    rule: Rule,
    request: &'a RequestView,
    how: Choosing<'a>,
    groups: Groups<'a>,
}

impl<'a> Choice<'a> {
    fn pair(&self) -> Option<Placement> {
        let split = self.request.max_tokens > 1;
        let alone = |able: &Able<'_>| able.role().prefills() && (able.role().decodes() || !split);
        let hands_over = |able: &Able<'_>| {
            let mut others = self.groups.iter();
            let partner = others.any(|(other, _)| Self::decodes_for(able, other));
            split && able.role().prefills() && !able.role().decodes() && partner
        };
        let keep_whole = self.request.keep_whole;
        let by_role = |able: &Able<'_>| alone(able) || (!keep_whole && hands_over(able));
        if let Some((able, prefill)) = self.pick(Half::Prefill, by_role) {
            return self.with_decode(able, prefill, alone(able));
        }
        let may = |able: &Able<'_>| able.may_prefill && (able.may_decode || !split);
        let any = self
            .pick(Half::Prefill, |able| may(able) && able.role().prefills())
            .or_else(|| self.pick(Half::Prefill, may));
        if let Some((_, one)) = any {
            return Some(placement(one, one));
        }
        let (able, prefill) = self.pick(Half::Prefill, hands_over)?;
        self.with_decode(able, prefill, false)
    }

    fn with_decode(&self, able: &Able<'_>, prefill: &Member, alone: bool) -> Option<Placement> {
        if alone {
            return Some(placement(prefill, prefill));
        }
        let (_, decode) = self.pick(Half::Decode, |other| Self::decodes_for(able, other))?;
        Some(placement(prefill, decode))
    }

    /// Whether the role of `other` is to go on with what `able` computes.
    fn decodes_for(able: &Able<'_>, other: &Able<'_>) -> bool {
        able.domain.is_some() && able.domain == other.domain && other.role().decodes()
    }

    fn pick(
        &self,
        half: Half,
        may: impl Fn(&Able<'_>) -> bool,
    ) -> Option<(&'a Able<'a>, &'a Member)> {
        let groups = self.groups.iter().filter(|(able, _)| may(able));
        let workers = groups.flat_map(|(able, members)| members.iter().map(|one| (*able, *one)));
        pick(
            self.rule,
            workers.collect(),
            half,
            self.request,
            self.how.tie,
        )
    }
}

fn placement(prefill: &Member, decode: &Member) -> Placement {
    Placement {
        prefill: prefill.id,
        decode: decode.id,
        cost_s: 0.0,
        why: None,
    }
}
