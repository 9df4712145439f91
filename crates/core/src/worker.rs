//! A worker as a placement decision sees it.

use std::ops::{AddAssign, SubAssign};

use crate::{Capabilities, KvDomain, Role, WorkerId};

/// Whether a worker may be given new work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// Connected, and its reports are recent.
    Ready,
    /// Connected but silent for too long.
    Suspect,
    /// Connected, and finishing what it has: it gets no new work.
    Draining,
    /// Connected, and without new work for a pause: it failed several requests in a row.
    Failing,
    /// Not connected.
    Down,
}

/// What a worker can hold at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Prompt plus output of one request.
    pub max_model_len_tokens: u32,
    /// Choices of one request. `u32::MAX` where the worker tells no limit.
    pub max_sequences: u32,
    pub block_size_tokens: u32,
    pub total_blocks: u32,
}

impl Capacity {
    /// Of KV, of all its sequences together.
    pub fn tokens(&self) -> u64 {
        u64::from(self.total_blocks) * u64::from(self.block_size_tokens)
    }
}

/// A worker's own account of itself, as of its last report.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ReportedLoad {
    pub waiting_requests: u32,
    pub running_requests: u32,
    /// That decode; each choice is one.
    pub running_sequences: u32,
    /// That will decode there and do not yet.
    pub waiting_sequences: u32,
    /// Of these: whose prompt another worker computes, so their KV has not come.
    pub awaited_sequences: u32,
    /// That the decoding ones attend to.
    pub running_kv_tokens: u64,
    /// That the waiting ones attend to when they begin to decode. `None`: the worker does not
    /// report it.
    pub waiting_kv_tokens: Option<u64>,
    /// Not yet computed, of all requests there.
    pub waiting_prefill_tokens: u64,
    /// Free or evictable.
    pub free_blocks: u32,
}

/// What we sent there that its last report cannot have counted yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outstanding {
    pub prefill_tokens: u64,
    pub requests: u32,
    /// That will decode there.
    pub sequences: u32,
    /// Of these: whose prompt another worker computes, so their KV has not come.
    pub awaited_sequences: u32,
    /// That `sequences` will attend to. Of a worker that does not report the KV of waiting sequences
    /// also that of ours among them.
    pub kv_tokens: u64,
    /// Blocks that our requests are going to take but do not hold yet.
    pub promised_blocks: u64,
    /// That the worker reports as waiting and `promised_blocks` has room for.
    pub waiting_kv_tokens: u64,
}

impl AddAssign for Outstanding {
    fn add_assign(&mut self, other: Self) {
        self.prefill_tokens += other.prefill_tokens;
        self.requests += other.requests;
        self.sequences += other.sequences;
        self.awaited_sequences += other.awaited_sequences;
        self.kv_tokens += other.kv_tokens;
        self.promised_blocks += other.promised_blocks;
        self.waiting_kv_tokens += other.waiting_kv_tokens;
    }
}

/// Of what was added before.
impl SubAssign for Outstanding {
    fn sub_assign(&mut self, other: Self) {
        self.prefill_tokens -= other.prefill_tokens;
        self.requests -= other.requests;
        self.sequences -= other.sequences;
        self.awaited_sequences -= other.awaited_sequences;
        self.kv_tokens -= other.kv_tokens;
        self.promised_blocks -= other.promised_blocks;
        self.waiting_kv_tokens -= other.waiting_kv_tokens;
    }
}

/// One worker at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerView {
    pub id: WorkerId,
    pub domain: KvDomain,
    pub capabilities: Capabilities,
    pub role: Role,
    /// Its hardware class, an index of [`crate::Hardware`].
    pub hardware: usize,
    /// Equal on workers of one machine; 0: unknown.
    pub machine: u32,
    pub health: Health,
    pub capacity: Capacity,
    pub load: ReportedLoad,
    pub outstanding: Outstanding,
}

impl WorkerView {
    /// Prompt tokens to be computed before a new arrival's, as far as is known.
    pub fn prefill_backlog_tokens(&self) -> u64 {
        let reported = self.load.waiting_prefill_tokens;
        reported.saturating_add(self.outstanding.prefill_tokens)
    }

    /// Sequences that decode there, now or soon.
    pub fn sequences(&self) -> u32 {
        let reported = (self.load.running_sequences).saturating_add(self.load.waiting_sequences);
        reported.saturating_add(self.outstanding.sequences)
    }

    /// Of [`WorkerView::sequences`]: those that a prompt stalls that is computed there next. They
    /// decode there, or their prompts come before it; those that await KV from elsewhere do neither.
    pub fn stalled_sequences(&self) -> u32 {
        let awaited = self.load.awaited_sequences;
        let awaited = awaited.saturating_add(self.outstanding.awaited_sequences);
        self.sequences().saturating_sub(awaited)
    }

    /// Requests there, as far as is known.
    pub fn requests(&self) -> u32 {
        let reported = (self.load.waiting_requests).saturating_add(self.load.running_requests);
        reported.saturating_add(self.outstanding.requests)
    }

    /// Tokens of KV that [`WorkerView::sequences`] attend to, as far as is known.
    pub fn kv_tokens(&self) -> u64 {
        let waiting = self.load.waiting_kv_tokens.unwrap_or(0);
        let reported = self.load.running_kv_tokens.saturating_add(waiting);
        reported.saturating_add(self.outstanding.kv_tokens)
    }

    /// Blocks that a new arrival may count on.
    pub fn spare_blocks(&self) -> u64 {
        let promised = self.outstanding.promised_blocks;
        let taken = promised.saturating_add(self.awaited_blocks());
        u64::from(self.load.free_blocks).saturating_sub(taken)
    }

    /// Free blocks that the waiting sequences of other routers will take, as far as the worker's
    /// report shows. Blocks that are neither free nor of sequences that decode count as held by
    /// them already. A prompt that several of them share counts for each.
    fn awaited_blocks(&self) -> u64 {
        let waiting = self.load.waiting_kv_tokens.unwrap_or(0);
        let others = waiting.saturating_sub(self.outstanding.waiting_kv_tokens);
        let used = self
            .capacity
            .total_blocks
            .saturating_sub(self.load.free_blocks);
        let held = u64::from(used).saturating_sub(self.blocks_for(self.load.running_kv_tokens));
        self.blocks_for(others).saturating_sub(held)
    }

    /// Whether it has nothing to do, as far as is known.
    pub fn is_idle(&self) -> bool {
        self.requests() == 0
    }

    /// Blocks that hold so many tokens.
    pub fn blocks_for(&self, tokens: u64) -> u64 {
        tokens.div_ceil(u64::from(self.capacity.block_size_tokens.max(1)))
    }
}
