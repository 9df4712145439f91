//! The workers of a fleet, indexed so that the cheapest ones for a request are found without
//! a look at every worker.
//!
//! Workers that differ by their load alone form a group: what a request costs on them is one
//! function that grows with each part of the load. A group's [`Tree`] knows the least of each
//! part among any eight neighbours, so most of them are passed over together. A change of a
//! worker's load costs one path of the tree.

use std::collections::HashMap;

use tasuki_core::{HandoffKind, Health, KvDomain, Load, ModelId, RequestView, Role, RoleUse};
use tasuki_core::{WorkerId, WorkerView};

use super::Choosing;
use super::able::Domain;
use super::limits::{Exceeded, Limits};
use super::tree::{Entry, Tree};
use crate::NoPlacement;

/// The workers that requests may be placed on.
#[derive(Debug, Clone, Default)]
pub struct WorkerIndex {
    pub(super) groups: Vec<Group>,
    places: HashMap<WorkerId, Place>,
    /// By number of the machine; that of 0, which is unknown, stays empty.
    machines: Vec<Vec<Place>>,
    /// For two groups, in how many ways a worker of each can be taken from one machine.
    neighbours: HashMap<[usize; 2], usize>,
}

/// Where a worker is in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub group: usize,
    pub slot: usize,
}

/// What is equal among the workers of a group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Kind {
    pub model: ModelId,
    pub domain: KvDomain,
    pub handoff: HandoffKind,
    pub splits_choices: bool,
    pub resumes: bool,
    pub role: Role,
    pub role_use: RoleUse,
    pub hardware: usize,
    /// Choices of one request.
    pub max_sequences: u32,
}

/// Workers that differ by their load alone.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    pub kind: Kind,
    /// Of the workers that are ready.
    pub tree: Tree,
    /// By slot, the last one where it is free.
    pub ids: Vec<WorkerId>,
    members: Vec<Option<Member>>,
    free_slots: Vec<usize>,
}

/// A worker of a group, ready or not.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Member {
    pub id: WorkerId,
    pub machine: u32,
    pub load: Load,
    pub limit_tokens: u32,
    pub health: Health,
    pub requests: u32,
}

impl WorkerIndex {
    /// Adds a worker that serves a model, or takes its changes over.
    pub(super) fn set(&mut self, model: ModelId, worker: &WorkerView) {
        let kind = Kind {
            model,
            domain: worker.domain,
            handoff: worker.capabilities.handoff,
            splits_choices: worker.capabilities.splits_choices,
            resumes: worker.capabilities.resumes,
            role: worker.role,
            role_use: worker.capabilities.role_use,
            hardware: worker.hardware,
            max_sequences: worker.capacity.max_sequences,
        };
        let member = Member {
            id: worker.id,
            machine: worker.machine,
            load: Load::of(worker),
            limit_tokens: worker.capacity.max_model_len_tokens,
            health: worker.health,
            requests: worker.requests(),
        };
        let place = match self.places.get(&worker.id) {
            Some(place) if self.groups[place.group].holds(place.slot, &kind, &member) => *place,
            _ => self.insert(kind, &member),
        };
        self.groups[place.group].set(place.slot, member);
    }

    /// Forgets a worker.
    pub(super) fn take(&mut self, worker: WorkerId) {
        let Some(place) = self.places.remove(&worker) else {
            return;
        };
        let Some(member) = self.groups[place.group].take(place.slot) else {
            return;
        };
        if let Some(others) = self.machines.get_mut(member.machine as usize)
            && member.machine != 0
        {
            others.retain(|other| *other != place);
            for other in others {
                for groups in [[place.group, other.group], [other.group, place.group]] {
                    if let Some(ways) = self.neighbours.get_mut(&groups) {
                        *ways -= 1;
                    }
                }
            }
        }
    }

    /// Gives a worker a slot in the group of its kind, and none elsewhere.
    fn insert(&mut self, kind: Kind, member: &Member) -> Place {
        self.take(member.id);
        let group = self.group(kind);
        let slot = self.groups[group].slot_for(member.id);
        let place = Place { group, slot };
        self.places.insert(member.id, place);
        let machine = member.machine as usize;
        if machine != 0 {
            if machine >= self.machines.len() {
                self.machines.resize_with(machine + 1, Vec::new);
            }
            for other in &self.machines[machine] {
                for groups in [[place.group, other.group], [other.group, place.group]] {
                    *self.neighbours.entry(groups).or_default() += 1;
                }
            }
            self.machines[machine].push(place);
        }
        place
    }

    /// The group of a kind; that of a kind without workers is used again.
    fn group(&mut self, kind: Kind) -> usize {
        let mut groups = self.groups.iter();
        let known = groups.position(|group| group.kind == kind);
        if let Some(at) = known.or_else(|| self.groups.iter().position(Group::is_empty)) {
            self.groups[at].kind = kind;
            return at;
        }
        self.groups.push(Group {
            kind,
            tree: Tree::default(),
            ids: Vec::new(),
            members: Vec::new(),
            free_slots: Vec::new(),
        });
        self.groups.len() - 1
    }

    pub(super) fn place_of(&self, worker: WorkerId) -> Option<Place> {
        self.places.get(&worker).copied()
    }

    /// Between whom a worker can hand the request over, if it can.
    pub(crate) fn domain_of(&self, worker: WorkerId, request: &RequestView) -> Option<Domain> {
        let group = &self.groups[self.place_of(worker)?.group];
        group.kind.handoff_domain(request)
    }

    pub(super) fn member(&self, place: Place) -> Option<&Member> {
        self.groups.get(place.group)?.member(place.slot)
    }

    /// The workers of one machine; none of machine 0.
    pub(super) fn on_machine(&self, machine: u32) -> &[Place] {
        self.machines
            .get(machine as usize)
            .map_or(&[], Vec::as_slice)
    }

    /// Whether some machine has workers of both groups: two of one group, where they are equal.
    pub(super) fn are_neighbours(&self, one: usize, other: usize) -> bool {
        self.neighbours
            .get(&[one, other])
            .is_some_and(|ways| *ways > 0)
    }

    /// Why no worker of the kinds that `may` takes a request, if none does.
    pub(crate) fn reason(
        &self,
        request: &RequestView,
        may: impl Fn(&Kind) -> bool,
    ) -> Option<NoPlacement> {
        let mut none = NoPlacement::NoWorker;
        let (mut any, mut resumes) = (false, false);
        let (mut known, mut ready) = (Limits::default(), Limits::default());
        let of_model = self
            .groups
            .iter()
            .filter(|group| group.kind.model == request.model && may(&group.kind));
        for group in of_model {
            let ours = group.kind.goes_on(request);
            for member in group.members().filter(|one| request.allows(one.id)) {
                match member.health {
                    Health::Draining if ours => none = NoPlacement::AllDraining,
                    Health::Ready if !ours => none = none.or(NoPlacement::OtherIdentity),
                    _ => {}
                }
                any |= ours;
                if ours && group.kind.resumes(request) {
                    resumes = true;
                    known.widen(&group.kind, member, request);
                    if member.health == Health::Ready {
                        ready.widen(&group.kind, member, request);
                    }
                }
            }
        }
        if any && !resumes {
            Some(NoPlacement::CannotResume)
        } else if let Some(exceeded) = known.exceeded(request) {
            Some(exceeded.for_good())
        } else if ready.tokens.is_none() {
            Some(match request.only {
                None => none,
                Some(_) => NoPlacement::NoAdapter,
            })
        } else {
            ready.exceeded(request).map(Exceeded::for_now)
        }
    }
}

impl Kind {
    /// Whether the request may go on here: its output began with this identity, or with none.
    fn goes_on(&self, request: &RequestView) -> bool {
        let identity = self.domain.identity;
        request.bound_to.is_none_or(|bound_to| bound_to == identity)
    }

    fn resumes(&self, request: &RequestView) -> bool {
        request.resumed_tokens == 0 || self.resumes
    }

    /// Whether workers of this kind may run a request, if it is short enough.
    pub fn may_run(&self, request: &RequestView) -> bool {
        // Workers reject a leg of any kind with more choices.
        self.model == request.model
            && self.max_sequences >= request.choices
            && self.goes_on(request)
            && self.resumes(request)
    }

    /// Whether roles let workers of this kind prefill.
    pub fn may_prefill(&self, how: Choosing<'_>) -> bool {
        self.is_free(how) || self.role.prefills()
    }

    /// Whether roles let workers of this kind decode.
    pub fn may_decode(&self, how: Choosing<'_>) -> bool {
        self.is_free(how) || self.role.decodes()
    }

    /// Whether a worker may do what its role does not say.
    fn is_free(&self, how: Choosing<'_>) -> bool {
        !how.strict_roles && self.role_use != RoleUse::Only
    }

    /// Between whom a worker can hand the request over, if it can.
    pub fn handoff_domain(&self, request: &RequestView) -> Option<Domain> {
        let splits = match self.handoff {
            HandoffKind::None => false,
            handoff if request.indivisible.is_some_and(|why| why.bars(handoff)) => false,
            HandoffKind::Ticket | HandoffKind::Concurrent => {
                request.choices == 1 || self.splits_choices
            }
        };
        splits.then_some((self.domain, self.handoff))
    }
}

impl Member {
    pub fn takes(&self, request: &RequestView) -> bool {
        self.health == Health::Ready
            && u64::from(self.limit_tokens) >= request.total_tokens()
            && request.allows(self.id)
    }
}

impl Group {
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Workers, ready or not.
    pub fn len(&self) -> usize {
        self.members.len() - self.free_slots.len()
    }

    /// Whether the slot is that of this worker, apart from its load and health.
    fn holds(&self, slot: usize, kind: &Kind, member: &Member) -> bool {
        let known = self.member(slot);
        self.kind == *kind && known.is_some_and(|known| known.machine == member.machine)
    }

    fn slot_for(&mut self, id: WorkerId) -> usize {
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.members.push(None);
            self.ids.push(id);
            self.members.len() - 1
        });
        self.ids[slot] = id;
        slot
    }

    pub fn member(&self, slot: usize) -> Option<&Member> {
        self.members.get(slot)?.as_ref()
    }

    /// Its workers, ready or not.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().flatten()
    }

    fn set(&mut self, slot: usize, member: Member) {
        let entry = match member.health {
            Health::Ready => Entry {
                load: member.load,
                limit_tokens: member.limit_tokens,
            },
            Health::Suspect | Health::Draining | Health::Failing | Health::Down => Entry::NONE,
        };
        self.members[slot] = Some(member);
        self.tree.set(slot, entry);
    }

    fn take(&mut self, slot: usize) -> Option<Member> {
        let member = self.members.get_mut(slot)?.take();
        self.free_slots.push(slot);
        self.tree.set(slot, Entry::NONE);
        member
    }
}
