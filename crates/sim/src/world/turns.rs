//! Turns of workers, and what the router hears of them.

use tasuki_flow::fleet::CacheEvents;
use tasuki_flow::{Finish, Input, LegEnd, LegEndReason, LegKind, LegTimings, Output};

use super::World;
use super::legs::ended;
use super::record::{Report, ShellEvent};
use crate::time::Time;
use crate::worker::{SeqId, Told};

/// What a worker says of one leg.
pub(super) struct LegReport {
    pub live: u32,
    pub seq: SeqId,
    pub attempt: u32,
    pub output: Option<Output>,
    pub end: Option<LegEnd>,
}

impl World<'_> {
    pub(super) fn turn(&mut self, worker: u32, number: u32) {
        let now = self.now;
        let state = &mut self.workers[worker as usize];
        if state.turn_number != number {
            return;
        }
        state.turn(now);
        let told = std::mem::take(&mut state.told);
        let mut reported = Vec::new();
        for told in &told {
            self.collect(worker, *told, &mut reported);
        }
        let state = &mut self.workers[worker as usize];
        state.told = told;
        let owes = state.owes_report(now);
        state.forget_gone();
        if !reported.is_empty() || owes {
            self.report(worker, reported);
        }
        self.schedule_turn(worker, number);
        self.credit_denied(worker);
    }

    fn collect(&mut self, worker: u32, told: Told, reported: &mut Vec<LegReport>) {
        match told {
            Told::Started(seq) => self.prefill_started(worker, seq),
            Told::Computed(seq) => self.prefill_computed(worker, seq),
            Told::First(seq) => {
                reported.extend(self.say(worker, seq, None));
                self.prefill_ended(worker, seq);
            }
            Told::Finished(seq) => {
                let said_now = self.say(worker, seq, Some(LegEndReason::Finished));
                // A first token that is the last one is one output.
                let first = reported.iter().position(|one| one.seq == seq);
                match (first, said_now) {
                    (Some(at), Some(last)) => reported[at].end = last.end,
                    (None, last) => reported.extend(last),
                    (Some(_), None) => {}
                }
            }
            Told::Returned(seq) => {
                reported.extend(self.say(worker, seq, Some(LegEndReason::Returned)));
            }
            Told::Paused(seq) => self.keep_times(worker, seq),
        }
    }

    /// The output of a leg that the router has not got yet, and its end.
    pub(super) fn say(
        &mut self,
        worker: u32,
        seq: SeqId,
        reason: Option<LegEndReason>,
    ) -> Option<LegReport> {
        if reason.is_some() {
            self.keep_times(worker, seq);
        }
        let state = &self.workers[worker as usize];
        let (sequence, produced) = (state.sequence(seq), state.produced(seq));
        let (place, attempt) = (sequence.leg.request, sequence.leg.attempt);
        let live = self.live[place as usize].as_mut()?;
        let leg = live
            .legs
            .iter_mut()
            .find(|leg| leg.worker == worker && leg.id.attempt == attempt)?;
        let count = produced.saturating_sub(leg.delivered);
        let is_first = reason.is_none();
        if is_first && self.config.token_times {
            let at = self.now.plus_s(self.config.message_s);
            live.outcome.token_times.push(at);
        }
        let queue = sequence
            .scheduled
            .map_or(self.now, |at| at)
            .since(sequence.ready);
        if leg.kind != LegKind::Decode {
            live.outcome.queue_s = queue.as_secs_f64();
        }
        if let Some(second) = sequence.second {
            let second = second.plus_s(self.config.message_s);
            live.outcome.second.get_or_insert(second);
        }
        let output = (count > 0).then(|| Output {
            position: leg.delivered,
            tokens: vec![0; count as usize],
            finish: (produced >= live.request.output_tokens).then_some(Finish::Length),
            cached_prompt_tokens: if leg.delivered == 0 {
                sequence.cached
            } else {
                0
            },
            ..Output::default()
        });
        leg.delivered = produced.max(leg.delivered);
        let timings = (leg.kind == LegKind::Decode).then(|| {
            let bytes = self.config.kv_bytes_per_token * f64::from(sequence.tokens);
            LegTimings {
                transfer: std::time::Duration::from_secs_f64(live.outcome.transfer_s),
                transfer_exposed: std::time::Duration::from_secs_f64(live.outcome.exposed_s),
                transfer_bytes: bytes as u64,
                ..LegTimings::default()
            }
        });
        let end = reason.map(|reason| LegEnd {
            timings: timings.map(Box::new),
            ..ended(reason)
        });
        Some(LegReport {
            live: place,
            seq,
            attempt,
            output,
            end,
        })
    }

    /// What a leg has produced by the end of its worker.
    pub(super) fn report_of_lost(&mut self, worker: u32, seq: SeqId) -> Option<LegReport> {
        let reported = self.say(worker, seq, Some(LegEndReason::Failed))?;
        Some(LegReport {
            end: None,
            ..reported
        })
    }

    /// Keeps when the tokens came that a sequence has decoded until now.
    fn keep_times(&mut self, worker: u32, seq: SeqId) {
        if !self.config.token_times {
            return;
        }
        let state = &self.workers[worker as usize];
        let sequence = state.sequence(seq);
        let times = state.log.times(sequence.place.begin, sequence.place.end);
        if let Some(live) = &mut self.live[sequence.leg.request as usize] {
            let message_s = self.config.message_s;
            let times = times.map(|at: Time| at.plus_s(message_s));
            live.outcome.token_times.extend(times);
        }
    }

    /// A worker reports: the router takes it in as `Registry::on_report` does.
    pub(super) fn report(&mut self, worker: u32, reported: Vec<LegReport>) {
        let Some(key) = self.keys[worker as usize] else {
            return;
        };
        let now = self.now.since_start();
        let load = self.workers[worker as usize].load(self.now);
        let cache = self.cache_events(worker);
        if self.config.record {
            self.keep_report(worker, load, cache.clone(), &reported);
        }
        let recovered = self.fleet.on_report(key, Some(&load), now);
        if let Some(events) = &cache {
            self.fleet.on_cache_events(key, events);
        }
        let mut inputs = Vec::with_capacity(2 * reported.len());
        for one in reported.iter() {
            let Some((id, slot)) = self.leg_of(worker, one) else {
                continue;
            };
            if let Some(output) = &one.output {
                let cached = output.cached_prompt_tokens;
                let more = self.uncounted(worker, one, output);
                self.fleet.on_output(key, slot, more, cached);
            }
            inputs.push((id, slot));
        }
        for (one, &(_, slot)) in reported.iter().zip(&inputs) {
            if let Some(end) = &one.end {
                self.fleet.on_outcome(key, slot, end);
                self.fleet.on_ended(key, slot, end.timings.as_deref());
            }
        }
        self.fleet.recount(key);
        for (one, (id, _)) in reported.into_iter().zip(inputs) {
            if let Some(output) = one.output {
                self.input(one.live, Input::Output(id, output));
            }
            if let Some(end) = one.end {
                self.forget_leg(worker, one.live, one.attempt);
                self.input(one.live, Input::Ended(id, end));
            }
        }
        self.settle();
        if recovered {
            self.workers_changed();
        }
    }

    /// Of an output, the tokens that the fleet has not counted yet.
    fn uncounted(&mut self, worker: u32, reported: &LegReport, output: &Output) -> usize {
        let until = output.position + output.tokens.len() as u32;
        let legs = self.live[reported.live as usize].as_mut();
        let mut legs = legs.into_iter().flat_map(|live| &mut live.legs);
        let leg = legs.find(|leg| leg.worker == worker && leg.id.attempt == reported.attempt);
        let counted = leg.and_then(|leg| leg.counted.replace(until));
        (until - counted.unwrap_or(output.position)) as usize
    }

    /// The router hears of every token; here the fleet counts those between the first and the last
    /// one when somebody asks how long answers are by now.
    pub(super) fn count_outputs(&mut self) {
        for leg in self
            .live
            .iter_mut()
            .flatten()
            .flat_map(|live| &mut live.legs)
        {
            let key = self.keys[leg.worker as usize];
            if let (Some(key), Some(counted)) = (key, &mut leg.counted)
                && leg.kind != LegKind::Prefill
            {
                let until = self.workers[leg.worker as usize]
                    .produced(leg.seq)
                    .max(*counted);
                let more = (until - *counted) as usize;
                self.fleet.on_output(key, leg.slot, more, 0);
                *counted = until;
            }
        }
    }

    fn leg_of(
        &self,
        worker: u32,
        reported: &LegReport,
    ) -> Option<(tasuki_flow::LegId, tasuki_flow::fleet::LegSlot)> {
        let live = self.live[reported.live as usize].as_ref()?;
        let mut legs = live.legs.iter();
        let leg = legs.find(|leg| leg.worker == worker && leg.id.attempt == reported.attempt)?;
        Some((leg.id, leg.slot))
    }

    fn forget_leg(&mut self, worker: u32, place: u32, attempt: u32) {
        if let Some(live) = &mut self.live[place as usize]
            && let Some(at) = live
                .legs
                .iter()
                .position(|leg| leg.worker == worker && leg.id.attempt == attempt)
        {
            let leg = live.legs.swap_remove(at);
            if let Some(handoff) = leg.handoff {
                self.end_handoff(handoff);
            }
        }
    }

    /// What a worker's prefix cache stored and dropped since its last report.
    fn cache_events(&mut self, worker: u32) -> Option<CacheEvents> {
        let pool = &mut self.workers[worker as usize].pool;
        if pool.stored.is_empty() && pool.dropped.is_empty() {
            return None;
        }
        let (stored, dropped) = (
            std::mem::take(&mut pool.stored),
            std::mem::take(&mut pool.dropped),
        );
        pool.events += 1;
        Some(CacheEvents {
            number: pool.events,
            reset: pool.events == 1,
            stored,
            dropped,
            held: Vec::new(),
        })
    }

    fn keep_report(
        &mut self,
        worker: u32,
        load: tasuki_flow::fleet::LoadReport,
        cache: Option<CacheEvents>,
        reported: &[LegReport],
    ) {
        let index = |one: &LegReport| {
            let live = self.live[one.live as usize].as_ref();
            live.map_or(usize::MAX, |live| live.request.index)
        };
        let outputs = reported.iter().filter_map(|one| {
            let output = one.output.clone()?;
            Some((index(one), one.attempt, output))
        });
        let ended = reported.iter().filter_map(|one| {
            let end = one.end.clone()?;
            Some((index(one), one.attempt, end))
        });
        let report = Report {
            worker,
            load,
            cache,
            outputs: outputs.collect(),
            ended: ended.collect(),
        };
        self.run.record.push(ShellEvent::Reported {
            at: self.now,
            report,
        });
    }
}
