//! What the next flight is, and what a flight that has ended brought: the rules of
//! `engine/scheduler.py`.

use tasuki_core::StepSample;
use tasuki_flow::LegKind;

use super::flight::Flight;
use super::sequence::{Age, SeqId, Stage};
use super::{REPORT_S, Told, Worker};
use crate::time::Time;

/// Routers learn from a step of each kind so often at most.
const SAMPLE_S: f64 = 0.1;

impl Worker {
    pub(super) fn chunk_tokens(&self) -> u32 {
        let size = self.config.limits.block_size;
        128u32.div_ceil(size) * size
    }

    /// Books the flight that has ended.
    pub(super) fn land(&mut self, now: Time) {
        let Some(flight) = self.flight.take() else {
            return;
        };
        self.lead_s = flight.lead_s;
        let work_s = now.s_since(flight.began);
        self.counters.busy_s += work_s;
        self.counters.steps += flight.steps;
        if flight.decodes > 0 {
            self.log
                .add(&flight, self.decodes.step, self.joined.len() as u32);
            let first_end = flight.began.plus_s(flight.first_s);
            while let Some(seq) = self.joined.pop() {
                self.sequences[seq as usize].second.get_or_insert(first_end);
            }
            self.decodes.step += flight.steps;
            self.counters.output_tokens += u64::from(flight.decodes) * flight.steps;
        }
        while let Some(seq) = self.decodes.pop_ended() {
            let sequence = &self.sequences[seq as usize];
            if sequence.stage == Stage::Decoding && sequence.place.end <= self.decodes.step {
                self.finish(seq);
            }
        }
        self.sample(&flight, now);
        if !flight.chunks.is_empty() {
            self.counters.prompt_steps_s += work_s;
            for &(seq, tokens) in &flight.chunks {
                self.computed(seq, tokens);
            }
        }
        self.spare = flight.chunks;
    }

    /// What routers and the sizes of steps learn from a flight.
    fn sample(&mut self, flight: &Flight, now: Time) {
        let work = &flight.work;
        let step_s = flight.first_s - flight.between_s;
        self.steps += flight.steps;
        if work.prompt_tokens > 0.0 {
            let decode_s = if flight.decodes > 0 {
                self.slowness * self.config.steps.decode_s(work.sequences, work.kv_tokens)
            } else {
                0.0
            };
            self.rates.learn(work, step_s, decode_s);
        }
        let kind = usize::from(work.prompt_tokens > 0.0);
        if now.s_since(self.sampled[kind]) < SAMPLE_S && self.samples[kind].is_some() {
            return;
        }
        self.sampled[kind] = now;
        self.samples[kind] = Some(StepSample {
            number: self.steps,
            duration_s: step_s,
            sequences: flight.decodes,
            kv_tokens: work.kv_tokens as u64,
            prefill_tokens: work.prompt_tokens as u32,
            prefill_squares: work.prompt_squares,
        });
    }

    /// So many more tokens of a prompt are computed.
    fn computed(&mut self, seq: SeqId, tokens: u32) {
        self.counters.prompt_tokens += u64::from(tokens);
        let sequence = &mut self.sequences[seq as usize];
        if sequence.stage != Stage::Prefilling {
            return;
        }
        sequence.computed += tokens;
        let done = sequence.computed == sequence.tokens;
        let kind = sequence.leg.kind;
        self.store(seq);
        if kind == LegKind::Prefill {
            self.told.push(Told::Computed(seq));
        }
        if !done {
            return;
        }
        self.prefilling.retain(|&known| known != seq);
        self.counters.output_tokens += 1;
        let sequence = &mut self.sequences[seq as usize];
        sequence.produced = sequence.produced.max(sequence.leg.resumed) + 1;
        let left = sequence.leg.output_tokens.saturating_sub(sequence.produced);
        self.told.push(Told::First(seq));
        if kind == LegKind::Prefill {
            sequence.stage = Stage::Held;
        } else if left == 0 {
            self.finish(seq);
        } else {
            self.start_decode(seq, left);
        }
    }

    /// Chunks of its prompt that are full now can be found by others.
    fn store(&mut self, seq: SeqId) {
        if !self.config.limits.prefix_caching {
            return;
        }
        let chunk_tokens = self.chunk_tokens();
        let chunk_blocks = chunk_tokens / self.config.limits.block_size;
        let sequence = &mut self.sequences[seq as usize];
        let full = (sequence.computed / chunk_tokens) as usize;
        let full = full.min(sequence.leg.chunks.len());
        if full <= sequence.named {
            return;
        }
        let new = full - sequence.named;
        self.pool.store(&sequence.leg.chunks[sequence.named..full]);
        sequence.named = full;
        sequence.blocks = sequence.blocks.saturating_sub(new as u32 * chunk_blocks);
    }

    fn start_decode(&mut self, seq: SeqId, steps: u32) {
        let sequence = &mut self.sequences[seq as usize];
        sequence.stage = Stage::Decoding;
        sequence.place = self.decodes.join(seq, sequence.computed, steps);
        self.joined.push(seq);
    }

    fn finish(&mut self, seq: SeqId) {
        self.told.push(Told::Finished(seq));
        let produced = self.produced(seq);
        self.detach(seq);
        self.sequences[seq as usize].produced = produced;
        self.gone.push(seq);
    }

    /// Takes a sequence from wherever it is, and its blocks from it.
    pub(super) fn detach(&mut self, seq: SeqId) {
        let sequence = &self.sequences[seq as usize];
        let (stage, kind) = (sequence.stage, sequence.leg.kind);
        match stage {
            Stage::Waiting => self.waiting.retain(|&known| known != seq),
            Stage::Prefilling => self.prefilling.retain(|&known| known != seq),
            Stage::Inbound => {
                self.arriving.retain(|&(_, known)| known != seq);
                self.drop_inbound(seq);
            }
            Stage::Decoding => {
                let sequence = &mut self.sequences[seq as usize];
                let place = sequence.place;
                // Blocks that it grew by.
                let size = self.config.limits.block_size;
                let computed = self.decodes.computed(&place);
                // Those that a flight which has not landed has taken for it are there, too.
                let steps = self.flight.as_ref().map_or(0, |flight| flight.steps as u32);
                let held = (computed + steps).div_ceil(size) - sequence.tokens.div_ceil(size);
                sequence.blocks += held;
                self.decodes.leave(&place);
                self.joined.retain(|&known| known != seq);
            }
            Stage::Held => {}
            Stage::Gone => return,
        }
        let sequence = &mut self.sequences[seq as usize];
        if kind == LegKind::Prefill && matches!(stage, Stage::Prefilling | Stage::Held) {
            let blocks = self.config.limits.blocks_for(sequence.tokens);
            self.budget.outbound -= blocks;
            if !sequence.credited {
                self.budget.ahead -= blocks.min(self.budget.ahead);
            }
        }
        if kind == LegKind::Decode && sequence.credited {
            self.budget.pulled -= 1;
        }
        self.generating -= u32::from(kind != LegKind::Prefill);
        sequence.stage = Stage::Gone;
        self.drop_blocks(seq);
    }

    fn drop_blocks(&mut self, seq: SeqId) {
        let sequence = &mut self.sequences[seq as usize];
        let blocks = std::mem::take(&mut sequence.blocks);
        let named = std::mem::take(&mut sequence.named);
        self.pool.give(blocks);
        self.pool.release(&sequence.leg.chunks[..named]);
    }

    pub(super) fn free(&mut self, seq: SeqId) {
        self.free.push(seq);
    }

    /// Plans the next flight. `was_idle`: none ended now.
    pub(super) fn take_off(&mut self, now: Time, was_idle: bool) {
        let limits = self.config.limits;
        let (lead, launch) = (now.minus_s(self.lead_s), now.minus_s(limits.launch_s));
        self.join_pulled(now);
        let mut flight = Flight {
            began: now,
            steps: 1,
            chunks: std::mem::take(&mut self.spare),
            ..Flight::default()
        };
        flight.chunks.clear();
        let preempted = self.make_room();
        let (count, kv_tokens) = (self.decodes.count(), self.decodes.kv_tokens());
        flight.decodes = count;
        flight.work.sequences = f64::from(count);
        flight.work.kv_tokens = kv_tokens as f64;
        // An idle worker wakes for the first one and plans at once; one that has just become
        // idle has nothing to be late for.
        let seen = match (was_idle, count == 0 && self.prefilling.is_empty()) {
            (true, _) => launch,
            (false, true) => now,
            (false, false) => lead,
        };
        if !self.waiting.is_empty() || !self.prefilling.is_empty() {
            self.plan_prompts(&mut flight, seen, now, !preempted);
        }
        if count == 0 && flight.chunks.is_empty() {
            self.spare = flight.chunks;
            return;
        }
        flight.between_s = self.slowness * limits.between_steps_s(flight.work.sequences);
        let mut step_s = self.config.steps.step_s(&flight.work);
        if was_idle {
            step_s += self.config.steps.first_longer_s(&flight.work);
        }
        flight.first_s = self.slowness * step_s + flight.between_s;
        let prompts = !flight.chunks.is_empty();
        flight.lead_s = limits.planned_before_s(flight.work.sequences, flight.first_s, prompts);
        if flight.chunks.is_empty() {
            self.fly_far(&mut flight, seen);
        }
        self.pool.take(self.decodes.growth(flight.steps) as u32);
        flight.ends = now.plus_s(flight.seconds(flight.steps));
        self.flight = Some(flight);
    }

    /// Only decodes: as many steps as nothing changes in.
    fn fly_far(&self, flight: &mut Flight, seen: Time) {
        let count = flight.work.sequences;
        let most = (REPORT_S / flight.first_s).max(1.0) as u64;
        let mut steps = self.decodes.steps_to_end().clamp(1, most);
        let room = u64::from(self.pool.available().saturating_sub(self.budget.reserved));
        while steps > 1 && self.decodes.growth(steps) > room {
            steps /= 2;
        }
        // Those that wait for blocks or slots are looked at whenever one ends; those that came too
        // late for this step are part of the next one.
        let late = self.waiting.iter().map(|&seq| self.sequence(seq).ready);
        let late = late.filter(|&ready| ready > seen);
        if let Some(at) = self.arriving.iter().map(|&(at, _)| at).chain(late).min() {
            let wait_s = at.s_since(flight.began) + flight.lead_s;
            steps = steps.min((wait_s / flight.first_s).ceil().max(1.0) as u64);
        }
        if steps > 1 {
            let last_kv = flight.work.kv_tokens + count * (steps - 1) as f64;
            let last_s = self.slowness * self.config.steps.decode_s(count, last_kv);
            flight.longer_s = (last_s + flight.between_s - flight.first_s) / (steps - 1) as f64;
        }
        flight.steps = steps;
    }

    /// Pulled sequences whose KV is there decode from now on.
    fn join_pulled(&mut self, now: Time) {
        let lead_s = if self.decodes.count() > 0 || !self.prefilling.is_empty() {
            self.lead_s
        } else {
            0.0
        };
        let seen = now.minus_s(lead_s);
        let mut at = 0;
        while at < self.arriving.len() {
            let (there, seq) = self.arriving[at];
            if there > seen {
                at += 1;
                continue;
            }
            self.arriving.swap_remove(at);
            self.drop_inbound(seq);
            let sequence = &mut self.sequences[seq as usize];
            sequence.computed = sequence.tokens;
            let left = sequence.leg.output_tokens.saturating_sub(sequence.produced);
            self.store(seq);
            if left == 0 {
                self.finish(seq);
            } else {
                self.start_decode(seq, left);
            }
        }
    }

    /// Lets the youngest give way until all that decode can grow. Whether any had to.
    fn make_room(&mut self) -> bool {
        let mut preempted = false;
        loop {
            let room = self.pool.available().saturating_sub(self.budget.reserved);
            if self.decodes.growth(1) <= u64::from(room) {
                return preempted;
            }
            let running = |s: &&super::Sequence| {
                let alive = matches!(s.stage, Stage::Decoding | Stage::Prefilling);
                alive && !s.hands_over()
            };
            let mut youngest = None;
            let mut count = 0;
            for (seq, sequence) in self.sequences.iter().enumerate() {
                if running(&sequence) {
                    count += 1;
                    let older = |&(age, _): &(Age, SeqId)| age < sequence.age;
                    if youngest.as_ref().is_none_or(older) {
                        youngest = Some((sequence.age, seq as SeqId));
                    }
                }
            }
            let Some((_, victim)) = youngest.filter(|_| count > 1) else {
                return preempted;
            };
            self.preempt(victim);
            preempted = true;
        }
    }

    fn preempt(&mut self, victim: SeqId) {
        self.counters.preemptions += 1;
        let produced = self.produced(victim);
        let kind = self.sequence(victim).leg.kind;
        if kind == LegKind::Decode {
            self.told.push(Told::Returned(victim));
            self.detach(victim);
            let sequence = &mut self.sequences[victim as usize];
            sequence.produced = produced;
            sequence.place.end = self.decodes.step;
            self.gone.push(victim);
            return;
        }
        if self.sequence(victim).stage == Stage::Decoding {
            self.told.push(Told::Paused(victim));
        }
        self.detach(victim);
        self.generating += 1;
        let sequence = &mut self.sequences[victim as usize];
        sequence.place.end = self.decodes.step;
        sequence.stage = Stage::Waiting;
        sequence.produced = produced;
        // It is computed again as it stands, and samples its next token then.
        sequence.leg.tokens = sequence.leg.tokens - sequence.leg.resumed + produced;
        sequence.leg.resumed = produced;
        sequence.tokens = sequence.leg.tokens;
        sequence.computed = 0;
        self.wait(victim);
    }
}
