//! What may happen next, and the faults.

use std::collections::VecDeque;

use tasuki_core::{HandoffKind, Positions};

use super::super::sim_worker::{Progress, ended};
use super::setup::{Action, Crash};
use super::{World, engine, leg_id};
use crate::leg::{LegEndReason, LegKind};
use crate::machine::Input;
use crate::worker_ref::WorkerKey;

impl World {
    /// All that may happen now: the undisturbed run's next step first, faults last.
    pub fn actions(&self) -> Vec<Action> {
        let mut actions = Vec::new();
        let waiting = |(key, queue): &(WorkerKey, VecDeque<_>)| (!queue.is_empty()).then_some(*key);
        actions.extend(
            self.to_worker
                .values()
                .filter_map(waiting)
                .map(Action::ToWorker),
        );
        let waiting = |(key, queue): &(WorkerKey, VecDeque<_>)| (!queue.is_empty()).then_some(*key);
        actions.extend(
            self.to_router
                .values()
                .filter_map(waiting)
                .map(Action::ToRouter),
        );
        for (key, leg) in self.legs() {
            if self.can_advance(leg) {
                actions.push(Action::Advance(leg_id(key, leg)));
            } else if let Some(reason) = self.ends_by_itself(leg) {
                actions.push(Action::EndLeg(leg_id(key, leg), reason));
            }
        }
        let down = (0..self.workers.len()).filter(|&at| self.workers[at].key.is_none());
        actions.extend(down.map(Action::Restart));
        let may_pass = !self.setup.stalls || self.faults_left > 0 || actions.is_empty();
        if self.machine.deadline().is_some() && may_pass {
            actions.push(Action::TimePasses);
        }
        if self.faults_left > 0 {
            self.add_faults(&mut actions);
        }
        actions
    }

    fn add_faults(&self, actions: &mut Vec<Action>) {
        use LegEndReason as R;
        let serial = self.setup.capabilities.handoff == HandoffKind::Ticket;
        for (key, leg) in self.legs() {
            let reasons: &[R] = match (leg.kind, leg.progress) {
                (LegKind::Decode, Progress::Begun) => &[R::Refused, R::KvLost, R::Failed],
                (LegKind::Decode, _) => &[R::Returned, R::Failed],
                // Without the ticket that was asked for.
                (LegKind::Prefill, _) if serial => &[R::Failed, R::HandedOff],
                _ => &[R::Failed],
            };
            let end = |&reason: &R| Action::EndLeg(leg_id(key, leg), reason);
            for action in reasons.iter().map(end) {
                if !actions.contains(&action) {
                    actions.push(action);
                }
            }
        }
        for (at, worker) in self.workers.iter().enumerate() {
            if worker.key.is_some() {
                for crash in [Crash::AfterFlush, Crash::MessagesLost, Crash::StreamOnly] {
                    actions.push(Action::Crash(at, crash));
                }
            }
        }
        let exact = self.setup.capabilities.positions == Positions::Exact;
        for (key, queue) in self.to_router.values().filter(|_| exact) {
            if let Some(Input::Output(..) | Input::Ended(..)) = queue.front() {
                actions.push(Action::Repeat(*key));
            }
        }
        if self.setup.client_acts {
            actions.push(Action::HangUp);
            actions.extend(
                self.client
                    .tokens
                    .keys()
                    .map(|&choice| Action::Stop(choice)),
            );
        }
    }

    pub(super) fn fault(&mut self, action: &Action) {
        // A decode leg whose KV is gone ends by itself: no fault of its own.
        let by_itself = matches!(action, Action::EndLeg(leg, reason)
            if self.leg(*leg).is_some_and(|leg| self.ends_by_itself(leg) == Some(*reason)));
        self.faults_left -= usize::from(!by_itself);
        match action {
            Action::EndLeg(leg, reason) => {
                self.take_leg(*leg).expect("only offered for a leg");
                self.report(leg.worker, Input::Ended(*leg, ended(*reason)));
            }
            Action::Crash(at, crash) => self.crash(*at, *crash),
            Action::Repeat(key) => {
                let queue = self.to_router.get_mut(&key.connection).expect("offered");
                let first = queue.1.front().expect("offered").clone();
                queue.1.push_front(first);
            }
            Action::Stop(choice) => {
                self.client.stopped.insert(*choice);
                self.feed(Input::Stop(*choice));
            }
            Action::HangUp => {
                self.client.gone = true;
                self.feed(Input::HangUp);
            }
            other => unreachable!("{other:?} is no fault"),
        }
    }

    fn crash(&mut self, at: usize, crash: Crash) {
        let key = self.workers[at].key.take().expect("only offered when up");
        for leg in std::mem::take(&mut self.workers[at].legs) {
            if crash == Crash::StreamOnly && leg.progress == Progress::Prefilled {
                self.orphans.insert((leg.attempt, engine(key)));
            }
        }
        if crash != Crash::StreamOnly {
            self.orphans.retain(|(_, owner)| *owner != engine(key));
        }
        self.to_worker.remove(&key.connection);
        if crash == Crash::MessagesLost {
            self.to_router.remove(&key.connection);
        }
        self.report(key, Input::Lost(key));
    }
}
