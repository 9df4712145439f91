//! The workers of one moment, and which change of a role pays.

use tasuki_core::{Role, WorkerId};

use super::ahead::Ahead;
use super::demand::Lengths;
use super::outlook::{Task, Topology};
use super::owner;
use super::scale::Wanted;
use super::search::{Better, best};
use crate::fleet::WorkerState;

/// The workers of one moment and what is asked of them.
#[derive(Debug, Clone)]
pub struct Look {
    pub(super) workers: Vec<Seen>,
    /// As they are.
    pub now: Topology,
    /// Of them, those whose roles an operator set.
    pub(super) kept: Topology,
    /// Of the requests that can meet the objectives.
    pub(super) ahead: Ahead,
    /// All that is asked for now.
    pub(super) load: Task,
}

/// A worker, as far as a change of its role depends on it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    pub id: WorkerId,
    pub role: Role,
    pub pinned: bool,
    pub sequences: f64,
    pub kv_tokens: f64,
    pub backlog_tokens: f64,
}

impl Seen {
    pub fn new(state: &WorkerState) -> Self {
        let view = &state.view;
        Self {
            id: view.id,
            role: view.role,
            pinned: is_pinned(state),
            sequences: f64::from(view.sequences()),
            kv_tokens: view.kv_tokens() as f64,
            backlog_tokens: view.prefill_backlog_tokens() as f64,
        }
    }
}

impl Topology {
    pub(super) fn of(&mut self, role: Role) -> &mut u32 {
        match role {
            Role::Prefill => &mut self.prefill,
            Role::Decode => &mut self.decode,
            Role::Mixed => &mut self.mixed,
        }
    }

    fn count(self, role: Role) -> u32 {
        let mut topology = self;
        *topology.of(role)
    }
}

const ROLES: [Role; 3] = [Role::Prefill, Role::Decode, Role::Mixed];

impl Look {
    /// How many workers of each role the load asks for.
    pub fn wanted(&self) -> Wanted {
        Wanted::new(&self.load, self.now)
    }

    /// The topology to change to, and the single changes that lead there.
    pub(super) fn better(&self) -> Option<(Better, Vec<(Role, Role)>)> {
        let target = best(|topology| self.ahead.cost_s(topology), self.now, self.kept);
        if target == self.now {
            return None;
        }
        let moves = self.moves(target);
        let change_s = moves
            .iter()
            .map(|&(from, to)| {
                let cheapest = self.cheapest(from, to, |_| false);
                cheapest.map_or(0.0, |(_, cost_s)| cost_s)
            })
            .sum();
        let better = Better {
            from: (self.now, self.ahead.now().outlook(self.now)),
            to: (target, self.ahead.now().outlook(target)),
            gain_s: self.sure_gain_s(target).max(self.early_gain_s(target)),
            change_s,
        };
        (better.gain_s > change_s).then_some((better, moves))
    }

    /// What a topology saves over the horizon, also if the lengths are off by their error.
    fn sure_gain_s(&self, target: Topology) -> f64 {
        self.least_gain_s(target, |lengths| lengths.output_error)
    }

    /// What a topology is expected to save until the answers have ended to the requests that have
    /// come, if it will be sure then: to wait for them would cost so much. If they show that it is
    /// wrong after all, it is left.
    fn early_gain_s(&self, target: Topology) -> f64 {
        let now = self.ahead.now();
        let answer_s = now.lengths.output_tokens * now.outlook(self.now).token_s;
        let [shorter_s, longer_s] = [[1, -1], [-1, 1]]
            .map(|tilt| self.gain_s(target, tilt, |lengths| lengths.output_error));
        let expected_s = (shorter_s + longer_s) / 2.0 * (answer_s / now.horizon_s).min(1.0);
        expected_s.min(self.least_gain_s(target, |lengths| lengths.output_error_soon))
    }

    fn least_gain_s(&self, target: Topology, output_error: impl Fn(&Lengths) -> f64) -> f64 {
        [[0, 0], [1, -1], [-1, 1]]
            .map(|tilt| self.gain_s(target, tilt, &output_error))
            .into_iter()
            .fold(f64::INFINITY, f64::min)
    }

    /// What a topology saves over the horizon with lengths that are off, see [`Ahead::tilted`].
    fn gain_s(
        &self,
        target: Topology,
        tilt: [i32; 2],
        output_error: impl Fn(&Lengths) -> f64,
    ) -> f64 {
        let ahead = self.ahead.tilted(tilt, output_error);
        // What came before may come again, or not: it is a reason to stay, not to change.
        let whole = ahead.cost_s(self.now) - ahead.cost_s(target);
        let present = ahead.now_cost_s(self.now) - ahead.now_cost_s(target);
        whole.min(present)
    }

    fn moves(&self, target: Topology) -> Vec<(Role, Role)> {
        let gives = |role: Role| self.now.count(role).saturating_sub(target.count(role));
        let takes = |role: Role| target.count(role).saturating_sub(self.now.count(role));
        let list = |many: &dyn Fn(Role) -> u32| {
            let each = ROLES.map(|role| vec![role; many(role) as usize]);
            each.concat()
        };
        list(&gives).into_iter().zip(list(&takes)).collect()
    }

    /// The changes to make first, at most so many: each that after which the workers do best.
    pub(super) fn first_of(
        &self,
        mut moves: Vec<(Role, Role)>,
        most: usize,
    ) -> Vec<(WorkerId, Role, Role)> {
        let mut now = self.now;
        let mut found: Vec<(WorkerId, Role, Role)> = Vec::new();
        while found.len() < most {
            let after = |index: usize| {
                let (from, to) = moves[index];
                let mut topology = now;
                *topology.of(from) -= 1;
                *topology.of(to) += 1;
                topology
                    .serves()
                    .then(|| (index, topology, self.ahead.cost_s(topology)))
            };
            // Equal ones stand together.
            let kinds = (0..moves.len()).filter(|&i| i == 0 || moves[i] != moves[i - 1]);
            let least = kinds.filter_map(after).min_by(|a, b| a.2.total_cmp(&b.2));
            let Some((index, topology, _)) = least else {
                break;
            };
            let (from, to) = moves.remove(index);
            let taken = |id| found.iter().any(|&(worker, ..)| worker == id);
            let Some((worker, _)) = self.cheapest(from, to, taken) else {
                break;
            };
            found.push((worker, from, to));
            now = topology;
        }
        found
    }

    /// The worker of a role, of those not taken, whose change costs least, and what that is.
    fn cheapest(
        &self,
        from: Role,
        to: Role,
        taken: impl Fn(WorkerId) -> bool,
    ) -> Option<(WorkerId, f64)> {
        let able = self.workers.iter();
        let able = able.filter(|seen| seen.role == from && !seen.pinned && !taken(seen.id));
        let costs = able.map(|seen| (seen.id, self.change_s(seen, to)));
        costs.min_by(|(_, one), (_, other)| one.total_cmp(other))
    }

    /// What requests lose that are on a worker when its role changes: those that decode there
    /// beside the prompts that come, and new ones behind the prompts that wait there.
    fn change_s(&self, seen: &Seen, to: Role) -> f64 {
        let task = self.ahead.now();
        let (rates, sequences) = (&task.rates, seen.sequences);
        let backlog_s = rates.prompt_token_s * seen.backlog_tokens;
        let step_s = rates.decode_s(sequences, seen.kv_tokens);
        let rest_s = step_s * task.lengths.output_tokens / 2.0;
        let stalled_s = if to == Role::Prefill {
            sequences * rest_s / 2.0
        } else {
            0.0
        };
        let arriving = task.lengths.rate * backlog_s / self.workers.len() as f64;
        let behind_s = if to == Role::Decode {
            backlog_s * arriving / 2.0
        } else {
            0.0
        };
        stalled_s + behind_s
    }
}

/// Whether an operator set the role.
pub(super) fn is_pinned(state: &WorkerState) -> bool {
    owner::is_pinned(state.info.as_ref().map_or("", |info| &info.role_owner))
}
