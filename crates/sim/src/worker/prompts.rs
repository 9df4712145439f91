//! The prompts of the next flight: which ones start, and how many tokens each gets.

use super::chunks::{Shares, prompt_tokens};
use super::flight::Flight;
use super::sequence::{SeqId, Stage};
use super::{Told, Worker};
use crate::time::Time;

impl Worker {
    pub(super) fn plan_prompts(&mut self, flight: &mut Flight, seen: Time, now: Time, admit: bool) {
        let (mut shortest, mut backlog) = (u32::MAX, 0u64);
        for &seq in self.prefilling.iter().chain(&self.waiting) {
            let sequence = self.sequence(seq);
            if sequence.ready <= seen {
                let left = sequence.tokens - sequence.computed;
                shortest = shortest.min(left);
                backlog += u64::from(left);
            }
        }
        if backlog == 0 {
            return;
        }
        let decode_s = if flight.decodes > 0 {
            let (count, kv) = (flight.work.sequences, flight.work.kv_tokens);
            self.slowness * self.config.steps.decode_s(count, kv)
        } else {
            0.0
        };
        let decodes = (flight.decodes, decode_s);
        let budget = prompt_tokens(&self.config.limits, &self.rates, decodes, backlog);
        let mut shares = Shares::new(budget, shortest);
        let mut slots = {
            let own = self
                .prefilling
                .iter()
                .filter(|&&s| !self.sequence(s).hands_over());
            let taken = own.count() as u32 + flight.decodes;
            self.config
                .limits
                .max_running_requests
                .saturating_sub(taken)
        };
        for lifted in [false, true] {
            if lifted {
                if shares.left == 0 {
                    break;
                }
                shares.lift();
                self.extend(flight, &mut shares);
            }
            for at in 0..self.prefilling.len() {
                let seq = self.prefilling[at];
                if flight.chunks.iter().all(|chunk| chunk.0 != seq) {
                    self.chunk(seq, flight, &mut shares);
                }
            }
            if admit {
                self.admit(flight, &mut shares, &mut slots, seen, now);
            }
        }
        for &(seq, tokens) in &flight.chunks {
            let start = f64::from(self.sequence(seq).computed);
            let tokens = f64::from(tokens);
            flight.work.prompt_tokens += tokens;
            flight.work.prompt_squares += tokens * (2.0 * start + tokens);
        }
    }

    /// Starts prefills, oldest first, while tokens and blocks last.
    fn admit(
        &mut self,
        flight: &mut Flight,
        shares: &mut Shares,
        slots: &mut u32,
        seen: Time,
        now: Time,
    ) {
        let limits = self.config.limits;
        let (mut at, headroom) = (0, flight.decodes);
        while at < self.waiting.len() && shares.left > 0 {
            let seq = self.waiting[at];
            at += 1;
            let sequence = self.sequence(seq);
            let (tokens, credited) = (sequence.tokens, sequence.credited);
            if sequence.ready > seen || shares.offer(tokens) == 0 {
                continue;
            }
            let total = limits.blocks_for(tokens);
            if sequence.hands_over() {
                if !self.may_hold(total, credited) {
                    continue;
                }
            } else if *slots == 0 {
                continue;
            }
            let chunks = sequence.leg.chunks.clone();
            let reusable = ((tokens - 1) / self.chunk_tokens()) as usize;
            let reusable = if limits.prefix_caching {
                reusable.min(chunks.len())
            } else {
                0
            };
            let named = self.pool.cached(&chunks[..reusable]);
            let cached = named as u32 * self.chunk_tokens();
            let own = total - cached / limits.block_size;
            let taken = own + self.pool.unheld_blocks(&chunks[..named]);
            if taken > self.own_room().saturating_sub(headroom) {
                if credited {
                    return;
                }
                continue;
            }
            self.pool.hold(&chunks[..named]);
            self.pool.take(own);
            at -= 1;
            self.waiting.remove(at);
            self.start_prefill(seq, (own, named, cached), now);
            if !self.sequence(seq).hands_over() {
                *slots -= 1;
            }
            self.chunk(seq, flight, shares);
        }
    }

    fn start_prefill(&mut self, seq: SeqId, (own, named, cached): (u32, usize, u32), now: Time) {
        self.counters.cached_tokens += u64::from(cached);
        let total = self.config.limits.blocks_for(self.sequence(seq).tokens);
        let sequence = &mut self.sequences[seq as usize];
        sequence.stage = Stage::Prefilling;
        sequence.blocks = own;
        sequence.named = named;
        sequence.computed = cached;
        if sequence.scheduled.is_none() {
            sequence.scheduled = Some(now);
            sequence.cached = cached;
        }
        let age = sequence.age;
        if sequence.hands_over() {
            self.budget.outbound += total;
            if !self.sequences[seq as usize].credited {
                self.budget.ahead += total;
            }
            self.told.push(Told::Started(seq));
        }
        let at = self
            .prefilling
            .partition_point(|&other| self.sequences[other as usize].age < age);
        self.prefilling.insert(at, seq);
    }

    fn chunk(&self, seq: SeqId, flight: &mut Flight, shares: &mut Shares) {
        let sequence = self.sequence(seq);
        let length = sequence.tokens - sequence.computed;
        let tokens = shares.offer(length);
        if tokens > 0 {
            shares.take(length, tokens);
            flight.chunks.push((seq, tokens));
        }
    }

    /// Gives what is left to chunks that were cut short, shortest first.
    fn extend(&self, flight: &mut Flight, shares: &mut Shares) {
        let rest = |&(seq, tokens): &(SeqId, u32)| {
            let sequence = self.sequence(seq);
            sequence.tokens - sequence.computed - tokens
        };
        flight.chunks.sort_by_key(rest);
        for chunk in &mut flight.chunks {
            let more = rest(chunk).min(shares.left);
            chunk.1 += more;
            shares.left -= more;
        }
    }
}
