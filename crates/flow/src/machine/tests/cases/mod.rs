//! Single decisions: which worker gets which message, at which fault.

mod answers;
mod handoffs;
mod placing;
mod retries;

use std::collections::VecDeque;
use std::time::Duration;

use tasuki_core::{Capabilities, Chunks, FailureKind, Identity, ModelId, RequestView, WorkerId};
use tasuki_policy::NoPlacement;

use crate::generation::{Event, Generation, ServeError, Timings};
use crate::leg::{LegEnd, LegEndReason as R, LegKind, Output};
use crate::machine::{Effect, Fleet, Input, Machine, MachineConfig, Placed, RetryReason};
use crate::sampling::SamplingParams;
use crate::worker_ref::{LegId, Peer, WorkerKey, WorkerRef};

/// Workers from this number on have other weights.
const OTHER_WEIGHTS: u32 = 100;

type Pair = Result<(u32, u32), NoPlacement>;

/// Answers as written down beforehand.
#[derive(Default)]
struct Script {
    pairs: VecDeque<Pair>,
    decodes: VecDeque<u32>,
    asked: Vec<RequestView>,
}

fn key(worker: u32) -> WorkerKey {
    WorkerKey {
        worker: WorkerId(worker),
        connection: u64::from(worker),
    }
}

fn leg(worker: u32, attempt: u32) -> LegId {
    LegId {
        worker: key(worker),
        attempt,
    }
}

fn worker(worker: u32) -> WorkerRef {
    WorkerRef {
        key: key(worker),
        capabilities: Capabilities::default(),
        identity: Identity([u8::from(worker >= OTHER_WEIGHTS); 16]),
        peer: Peer {
            engine_id: format!("engine-{worker}"),
            kv_endpoint: String::new(),
        },
    }
}

impl Fleet for Script {
    fn place(&mut self, request: &RequestView) -> Result<Placed, NoPlacement> {
        self.asked.push(request.clone());
        let (prefill, decode) = self
            .pairs
            .pop_front()
            .unwrap_or(Err(NoPlacement::NoWorker))?;
        Ok(Placed {
            prefill: worker(prefill),
            decode: worker(decode),
            why: None,
        })
    }

    fn place_decode(&mut self, _: &RequestView, _: WorkerKey, _: &[WorkerId]) -> Option<WorkerRef> {
        self.decodes.pop_front().map(worker)
    }
}

struct Case {
    machine: Machine,
    script: Script,
    now: Duration,
    effects: Vec<Effect>,
}

fn generation(n: u32) -> Generation {
    Generation {
        model: ModelId(3),
        request_id: "r".to_owned(),
        prompt: (0..10).collect(),
        n,
        sampling: SamplingParams {
            max_tokens: 8,
            prompt_logprobs: Some(0),
            ..Default::default()
        },
        cache_salt: "t".to_owned(),
        tenant: "".into(),
        priority: 0,
        opaque: None,
    }
}

impl Case {
    /// Retries without a pause come at once.
    fn new(n: u32, config: MachineConfig, pairs: &[Pair], decodes: &[u32]) -> Self {
        let config = MachineConfig {
            spread: Duration::ZERO,
            ..config
        };
        let mut case = Self {
            machine: Machine::new(generation(n), Chunks::default(), config),
            script: Script {
                pairs: pairs.iter().cloned().collect(),
                decodes: decodes.iter().copied().collect(),
                asked: Vec::new(),
            },
            now: Duration::ZERO,
            effects: Vec::new(),
        };
        case.machine.start(false, &[], case.now, &mut case.script);
        case.take_effects();
        case
    }

    fn plain(pairs: &[Pair], decodes: &[u32]) -> Self {
        Self::new(1, MachineConfig::default(), pairs, decodes)
    }

    /// What one input brings about.
    fn input(&mut self, input: Input) -> &mut Self {
        self.machine.handle(input, self.now, &mut self.script);
        self.take_effects();
        self
    }

    fn take_effects(&mut self) {
        self.effects = std::iter::from_fn(|| self.machine.next_effect()).collect();
    }

    fn output(&mut self, from: LegId, output: Output) -> &mut Self {
        self.input(Input::Output(from, output))
    }

    fn tokens(&mut self, from: LegId, position: u32, count: u32) -> &mut Self {
        let output = Output {
            position,
            tokens: (position..position + count).collect(),
            ..Output::default()
        };
        self.output(from, output)
    }

    fn ended(&mut self, from: LegId, reason: R) -> &mut Self {
        self.failed(from, reason, reason.usual_failure())
    }

    fn failed(&mut self, from: LegId, reason: R, failure: FailureKind) -> &mut Self {
        let ended = LegEnd {
            reason,
            failure,
            message: "said the worker".to_owned(),
            answer: None,
            ticket: None,
            timings: None,
        };
        self.input(Input::Ended(from, ended))
    }

    fn wait(&mut self, time: Duration) -> &mut Self {
        self.now += time;
        self.input(Input::Tick)
    }

    /// What the last input dispatched: worker, attempt, kind, resumed tokens.
    fn dispatched(&self) -> Vec<(u32, u32, LegKind, usize)> {
        let effects = self.effects.iter().filter_map(|effect| match effect {
            Effect::Dispatch { leg, spec } => Some((
                leg.worker.worker.0,
                leg.attempt,
                spec.kind,
                spec.resumed.len(),
            )),
            _ => None,
        });
        effects.collect()
    }

    fn aborts(&self) -> Vec<(u32, u32)> {
        let effects = self.effects.iter().filter_map(|effect| match effect {
            Effect::Abort { leg, .. } => Some((leg.worker.worker.0, leg.attempt)),
            _ => None,
        });
        effects.collect()
    }

    fn retargets(&self) -> Vec<(u32, &str)> {
        let effects = self.effects.iter().filter_map(|effect| match effect {
            Effect::Retarget { leg, peer } => Some((leg.worker.worker.0, &*peer.engine_id)),
            _ => None,
        });
        effects.collect()
    }

    fn retries(&self) -> Vec<RetryReason> {
        let reason = |effect: &Effect| match effect {
            Effect::Retry { reason, .. } => Some(*reason),
            _ => None,
        };
        self.effects.iter().filter_map(reason).collect()
    }

    fn error(&self) -> Option<&ServeError> {
        self.effects.iter().find_map(|effect| match effect {
            Effect::Emit(Event::Failed(error)) => Some(error),
            _ => None,
        })
    }

    fn done(&self) -> Option<&Timings> {
        self.effects.iter().find_map(|effect| match effect {
            Effect::Emit(Event::Done(timings)) => Some(&**timings),
            _ => None,
        })
    }
}
