//! A worker: the scheduler's rules over a model of its steps.
//!
//! ```text
//!  submit ─▶ waiting ─▶ prefilling ─▶ decoding (one group) ─▶ ended
//!                           │              ▲
//!                           └─▶ held until the peer has the KV (prefill legs)
//!                 pulled KV ───────────────┘ (decode legs)
//! ```
//!
//! A *flight* is what runs until the next moment at which something changes: one step with prompts
//! in it, or as many steps as only decode the same sequences. The [`crate::world`] calls
//! [`Worker::turn`] at its end, and gets what happened.

mod budget;
mod chunks;
mod config;
mod decodes;
mod flight;
mod plan;
mod pool;
mod prompts;
mod sequence;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;

use tasuki_core::{ChunkScheme, Identity, StepSample};
use tasuki_flow::LegKind;
use tasuki_flow::fleet::LoadReport;

use self::chunks::PromptRates;
pub use self::config::{Limits, WorkerConfig};
use self::decodes::Decodes;
pub use self::flight::{Flight, TokenLog};
use self::pool::Pool;
pub use self::sequence::{NewLeg, SeqId, Sequence, Stage};
use crate::time::Time;

/// Longest time between reports while something runs.
const REPORT_S: f64 = 0.1;

/// What happened in a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// A prefill leg got its blocks: its peer may get ready.
    Started(SeqId),
    /// More of a prefill leg's prompt is final.
    Computed(SeqId),
    /// The first token of this leg was sampled.
    First(SeqId),
    /// All tokens are there; the sequence is gone after the turn.
    Finished(SeqId),
    /// Preempted: the sequence is gone after the turn.
    Returned(SeqId),
    /// Preempted: it waits, and is computed again.
    Paused(SeqId),
}

/// See the module.
#[derive(Debug)]
pub struct Worker {
    pub config: WorkerConfig,
    sequences: Vec<Sequence>,
    free: Vec<SeqId>,
    /// By age.
    waiting: VecDeque<SeqId>,
    /// By age.
    prefilling: Vec<SeqId>,
    /// Pulled, and when.
    arriving: Vec<(Time, SeqId)>,
    decodes: Decodes,
    pub(crate) pool: Pool,
    budget: budget::Budget,
    rates: PromptRates,
    flight: Option<Flight>,
    /// How long before the end of the last flight this one was planned.
    lead_s: f64,
    /// Memory of the last flight's chunks.
    spare: Vec<(SeqId, u32)>,
    /// When [`Worker::turn`] is due.
    pub next: Time,
    /// Changes with `next`.
    pub turn_number: u32,
    ages: u64,
    /// When the last leg was read.
    received: Time,
    applied_legs: u64,
    generating: u32,
    pub(crate) told: Vec<Told>,
    gone: Vec<SeqId>,
    /// Sequences whose second token comes with the next step.
    joined: Vec<SeqId>,
    pub log: TokenLog,
    /// Factor of every step's time: 1 is normal.
    pub slowness: f64,
    samples: [Option<StepSample>; 2],
    sampled: [Time; 2],
    steps: u64,
    pub counters: Counters,
    reported: Time,
}

/// Since the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Counters {
    pub busy_s: f64,
    /// Of that, steps with prompts in them.
    pub prompt_steps_s: f64,
    pub steps: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    pub preemptions: u64,
    /// Most blocks held at once.
    pub peak_blocks: u32,
}

impl Worker {
    /// An idle worker. `tells`: of its prefix cache.
    pub fn new(config: WorkerConfig, log: bool, tells: bool) -> Self {
        let limits = config.limits;
        let chunk_blocks = 128u32.div_ceil(limits.block_size);
        Self {
            rates: PromptRates::warmed_up(&config.steps),
            decodes: Decodes::new(limits.block_size),
            pool: Pool::new(limits.num_blocks, chunk_blocks, tells),
            budget: budget::Budget::default(),
            config,
            sequences: Vec::new(),
            free: Vec::new(),
            waiting: VecDeque::new(),
            prefilling: Vec::new(),
            arriving: Vec::new(),
            flight: None,
            lead_s: 0.0,
            spare: Vec::new(),
            next: Time::NEVER,
            turn_number: 0,
            ages: 0,
            received: Time::ZERO,
            applied_legs: 0,
            generating: 0,
            told: Vec::new(),
            gone: Vec::new(),
            joined: Vec::new(),
            log: TokenLog::new(log),
            slowness: 1.0,
            samples: [None; 2],
            sampled: [Time::ZERO; 2],
            steps: 0,
            counters: Counters::default(),
            reported: Time::ZERO,
        }
    }

    pub fn sequence(&self, seq: SeqId) -> &Sequence {
        &self.sequences[seq as usize]
    }

    pub fn sequence_mut(&mut self, seq: SeqId) -> &mut Sequence {
        &mut self.sequences[seq as usize]
    }

    /// It holds these chunks of 128 tokens of a prompt that it served before.
    pub fn remember(&mut self, names: &Arc<[u64]>) {
        if self.config.limits.prefix_caching {
            self.pool.remember(&self.chunks().renamed(names));
        }
    }

    fn chunks(&self) -> ChunkScheme {
        ChunkScheme::of_blocks(Identity::default(), self.config.limits.block_size)
    }

    /// A leg arrives at `at`, which may be a little later than now. It is read after those that
    /// came before it.
    pub fn submit(&mut self, mut leg: NewLeg, at: Time) -> SeqId {
        leg.chunks = self.chunks().renamed(&leg.chunks);
        let at = at.max(self.received.plus_s(self.config.limits.receive_s));
        self.received = at;
        self.ages += 1;
        self.applied_legs = leg.number;
        let kind = leg.kind;
        self.generating += u32::from(kind != LegKind::Prefill);
        let age = (at.minus(leg.waited), self.ages);
        let sequence = Sequence::new(leg, age, at);
        let seq = match self.free.pop() {
            Some(seq) => {
                self.sequences[seq as usize] = sequence;
                seq
            }
            None => {
                self.sequences.push(sequence);
                (self.sequences.len() - 1) as SeqId
            }
        };
        if kind == LegKind::Decode {
            self.budget.inbound.push(seq);
        } else {
            self.wait(seq);
            self.wake(at);
        }
        seq
    }

    /// Lets a sequence wait, in its place in line.
    fn wait(&mut self, seq: SeqId) {
        let age = self.sequence(seq).age;
        let older = |&other: &SeqId| self.sequences[other as usize].age < age;
        let at = self.waiting.partition_point(older);
        self.waiting.insert(at, seq);
    }

    /// The KV of a decode leg is there at `at`: it decodes from its second token on.
    pub fn arrive(&mut self, seq: SeqId, at: Time) {
        self.arriving.push((at, seq));
        self.wake(at);
    }

    /// Something can be planned from `at` on.
    pub fn wake(&mut self, at: Time) {
        let next = match &mut self.flight {
            Some(flight) => {
                let Some(cut) = flight.cut(at.plus_s(flight.lead_s)) else {
                    return;
                };
                let saved = self.decodes.growth(cut.before) - self.decodes.growth(cut.after);
                self.pool.give(saved as u32);
                flight.ends
            }
            None => at.plus_s(self.config.limits.launch_s).min(self.next),
        };
        if next != self.next {
            self.next = next;
            self.turn_number = self.turn_number.wrapping_add(1);
        }
    }

    /// The end of a flight, or a wake: books what ran and plans what runs next. What happened is
    /// in `told`.
    pub fn turn(&mut self, now: Time) {
        self.told.clear();
        let was_idle = self.flight.is_none();
        self.land(now);
        self.take_off(now, was_idle);
        let ends = self.flight.as_ref().map(|flight| flight.ends);
        self.next = ends.unwrap_or_else(|| self.next_wake(now));
        self.turn_number = self.turn_number.wrapping_add(1);
        let blocks = self.config.limits.num_blocks - self.pool.available();
        self.counters.peak_blocks = self.counters.peak_blocks.max(blocks);
    }

    /// After what was told is handled: forgets the sequences that are gone.
    pub fn forget_gone(&mut self) {
        while let Some(seq) = self.gone.pop() {
            self.free(seq);
        }
    }

    /// When something that waits for its time can be planned.
    fn next_wake(&self, now: Time) -> Time {
        let waiting = self.waiting.iter().map(|&seq| self.sequence(seq).ready);
        let times = waiting.chain(self.arriving.iter().map(|(at, _)| *at));
        let times = times.map(|at| at.plus_s(self.config.limits.launch_s));
        times.filter(|at| *at > now).min().unwrap_or(Time::NEVER)
    }

    /// Whether a report is due though no router's request has anything new.
    pub fn owes_report(&self, now: Time) -> bool {
        now.s_since(self.reported) >= REPORT_S
    }

    /// As the worker reports it.
    pub fn load(&mut self, now: Time) -> LoadReport {
        self.reported = now;
        let decoding = self.decodes.count();
        let left = |seq: &SeqId| {
            let sequence = self.sequence(*seq);
            u64::from(sequence.tokens - sequence.computed)
        };
        let waiting = self.waiting.iter().map(left).sum::<u64>();
        let started = self.prefilling.iter().map(left).sum::<u64>();
        let inbound = &self.budget.inbound;
        let will_decode = self.waiting.iter().chain(&self.prefilling).chain(inbound);
        let will_decode = will_decode.map(|&seq| self.sequence(seq));
        let will_decode = will_decode.filter(|sequence| !sequence.hands_over());
        let waiting_kv_tokens = will_decode.map(|sequence| u64::from(sequence.tokens)).sum();
        LoadReport {
            applied_legs: Some(self.applied_legs),
            waiting_requests: (self.waiting.len() + inbound.len()) as u32,
            running_requests: self.prefilling.len() as u32 + decoding,
            waiting_prefill_tokens: waiting + started,
            free_blocks: self.pool.available(),
            running_sequences: decoding,
            waiting_sequences: self.generating.saturating_sub(decoding),
            awaited_sequences: inbound.len() as u32,
            running_kv_tokens: self.decodes.kv_tokens().saturating_sub(u64::from(decoding)),
            waiting_kv_tokens: Some(waiting_kv_tokens),
            last_decode: self.samples[0],
            last_prefill: self.samples[1],
            is_draining: false,
        }
    }

    /// Lets the next report tell of a decode step and a prompt, of sizes that vary with `number`.
    pub fn pretend(&mut self, number: u64) {
        let sequences = 1u32 << (number % 7);
        let kv_tokens = u64::from(sequences) * (200 << (number % 4));
        let prefill_tokens = 64u32 << (number % 6);
        let squares = f64::from(prefill_tokens) * f64::from(prefill_tokens);
        let steps = &self.config.steps;
        let sample = StepSample {
            number: u64::MAX - number,
            ..StepSample::default()
        };
        self.samples = [
            Some(StepSample {
                duration_s: steps.decode_s(f64::from(sequences), kv_tokens as f64),
                sequences,
                kv_tokens,
                ..sample
            }),
            Some(StepSample {
                duration_s: steps.prompt_s(f64::from(prefill_tokens)),
                prefill_tokens,
                prefill_squares: squares,
                ..sample
            }),
        ];
    }

    pub fn forget_samples(&mut self) {
        self.samples = [None; 2];
    }

    /// Stops a sequence and drops its blocks, wherever it is.
    pub fn remove(&mut self, seq: SeqId) {
        self.detach(seq);
        self.free(seq);
    }

    /// The process ends: its sequences, each with what it has produced by now.
    pub fn crash(&mut self, now: Time) -> Vec<SeqId> {
        if let Some(mut flight) = self.flight.take() {
            flight.steps = flight.ended_by(now);
            self.log.add(&flight, self.decodes.step, 0);
            if flight.decodes > 0 {
                self.decodes.step += flight.steps;
            }
        }
        self.next = Time::NEVER;
        self.turn_number = self.turn_number.wrapping_add(1);
        let all = 0..self.sequences.len() as SeqId;
        all.filter(|&seq| self.sequence(seq).stage != Stage::Gone)
            .collect()
    }

    /// The process starts again, with nothing.
    pub fn restart(&mut self) {
        let limits = self.config.limits;
        let step = self.decodes.step;
        self.decodes = Decodes::new(limits.block_size);
        self.decodes.step = step;
        self.pool.clear();
        self.budget = budget::Budget::default();
        self.sequences.clear();
        self.free.clear();
        self.waiting.clear();
        self.prefilling.clear();
        self.arriving.clear();
        self.told.clear();
        self.gone.clear();
        self.joined.clear();
        self.flight = None;
        self.applied_legs = 0;
        self.generating = 0;
        self.next = Time::NEVER;
        self.turn_number = self.turn_number.wrapping_add(1);
    }

    /// Output tokens of a sequence so far, those that it was resumed with included.
    pub fn produced(&self, seq: SeqId) -> u32 {
        let sequence = self.sequence(seq);
        match sequence.stage {
            Stage::Decoding => {
                sequence.produced + (self.decodes.step - sequence.place.begin) as u32
            }
            _ => sequence.produced,
        }
    }
}
