//! Messages of workers, through the registry into the state machine of a request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use prost::Message as _;
use rand::Rng;
use rand::seq::IndexedRandom;
use tasuki_core::{Chunks, ModelId, RequestView, WorkerId};
use tasuki_flow::{
    AdmissionConfig, Effect, Event, Fleet, Generation, Input, Machine, MachineConfig,
    SamplingParams,
};
use tasuki_policy::PolicyConfig;
use tasuki_searches::fuzz;
use tasuki_wire::v1::{self, worker_message::Message};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use super::fields;
use crate::workers::fuzzed::{info_from_wire, report_from_wire};
use crate::workers::testing::{LocalWorker, idle, info};
use crate::workers::{Dispatched, Joined, Registry};

const MAX_TOKENS: u32 = 8;
const CHOICES: u32 = 2;

fn valid() -> Vec<v1::WorkerMessage> {
    let logprob = v1::TokenLogprob {
        token: 5,
        logprob: -0.5,
        rank: 1,
        top: vec![v1::TopLogprob {
            token: 6,
            logprob: -1.5,
        }],
    };
    let outputs = (0..CHOICES).flat_map(|choice| {
        let logprob = logprob.clone();
        (0..3).map(move |position| v1::Output {
            request_id: "r.0".to_owned(),
            choice,
            position,
            tokens: vec![7 + position],
            logprobs: vec![logprob.clone()],
            cached_prompt_tokens: 16,
            timings: Some(v1::LegTimings::default()),
            ..Default::default()
        })
    });
    let end = |reason: v1::LegEndReason| v1::LegEnd {
        request_id: "r.0".to_owned(),
        reason: reason.into(),
        message: "why".to_owned(),
        timings: Some(v1::LegTimings::default()),
        ..Default::default()
    };
    let reports = [
        v1::StepReport {
            load: Some(idle()),
            applied_submits: 1,
            ..Default::default()
        },
        v1::StepReport {
            step: 3,
            outputs: outputs.clone().collect(),
            ..Default::default()
        },
        v1::StepReport {
            outputs: outputs
                .map(|output| v1::Output {
                    finish: v1::FinishReason::FinishStop.into(),
                    position: 3,
                    ..output
                })
                .collect(),
            ended: vec![end(v1::LegEndReason::LegEndFinished)],
            ..Default::default()
        },
        v1::StepReport {
            ended: vec![end(v1::LegEndReason::LegEndFailed)],
            ..Default::default()
        },
        v1::StepReport {
            kv: Some(v1::KvEvents {
                number: 1,
                reset: true,
                stored: vec![1, 2, 3],
                dropped: vec![2],
                held: vec![9, 8],
            }),
            ..Default::default()
        },
    ];
    let infos = [v1::Role::Mixed, v1::Role::Prefill].map(|role| Message::Info(info("a", role)));
    let messages = infos.into_iter().chain(reports.map(Message::Step));
    let wrapped = messages.map(|message| v1::WorkerMessage {
        message: Some(message),
    });
    wrapped.collect()
}

/// One worker that has a request of a client.
struct World {
    registry: Arc<Registry>,
    joined: Joined,
    machine: Machine,
    sender: UnboundedSender<Input>,
    inbox: UnboundedReceiver<Input>,
    /// Tokens of each choice, and whether the request is over for the client.
    emitted: [u32; CHOICES as usize],
    ended: bool,
    _worker: LocalWorker,
}

impl World {
    fn new() -> Self {
        let now = Instant::now();
        let models = vec![Vec::new()];
        let (policy, admission) = (PolicyConfig::default(), AdmissionConfig::default());
        let registry = Arc::new(Registry::new(models, policy, admission, now));
        registry.add("local:1");
        let (link, worker) = LocalWorker::new();
        let joining = info_from_wire(info("a", v1::Role::Mixed)).expect("valid");
        let joined = registry
            .join(WorkerId(0), joining, Arc::new(link), now)
            .expect("joined");
        let generation = Generation {
            model: ModelId(0),
            request_id: "r".to_owned(),
            prompt: (0..20).collect(),
            n: CHOICES,
            sampling: SamplingParams {
                max_tokens: MAX_TOKENS,
                logprobs: Some(1),
                ..SamplingParams::default()
            },
            cache_salt: String::new(),
            tenant: "".into(),
            priority: 0,
            opaque: None,
        };
        let (sender, inbox) = mpsc::unbounded_channel();
        let machine = Machine::new(generation, Chunks::default(), MachineConfig::default());
        let mut world = Self {
            registry,
            joined,
            machine,
            sender,
            inbox,
            emitted: [0; CHOICES as usize],
            ended: false,
            _worker: worker,
        };
        world.receive(valid().remove(2));
        world
            .machine
            .start(false, &[], Duration::ZERO, &mut &*world.registry);
        world.perform();
        world
    }

    /// As the connection's task does.
    fn receive(&mut self, message: v1::WorkerMessage) {
        match message.message {
            Some(Message::Step(report)) => {
                let report = report_from_wire(report);
                self.registry
                    .on_report(&self.joined, report, Instant::now());
            }
            Some(Message::Info(info)) => {
                if let Ok(info) = info_from_wire(info) {
                    self.registry.on_info(self.joined.key, info);
                }
            }
            None => {}
        }
        while let Ok(input) = self.inbox.try_recv() {
            let now = Duration::from_millis(5);
            self.machine.handle(input, now, &mut &*self.registry);
            self.perform();
        }
    }

    /// As the request's task does.
    fn perform(&mut self) {
        let name = |attempt: u32| format!("r.{attempt}");
        while let Some(effect) = self.machine.next_effect() {
            match effect {
                Effect::Dispatch { leg, spec } => {
                    let (name, inbox) = (name(leg.attempt), &self.sender);
                    if let Dispatched::Gone = self.registry.dispatch(leg, name, *spec, inbox) {
                        let _ = inbox.send(Input::Lost(leg.worker));
                    }
                }
                Effect::Abort { leg, choices } => {
                    self.registry.abort(leg.worker, &name(leg.attempt), choices);
                }
                Effect::Retarget { leg, peer } => {
                    self.registry.retarget(leg.worker, &name(leg.attempt), peer);
                }
                Effect::Emit(event) => self.emit(&event),
                Effect::Retry { .. } => {}
            }
        }
    }

    fn emit(&mut self, event: &Event) {
        assert!(!self.ended, "{event:?} after the end");
        match event {
            Event::Tokens { choice, tokens, .. } => {
                let emitted = &mut self.emitted[*choice as usize];
                *emitted += u32::try_from(tokens.len()).expect("few");
                assert!(
                    *emitted <= MAX_TOKENS,
                    "{emitted} tokens of choice {choice}"
                );
            }
            Event::Done(_) | Event::Failed(_) => self.ended = true,
            _ => {}
        }
    }
}

#[test]
fn fuzzed_messages_keep_the_request_whole() {
    let valid = valid();
    let corpus: Vec<_> = valid.iter().map(v1::WorkerMessage::encode_to_vec).collect();
    fuzz("grpc", &corpus, 5_000, |bytes, random| {
        let changed = fields::mutated(valid.choose(random).expect("some"), random);
        // Bytes that are no message end the connection, before anything reads them.
        let message = v1::WorkerMessage::decode(bytes).unwrap_or(changed);
        let mut world = World::new();
        for _ in 0..random.random_range(0..3) {
            world.receive(valid.choose(random).expect("some").clone());
        }
        world.receive(message);
        for _ in 0..random.random_range(0..3) {
            world.receive(valid.choose(random).expect("some").clone());
        }
        let mut fleet = &*world.registry;
        let _ = fleet.place(&RequestView::new(10, 5));
        world.registry.leave(world.joined.key);
        while let Ok(input) = world.inbox.try_recv() {
            let now = Duration::from_secs(60);
            world.machine.handle(input, now, &mut &*world.registry);
            world.perform();
        }
    });
}
