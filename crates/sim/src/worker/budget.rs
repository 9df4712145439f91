//! Room of a worker for its own work and for what is pulled: the rules of `engine/budget.py`.

use super::Worker;
use super::sequence::{SeqId, Stage};

#[derive(Debug, Default)]
pub(super) struct Budget {
    /// Decode legs that have not started.
    pub inbound: Vec<SeqId>,
    /// Promised by credits and not taken yet.
    pub reserved: u32,
    /// Held for decode legs that have not started.
    pub assigned: u32,
    /// Held by prefill legs, with and without credit.
    pub outbound: u32,
    pub ahead: u32,
    /// Decode legs that asked for room in vain.
    pub denied: u32,
    /// Decode legs with credit, until they end.
    pub pulled: u32,
}

impl Worker {
    fn reach(&self) -> u32 {
        let limits = &self.config.limits;
        limits
            .num_blocks
            .saturating_sub(limits.max_request_blocks())
    }

    fn free_blocks(&self) -> u32 {
        self.pool.available().saturating_sub(self.budget.reserved)
    }

    /// Blocks that own work may take now.
    pub(super) fn own_room(&self) -> u32 {
        let room = self.free_blocks();
        if self.budget.denied == 0 {
            return room;
        }
        let inbound = self.budget.reserved + self.budget.assigned;
        let floor = self.config.limits.max_request_blocks();
        room.saturating_sub(floor.saturating_sub(inbound))
    }

    /// Whether a prefill leg of so many blocks may start.
    pub(super) fn may_hold(&self, blocks: u32, credited: bool) -> bool {
        let budget = &self.budget;
        if blocks + budget.outbound > self.reach() {
            return false;
        }
        if credited {
            return true;
        }
        let limits = &self.config.limits;
        let floor = limits.max_request_blocks();
        let inbound = budget.reserved + budget.assigned;
        let by_reach = self
            .reach()
            .saturating_sub(floor.max(inbound) + budget.ahead);
        let by_half = self.free_blocks().saturating_sub(limits.num_blocks / 2);
        budget.denied == 0 && blocks <= by_reach.min(by_half)
    }

    /// Promises a decode leg its room, if there is any.
    pub fn may_credit(&mut self, seq: SeqId) -> bool {
        let (sequence, limits) = (self.sequence(seq), self.config.limits);
        if sequence.credited {
            return true;
        }
        let left = sequence
            .leg
            .output_tokens
            .saturating_sub(sequence.leg.resumed);
        let length = sequence.tokens + left.min(limits.headroom_tokens);
        let wanted = limits.blocks_for(length.min(limits.max_model_len));
        let slots = limits
            .max_running_requests
            .saturating_sub(self.budget.pulled);
        let inbound = self.budget.reserved + self.budget.assigned;
        let by_reach = self.reach().saturating_sub(inbound + self.budget.ahead);
        let room = self
            .free_blocks()
            .saturating_sub(self.decodes.count())
            .min(by_reach);
        let fits = slots > 0 && wanted <= room;
        let sequence = self.sequence_mut(seq);
        let newly_denied = !fits && !std::mem::replace(&mut sequence.denied, !fits);
        let was_denied = fits && sequence.denied;
        if fits {
            sequence.denied = false;
            sequence.credited = true;
            sequence.reserved = wanted;
            self.budget.reserved += wanted;
            self.budget.pulled += 1;
        }
        self.budget.denied += u32::from(newly_denied);
        self.budget.denied -= u32::from(was_denied);
        fits
    }

    /// Gives a credited decode leg its blocks; tokens of its prompt that are cached here.
    pub fn assign(&mut self, seq: SeqId) -> u32 {
        let limits = self.config.limits;
        let sequence = self.sequence(seq);
        let (chunks, tokens) = (sequence.leg.chunks.clone(), sequence.tokens);
        let named = if limits.prefix_caching {
            self.pool.cached(&chunks)
        } else {
            0
        };
        let cached = named as u32 * self.chunk_tokens();
        let total = limits.blocks_for(tokens);
        let own = total.saturating_sub(cached / limits.block_size);
        self.pool.hold(&chunks[..named]);
        self.pool.take(own);
        let sequence = self.sequence_mut(seq);
        (sequence.blocks, sequence.named) = (own, named);
        let kept = sequence.reserved.saturating_sub(total);
        let freed = std::mem::replace(&mut sequence.reserved, kept) - kept;
        self.budget.reserved -= freed;
        self.budget.assigned += total;
        cached
    }

    /// A decode leg starts or ends: it is not inbound any more.
    pub(super) fn drop_inbound(&mut self, seq: SeqId) {
        let Some(at) = self.budget.inbound.iter().position(|&known| known == seq) else {
            return;
        };
        self.budget.inbound.swap_remove(at);
        let limits = self.config.limits;
        let sequence = self.sequence_mut(seq);
        let reserved = std::mem::take(&mut sequence.reserved);
        let denied = std::mem::take(&mut sequence.denied);
        let is_assigned = sequence.blocks > 0 || sequence.named > 0;
        let assigned = if is_assigned {
            limits.blocks_for(sequence.tokens)
        } else {
            0
        };
        self.budget.reserved -= reserved;
        self.budget.assigned -= assigned;
        self.budget.denied -= u32::from(denied);
    }

    /// Credit for a prefill leg is there: it may take blocks as own work does.
    pub fn credit(&mut self, seq: SeqId) {
        let sequence = self.sequence_mut(seq);
        if !std::mem::replace(&mut sequence.credited, true)
            && matches!(sequence.stage, Stage::Prefilling | Stage::Held)
        {
            let blocks = sequence.blocks;
            self.budget.ahead -= blocks.min(self.budget.ahead);
        }
    }

    /// Decode legs that wait for room, oldest first.
    pub fn denied(&self) -> Vec<SeqId> {
        if self.budget.denied == 0 {
            return Vec::new();
        }
        let inbound = self.budget.inbound.iter().copied();
        let mut denied: Vec<SeqId> = inbound.filter(|&s| self.sequence(s).denied).collect();
        denied.sort_unstable_by_key(|&seq| self.sequence(seq).age);
        denied
    }
}
