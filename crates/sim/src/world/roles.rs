//! Changes of roles: orders to workers, and what the router hears of them.

use tasuki_core::Role;

use super::{Event, World};
use crate::roles::RoleChange;

const ROLES: [Role; 3] = [Role::Prefill, Role::Decode, Role::Mixed];

impl World<'_> {
    pub(super) fn begin_roles(&mut self) {
        if let Some(every_s) = self.decider.every_s() {
            self.at(self.now.plus_s(every_s), Event::Roles);
        }
    }

    pub(super) fn look_at_roles(&mut self) {
        self.begin_roles();
        self.count_outputs();
        let (requests, _, tokens) = self.admission.waiting();
        let now = self.now.since_start();
        let found = self.decider.look(&self.fleet, (requests, tokens), now);
        for (worker, from, to, reason) in found {
            let worker = worker.0;
            self.run.role_changes.push(RoleChange {
                at: self.now,
                worker,
                from,
                to,
                reason,
            });
            let role = ROLES
                .iter()
                .position(|role| *role == to)
                .unwrap_or_default() as u8;
            // There and back: the router places by what the worker has reported.
            let at = self.now.plus_s(2.0 * self.config.message_s);
            self.at(at, Event::Role { worker, role });
        }
    }

    pub(super) fn take_role(&mut self, worker: u32, role: u8) {
        let Some(key) = self.keys[worker as usize] else {
            return;
        };
        self.workers[worker as usize].config.role = ROLES[role as usize];
        let known = self
            .fleet
            .worker(key.worker)
            .and_then(|state| state.info.clone());
        let Some(mut info) = known else {
            return;
        };
        info.role = ROLES[role as usize];
        info.role_epoch += 1;
        if self.fleet.on_info(key, info) {
            self.workers_changed();
            self.settle();
        }
    }
}
