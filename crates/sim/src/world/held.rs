//! What workers hold when a run begins.

use tasuki_core::Role;

use super::World;

impl World<'_> {
    /// Workers hold what clients say was served before: one copy where prompts are computed and one
    /// where answers are decoded, as a handoff leaves them.
    pub(super) fn hold_prompts(&mut self) {
        let (decode, others): (Vec<u32>, Vec<u32>) = (0..self.workers.len() as u32)
            .partition(|&worker| self.workers[worker as usize].config.role == Role::Decode);
        let room = |group: &[u32]| -> usize {
            let workers = group.iter().map(|&worker| &self.workers[worker as usize]);
            workers.map(|worker| worker.pool.most_chunks()).sum()
        };
        let held = self.clients.held(room(&decode).max(room(&others)));
        if held.is_empty() {
            return;
        }
        for group in [&decode, &others] {
            // A mixed worker decodes what others have computed, too.
            let mixed = |&worker: &u32| self.workers[worker as usize].config.role == Role::Mixed;
            let copies = 1 + usize::from(group.iter().any(mixed));
            let copies = copies.min(group.len());
            for (at, names) in held.iter().enumerate() {
                for copy in 0..copies {
                    self.workers[group[(at + copy) % group.len()] as usize].remember(names);
                }
            }
        }
        for worker in 0..self.workers.len() as u32 {
            self.report(worker, Vec::new());
        }
    }
}
