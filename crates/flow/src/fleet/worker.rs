//! What is known of one worker, and what our legs there are going to take.

use std::collections::BTreeSet;
use std::time::Duration;

use tasuki_core::{
    Capabilities, Capacity, CostConfig, Health, KvDomain, ModelId, Outstanding, Payload,
    ReportedLoad, Role, StepSample, WorkerId, WorkerView,
};

use super::breaker::{Breakers, Shown};
use super::prefixes::PlacedPrompt;
use super::report::{LoadReport, WorkerInfo};
use super::running_leg::{LegSlot, RunningLeg, handoff, hash, peer};
use super::running_legs::RunningLegs;
use crate::leg::{Handoff, LegKind, LegSpec};

/// One worker of the fleet, connected or not.
#[derive(Debug)]
pub struct WorkerState {
    pub view: WorkerView,
    /// That it serves, as of the last connection.
    pub model: Option<ModelId>,
    /// Of the last connection; kept while the worker is away, for its limits.
    pub info: Option<WorkerInfo>,
    /// A first attempt to reach the worker is over, whether or not it succeeded.
    pub was_tried: bool,
    /// Why it gets no new work; empty: it does.
    drain: BTreeSet<DrainReason>,
    breakers: Breakers,
    pub(super) connection: Option<u64>,
    pub(super) last_report: Duration,
    /// Tokens of a leg of ours that decodes.
    pub(super) last_decoded: Option<Duration>,
    /// Of this connection.
    legs: RunningLegs,
    /// Something has happened since the last recount.
    is_stale: bool,
    /// Numbers of the last samples, of both kinds.
    last_samples: [u64; 2],
}

/// Why a worker gets no new work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DrainReason {
    /// An operator asked for it.
    Asked,
    /// Its address is not in the deployment any more.
    Unlisted,
    /// The worker says that it was told to end.
    Ending,
}

/// What a leg was that has ended.
pub(super) struct EndedLeg {
    /// If it was one: whether within one machine, and of how many tokens.
    pub handoff: Option<(bool, u64)>,
    /// If there was no output.
    pub placed: Option<PlacedPrompt>,
    /// Of a leg that decoded: tokens of the prompt, and of the answer in each choice.
    pub answer: Option<(u64, u32)>,
}

impl WorkerState {
    pub(super) fn new(id: WorkerId) -> Self {
        Self {
            view: WorkerView {
                id,
                domain: KvDomain::default(),
                capabilities: Capabilities::default(),
                role: Role::Mixed,
                hardware: 0,
                machine: 0,
                health: Health::Down,
                capacity: Capacity {
                    max_model_len_tokens: 0,
                    max_sequences: 0,
                    block_size_tokens: 1,
                    total_blocks: 0,
                },
                load: ReportedLoad::default(),
                outstanding: Outstanding::default(),
            },
            model: None,
            info: None,
            was_tried: false,
            drain: BTreeSet::new(),
            breakers: Breakers::default(),
            connection: None,
            last_report: Duration::ZERO,
            last_decoded: None,
            legs: RunningLegs::default(),
            is_stale: false,
            last_samples: [0; 2],
        }
    }

    /// Takes over what a worker says of itself.
    pub(super) fn set_info(&mut self, info: WorkerInfo) {
        self.view.domain = info.domain;
        self.view.capabilities = info.capabilities;
        self.view.role = info.role;
        self.view.capacity = Capacity {
            max_model_len_tokens: match info.capabilities.payload {
                Payload::Tokens => info.max_model_len,
                // The request's length is an estimate: the worker itself refuses one too long.
                Payload::Opaque => u32::MAX,
            },
            max_sequences: info.max_sequences.unwrap_or(u32::MAX),
            block_size_tokens: info.block_size.max(1),
            total_blocks: info.num_blocks,
        };
        self.info = Some(info);
    }

    /// A new connection: nothing of ours is there, nothing is measured yet.
    pub(super) fn connect(&mut self, connection: u64, now: Duration) {
        self.last_report = now;
        self.take_ending(false);
        self.view.health = self.health_when_up();
        self.view.load = ReportedLoad {
            free_blocks: self.view.capacity.total_blocks,
            ..ReportedLoad::default()
        };
        self.forget_legs();
        self.connection = Some(connection);
        self.was_tried = true;
    }

    fn health_when_up(&self) -> Health {
        if !self.drain.is_empty() {
            Health::Draining
        } else if !self.breakers.take_work(self.last_report) {
            Health::Failing
        } else {
            Health::Ready
        }
    }

    /// Takes over whether the worker says that it is going to end.
    pub(super) fn take_ending(&mut self, is_ending: bool) {
        if is_ending {
            self.drain.insert(DrainReason::Ending);
        } else {
            self.drain.remove(&DrainReason::Ending);
        }
    }

    /// The worker reported. True: it gets new work by that.
    pub(super) fn recover(&mut self) -> bool {
        let health = self.health_when_up();
        std::mem::replace(&mut self.view.health, health) != health && health == Health::Ready
    }

    pub(super) fn drain(&mut self, reason: DrainReason) {
        self.drain.insert(reason);
        if matches!(self.view.health, Health::Ready | Health::Failing) {
            self.view.health = Health::Draining;
        }
    }

    /// True: the worker is ready for new work by that.
    pub(super) fn undrain(&mut self, reason: DrainReason) -> bool {
        self.drain.remove(&reason);
        self.view.health == Health::Draining && self.recover()
    }

    /// Whether this keeps new work away.
    pub fn drains_because(&self, reason: DrainReason) -> bool {
        self.drain.contains(&reason)
    }

    /// What its legs have shown of the worker.
    pub fn breakers(&self) -> &Breakers {
        &self.breakers
    }

    /// A leg has shown something of the worker.
    pub(super) fn on_shown(&mut self, slot: LegSlot, shown: Shown) {
        self.breakers.on_shown(slot.number, shown, self.last_report);
        self.refresh_health();
    }

    /// The engine, hashed, whose KV a leg gets by a ticket.
    pub(super) fn issuer_of(&self, slot: LegSlot) -> Option<u64> {
        let leg = self.legs.get(slot)?;
        leg.peer.filter(|_| leg.redeems)
    }

    /// Whether a leg elsewhere has got this worker's KV.
    pub(super) fn on_kv_asked(&mut self, is_taken: bool) {
        match is_taken {
            true => self.breakers.on_kv_taken(),
            false => self.breakers.on_kv_missed(self.last_report),
        }
        self.refresh_health();
    }

    /// After a change of the breakers.
    fn refresh_health(&mut self) {
        if matches!(self.view.health, Health::Ready | Health::Failing) {
            let health = self.health_when_up();
            self.is_stale |= std::mem::replace(&mut self.view.health, health) != health;
        }
    }

    /// Whether a leg gets its KV from another worker.
    pub(super) fn hands_over(&self, slot: LegSlot) -> bool {
        self.peer_of(slot).is_some()
    }

    /// The engine, hashed, that a leg gets its KV from.
    pub(super) fn peer_of(&self, slot: LegSlot) -> Option<u64> {
        self.legs.get(slot)?.peer
    }

    /// Whether this engine, hashed, is connected as this worker.
    pub(super) fn is_engine(&self, hashed: u64) -> bool {
        let info = self.info.as_ref().filter(|_| self.connection.is_some());
        info.is_some_and(|info| hash(&info.peer.engine_id) == hashed)
    }

    /// Our legs there.
    pub fn running_legs(&self) -> usize {
        self.legs.len()
    }

    /// The connection is over, and its legs with it.
    pub(super) fn disconnect(&mut self) {
        let had_legs = self.running_legs() > 0;
        self.breakers.on_lost(had_legs, self.last_report);
        self.view.health = Health::Down;
        self.connection = None;
        self.forget_legs();
    }

    fn forget_legs(&mut self) {
        self.legs = RunningLegs::default();
        self.view.outstanding = Outstanding::default();
    }

    /// Counts a report against what was submitted, and takes its load over. Returns the
    /// samples that are new.
    pub(super) fn take_load(
        &mut self,
        load: &LoadReport,
    ) -> impl Iterator<Item = StepSample> + use<> {
        self.view.load = ReportedLoad {
            waiting_requests: load.waiting_requests,
            running_requests: load.running_requests,
            waiting_prefill_tokens: load.waiting_prefill_tokens,
            free_blocks: load.free_blocks,
            running_sequences: load.running_sequences,
            waiting_sequences: load.waiting_sequences,
            awaited_sequences: load.awaited_sequences,
            running_kv_tokens: load.running_kv_tokens,
            waiting_kv_tokens: load.waiting_kv_tokens,
        };
        self.is_stale = true;
        self.legs
            .on_load(load.applied_legs, load.waiting_kv_tokens.is_some());
        let samples = [load.last_decode, load.last_prefill];
        let numbers = samples.map(|sample| sample.map_or(0, |sample| sample.number));
        let known = std::mem::replace(&mut self.last_samples, numbers);
        let new = samples.into_iter().zip(known);
        new.filter_map(|(sample, known)| sample.filter(|sample| sample.number != known))
    }

    /// A leg was sent to the worker.
    pub(super) fn add_leg(
        &mut self,
        spec: &LegSpec,
        cost: &CostConfig,
        placed: PlacedPrompt,
    ) -> LegSlot {
        let tokens = (spec.prompt.len() + spec.resumed.len()) as u64;
        let growth = match spec.kind {
            LegKind::Prefill => 0,
            LegKind::Colocated | LegKind::Decode => {
                spec.sampling.max_tokens.min(cost.headroom_tokens)
            }
        };
        let choices = u64::from(spec.sequences());
        let decodes = spec.kind != LegKind::Prefill;
        let number = self.legs.next_number();
        let leg = RunningLeg {
            prefill_tokens: match spec.kind {
                LegKind::Decode => 0,
                LegKind::Colocated | LegKind::Prefill => {
                    tokens.saturating_sub(u64::from(placed.cached())).max(1)
                }
            },
            placed: Some(placed),
            promised_blocks: self.view.blocks_for(tokens)
                + choices * self.view.blocks_for(u64::from(growth)),
            sequences: if decodes { choices as u32 } else { 0 },
            kv_tokens: if decodes { choices * tokens } else { 0 },
            handoff: handoff(spec, self.info.as_ref()),
            peer: peer(spec),
            redeems: matches!(spec.handoff, Some(Handoff::Redeem { .. })),
            number,
            produced: 0,
            is_counted: false,
            has_blocks: false,
        };
        let slot = self.legs.add(leg);
        self.is_stale = true;
        self.breakers.on_dispatched(number);
        self.refresh_health();
        slot
    }

    /// A leg has produced so many tokens more. Of its answer: tokens of the prompt, and how many it
    /// had and has. `None`: it does not decode.
    pub(super) fn count_output(&mut self, slot: LegSlot, tokens: u32) -> Option<(u64, u32, u32)> {
        let answer = self.legs.change(slot, |leg| leg.produce(tokens))??;
        if tokens > 0 {
            self.last_decoded = Some(self.last_report);
        }
        Some(answer)
    }

    /// A leg has output: it holds its blocks by now, and is in the load, if there is one.
    /// With its first, the prompt.
    pub(super) fn on_output(&mut self, slot: LegSlot) -> Option<PlacedPrompt> {
        let reports_load = self.view.capabilities.reports_load;
        let shown = self.legs.change(slot, |leg| {
            leg.prefill_tokens = 0;
            leg.has_blocks |= reports_load;
            leg.is_counted |= reports_load;
            (leg.placed.take(), leg.sequences > 0)
        });
        let (placed, decodes) = shown.unwrap_or_default();
        self.is_stale |= placed.is_some();
        // Whether a prompt's KV gets away only its end shows.
        if decodes && self.breakers.is_trial(slot.number) {
            let hands_over = self.hands_over(slot);
            let shown = if hands_over {
                Shown::HandsOver
            } else {
                Shown::Computes
            };
            self.on_shown(slot, shown);
        }
        placed
    }

    /// A leg has ended.
    pub(super) fn remove_leg(&mut self, slot: LegSlot) -> Option<EndedLeg> {
        let leg = self.legs.remove(slot)?;
        if self.breakers.is_trial(slot.number) {
            self.on_shown(slot, Shown::Nothing); // its end said nothing of this worker
        }
        self.is_stale = true;
        let tokens = leg.kv_tokens / u64::from(leg.sequences.max(1));
        Some(EndedLeg {
            handoff: leg.handoff.map(|same_machine| (same_machine, tokens)),
            answer: leg.answer(),
            placed: leg.placed,
        })
    }

    /// Shows what the worker's last report cannot, from our own legs. False: nothing has
    /// happened since it did.
    pub(super) fn recount(&mut self) -> bool {
        if !std::mem::take(&mut self.is_stale) {
            return false;
        }
        self.view.outstanding = self.legs.outstanding();
        true
    }
}
