//! Workers, connections and a client around one machine; the test chooses every step.
//!
//! Longer than a room: the model is one piece, and its parts make no sense alone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use tasuki_core::{
    Capabilities, Capacity, Chunks, CostModel, FirstToken, HandoffKind, Health, KvDomain, ModelId,
    Outstanding, Positions, ReportedLoad, RequestView, Role, WorkerId, WorkerView,
};
use tasuki_policy::{Choosing, NoPlacement, Policy, WorkerIndex};

use super::sim_worker::{Lengths, Progress, SimLeg, ended, handed_off, truth};
use crate::generation::{Event, Finish, Generation, ServeError, Timings};
use crate::leg::{Handoff, LegEndReason, LegKind, LegSpec, Ticket};
use crate::machine::{Effect, Fleet, Input, Machine, MachineConfig, OnKvLoss, Placed};
use crate::opaque::{Opaque, OpaqueRequest};
use crate::sampling::SamplingParams;
use crate::worker_ref::{LegId, Peer, WorkerKey, WorkerRef};

#[derive(Debug, Clone)]
pub struct Setup {
    pub roles: Vec<Role>,
    pub n: u32,
    pub lengths: Lengths,
    pub faults: usize,
    pub on_kv_loss: OnKvLoss,
    /// Stops and hang-ups of the client are among the faults.
    pub client_acts: bool,
    /// The client wants the prompt's logprobs.
    pub scored: bool,
    /// Tokens of a choice that a decode step reports as one run.
    pub run: usize,
    /// How often the budget of retries is used up when it is asked.
    pub dry: usize,
    /// Of every worker.
    pub capabilities: Capabilities,
    /// Time may pass while a leg decodes, as a fault.
    pub stalls: bool,
    /// The request and its answer are frames.
    pub frames: bool,
}

impl Setup {
    pub fn new(roles: &[Role], n: u32, first: usize, max_tokens: usize, faults: usize) -> Self {
        Self {
            roles: roles.to_vec(),
            n,
            lengths: Lengths { first, max_tokens },
            faults,
            on_kv_loss: OnKvLoss::Recompute,
            client_acts: false,
            scored: false,
            run: 1,
            dry: 0,
            capabilities: Capabilities::default(),
            stalls: false,
            frames: false,
        }
    }
}

/// One thing that may happen next. The order is that of the undisturbed run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    ToWorker(WorkerKey),
    ToRouter(WorkerKey),
    /// The leg's next step: first tokens, pull and start, or decode.
    Advance(LegId),
    Restart(usize),
    TimePasses,
    // Faults.
    EndLeg(LegId, LegEndReason),
    Crash(usize, Crash),
    Repeat(WorkerKey),
    Stop(u32),
    HangUp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crash {
    /// Messages sent before still arrive.
    AfterFlush,
    /// Messages under way are lost.
    MessagesLost,
    /// Only the stream breaks: peers can still pull announced KV.
    StreamOnly,
}

struct Worker {
    role: Role,
    key: Option<WorkerKey>,
    legs: Vec<SimLeg>,
}

/// What the machine places onto.
struct Views {
    views: Vec<WorkerView>,
    keys: Vec<Option<WorkerKey>>,
    tie: u64,
    dry: usize,
    model: CostModel,
}

pub struct World {
    setup: Setup,
    pub machine: Machine,
    workers: Vec<Worker>,
    to_router: BTreeMap<u64, (WorkerKey, VecDeque<Input>)>,
    to_worker: BTreeMap<u64, (WorkerKey, VecDeque<Effect>)>,
    /// Tickets that were issued and not used yet.
    tickets: Vec<Ticket>,
    /// KV that outlived its leg, by attempt and engine.
    orphans: BTreeSet<(u32, String)>,
    /// Attempts that ended with their first tokens.
    ended_by_prefill: BTreeSet<u32>,
    next_connection: u64,
    tie: u64,
    dry: usize,
    now: Duration,
    faults_left: usize,
    pub client: Client,
    pub trace: Vec<String>,
    legs_dispatched: BTreeSet<LegId>,
    opaque: Option<OpaqueRequest>,
}

/// What the client has seen.
#[derive(Default)]
pub struct Client {
    pub scored: bool,
    pub tokens: BTreeMap<u32, Vec<u32>>,
    pub finished: BTreeMap<u32, Finish>,
    pub stopped: BTreeSet<u32>,
    pub gone: bool,
    pub done: Option<Timings>,
    pub failed: Option<ServeError>,
}

impl World {
    pub fn new(setup: Setup) -> Self {
        let opaque = setup.frames.then(|| OpaqueRequest {
            content: Opaque::new("a request"),
            sequences: 1,
            bound_to: None,
        });
        let request = Generation {
            model: ModelId::default(),
            request_id: "r".to_owned(),
            prompt: (0..40).collect(),
            n: setup.n,
            sampling: SamplingParams {
                max_tokens: setup.lengths.max_tokens as u32,
                prompt_logprobs: setup.scored.then_some(0),
                ..Default::default()
            },
            cache_salt: String::new(),
            tenant: "".into(),
            priority: 0,
            opaque: opaque.clone(),
        };
        let config = MachineConfig {
            on_kv_loss: setup.on_kv_loss,
            recover: Duration::from_secs(3_600),
            stalled: setup.stalls.then_some(Duration::from_secs(1)),
            max_failures: 8,
            max_losses_in_a_row: 8,
            max_kv_losses: 8,
            ..MachineConfig::default()
        };
        let workers = setup.roles.iter().enumerate().map(|(index, &role)| Worker {
            role,
            key: Some(WorkerKey {
                worker: WorkerId(index as u32),
                connection: index as u64,
            }),
            legs: Vec::new(),
        });
        let mut world = Self {
            workers: workers.collect(),
            next_connection: setup.roles.len() as u64,
            machine: Machine::new(request, Chunks::default(), config),
            to_router: BTreeMap::new(),
            to_worker: BTreeMap::new(),
            tickets: Vec::new(),
            orphans: BTreeSet::new(),
            ended_by_prefill: BTreeSet::new(),
            tie: 0,
            dry: setup.dry,
            now: Duration::ZERO,
            faults_left: setup.faults,
            client: Client::default(),
            trace: Vec::new(),
            legs_dispatched: BTreeSet::new(),
            opaque,
            setup,
        };
        let mut views = world.views();
        world.machine.start(world.now, &mut views);
        world.apply();
        world
    }

    /// All that may happen now: the undisturbed run's next step first, faults last.
    pub fn actions(&self) -> Vec<Action> {
        let mut actions = Vec::new();
        let waiting = |(key, queue): &(WorkerKey, VecDeque<_>)| (!queue.is_empty()).then_some(*key);
        actions.extend(
            self.to_worker
                .values()
                .filter_map(waiting)
                .map(Action::ToWorker),
        );
        let waiting = |(key, queue): &(WorkerKey, VecDeque<_>)| (!queue.is_empty()).then_some(*key);
        actions.extend(
            self.to_router
                .values()
                .filter_map(waiting)
                .map(Action::ToRouter),
        );
        for (key, leg) in self.legs() {
            if self.can_advance(leg) {
                actions.push(Action::Advance(leg_id(key, leg)));
            } else if let Some(reason) = self.ends_by_itself(leg) {
                actions.push(Action::EndLeg(leg_id(key, leg), reason));
            }
        }
        let down = (0..self.workers.len()).filter(|&at| self.workers[at].key.is_none());
        actions.extend(down.map(Action::Restart));
        let may_pass = !self.setup.stalls || self.faults_left > 0 || actions.is_empty();
        if self.machine.deadline().is_some() && may_pass {
            actions.push(Action::TimePasses);
        }
        if self.faults_left > 0 {
            self.add_faults(&mut actions);
        }
        actions
    }

    fn add_faults(&self, actions: &mut Vec<Action>) {
        use LegEndReason as R;
        let serial = self.setup.capabilities.handoff == HandoffKind::Ticket;
        for (key, leg) in self.legs() {
            let reasons: &[R] = match (leg.kind, leg.progress) {
                (LegKind::Decode, Progress::Begun) => &[R::Refused, R::KvLost, R::Failed],
                (LegKind::Decode, _) => &[R::Returned, R::Failed],
                // Without the ticket that was asked for.
                (LegKind::Prefill, _) if serial => &[R::Failed, R::HandedOff],
                _ => &[R::Failed],
            };
            let end = |&reason: &R| Action::EndLeg(leg_id(key, leg), reason);
            for action in reasons.iter().map(end) {
                if !actions.contains(&action) {
                    actions.push(action);
                }
            }
        }
        for (at, worker) in self.workers.iter().enumerate() {
            if worker.key.is_some() {
                for crash in [Crash::AfterFlush, Crash::MessagesLost, Crash::StreamOnly] {
                    actions.push(Action::Crash(at, crash));
                }
            }
        }
        let exact = self.setup.capabilities.positions == Positions::Exact;
        for (key, queue) in self.to_router.values().filter(|_| exact) {
            if let Some(Input::Output(..) | Input::Ended(..)) = queue.front() {
                actions.push(Action::Repeat(*key));
            }
        }
        if self.setup.client_acts {
            actions.push(Action::HangUp);
            actions.extend(
                self.client
                    .tokens
                    .keys()
                    .map(|&choice| Action::Stop(choice)),
            );
        }
    }

    pub fn act(&mut self, action: &Action) {
        self.trace.push(format!("{action:?}"));
        match action {
            Action::ToWorker(key) => {
                let effect = pop(&mut self.to_worker, *key);
                self.deliver(*key, effect);
            }
            Action::ToRouter(key) => {
                let input = pop(&mut self.to_router, *key);
                self.feed(input);
            }
            Action::Advance(leg) => self.advance(*leg),
            Action::Restart(at) => {
                let key = WorkerKey {
                    worker: WorkerId(*at as u32),
                    connection: self.next_connection,
                };
                self.next_connection += 1;
                self.workers[*at].key = Some(key);
                self.feed(Input::WorkersChanged);
            }
            Action::TimePasses => {
                let deadline = self.machine.deadline().expect("only offered with one");
                self.now = self.now.max(deadline);
                self.faults_left -= self.faults_left.min(usize::from(self.setup.stalls));
                self.feed(Input::Tick);
            }
            fault => self.fault(fault),
        }
    }

    fn fault(&mut self, action: &Action) {
        // A decode leg whose KV is gone ends by itself: no fault of its own.
        let by_itself = matches!(action, Action::EndLeg(leg, reason)
            if self.leg(*leg).is_some_and(|leg| self.ends_by_itself(leg) == Some(*reason)));
        self.faults_left -= usize::from(!by_itself);
        match action {
            Action::EndLeg(leg, reason) => {
                self.take_leg(*leg).expect("only offered for a leg");
                self.report(leg.worker, Input::Ended(*leg, ended(*reason)));
            }
            Action::Crash(at, crash) => self.crash(*at, *crash),
            Action::Repeat(key) => {
                let queue = self.to_router.get_mut(&key.connection).expect("offered");
                let first = queue.1.front().expect("offered").clone();
                queue.1.push_front(first);
            }
            Action::Stop(choice) => {
                self.client.stopped.insert(*choice);
                self.feed(Input::Stop(*choice));
            }
            Action::HangUp => {
                self.client.gone = true;
                self.feed(Input::HangUp);
            }
            other => unreachable!("{other:?} is no fault"),
        }
    }

    fn crash(&mut self, at: usize, crash: Crash) {
        let key = self.workers[at].key.take().expect("only offered when up");
        for leg in std::mem::take(&mut self.workers[at].legs) {
            if crash == Crash::StreamOnly && leg.progress == Progress::Prefilled {
                self.orphans.insert((leg.attempt, engine(key)));
            }
        }
        if crash != Crash::StreamOnly {
            self.orphans.retain(|(_, owner)| *owner != engine(key));
        }
        self.to_worker.remove(&key.connection);
        if crash == Crash::MessagesLost {
            self.to_router.remove(&key.connection);
        }
        self.report(key, Input::Lost(key));
    }

    fn deliver(&mut self, key: WorkerKey, effect: Effect) {
        match effect {
            Effect::Dispatch { leg, spec } => {
                let leg = SimLeg::new(leg.attempt, &spec, self.decode_first());
                self.worker_of(key).legs.push(leg);
            }
            Effect::Abort { leg: id, choices } => {
                let Some(mut leg) = self.take_leg(id) else {
                    return;
                };
                leg.choices
                    .retain(|(choice, _)| !choices.is_empty() && !choices.contains(choice));
                if leg.choices.is_empty() {
                    self.report(key, Input::Ended(id, ended(LegEndReason::Aborted)));
                } else {
                    self.worker_of(key).legs.push(leg);
                }
            }
            Effect::Retarget { leg: id, peer } => match self.take_leg(id) {
                Some(mut leg) => {
                    leg.peer = peer.engine_id;
                    self.worker_of(key).legs.push(leg);
                }
                None => self.report(key, Input::Ended(id, ended(LegEndReason::Failed))),
            },
            other => unreachable!("{other:?} is not for a worker"),
        }
    }

    fn advance(&mut self, id: LegId) {
        let Setup { lengths, run, .. } = self.setup;
        let mut leg = self.take_leg(id).expect("only offered for a leg");
        if leg.kind == LegKind::Decode && leg.progress == Progress::Begun {
            self.pull(&leg);
        }
        if leg.kind == LegKind::Prefill && leg.decode_first {
            self.prefill_silently(id, leg);
            return;
        }
        // A prefill leg samples one token of each choice.
        let run = if leg.kind == LegKind::Prefill { 1 } else { run };
        for mut output in leg.step(lengths, run) {
            if self.setup.capabilities.positions == Positions::Counted {
                output.position = 0;
            }
            if self.setup.frames {
                output.frame = Some(Opaque::new(output.tokens.clone()));
            }
            self.report(id.worker, Input::Output(id, output));
        }
        leg.progress = match leg.kind {
            LegKind::Prefill => Progress::Prefilled,
            _ => Progress::Decoding,
        };
        if leg.choices.is_empty() {
            if leg.kind == LegKind::Prefill {
                self.ended_by_prefill.insert(leg.attempt);
            }
            self.report(id.worker, Input::Ended(id, ended(LegEndReason::Finished)));
        } else {
            self.worker_of(id.worker).legs.push(leg);
        }
    }

    /// A prefill leg without output: its KV is there, or it ends with a ticket for it.
    fn prefill_silently(&mut self, id: LegId, mut leg: SimLeg) {
        if self.setup.capabilities.handoff == HandoffKind::Ticket {
            let engine = engine(id.worker);
            let ended = handed_off(&engine);
            self.tickets.extend(ended.ticket.clone());
            self.orphans.insert((id.attempt, engine));
            self.report(id.worker, Input::Ended(id, ended));
        } else {
            leg.progress = Progress::Prefilled;
            self.worker_of(id.worker).legs.push(leg);
        }
    }

    fn decode_first(&self) -> bool {
        self.setup.capabilities.first_token == FirstToken::Decode
    }

    /// The decode worker has the KV: prefill's leg is over.
    fn pull(&mut self, decode: &SimLeg) {
        self.orphans.remove(&(decode.attempt, decode.peer.clone()));
        let Some(worker) = self.keys().find(|key| engine(*key) == decode.peer) else {
            return;
        };
        let id = LegId {
            worker,
            attempt: decode.attempt,
        };
        if self.take_leg(id).is_some() {
            self.report(worker, Input::Ended(id, ended(LegEndReason::HandedOff)));
        }
    }

    fn can_advance(&self, leg: &SimLeg) -> bool {
        match (leg.kind, leg.progress) {
            (LegKind::Prefill, progress) => progress == Progress::Begun,
            (LegKind::Decode, Progress::Begun) => self.kv_is_there(leg),
            _ => true,
        }
    }

    fn kv_is_there(&self, decode: &SimLeg) -> bool {
        let orphan = (decode.attempt, decode.peer.clone());
        self.orphans.contains(&orphan)
            || self
                .prefill_of(decode)
                .is_some_and(|leg| leg.progress == Progress::Prefilled)
    }

    /// Neither there nor on its way.
    fn kv_is_gone(&self, decode: &SimLeg) -> bool {
        let announced = self.to_worker.values().any(|(key, queue)| {
            engine(*key) == decode.peer
                && queue.iter().any(|effect| match effect {
                    Effect::Dispatch { leg, .. } | Effect::Retarget { leg, .. } => {
                        leg.attempt == decode.attempt
                    }
                    _ => false,
                })
        });
        decode.progress == Progress::Begun
            && !announced
            && !self.kv_is_there(decode)
            && self.prefill_of(decode).is_none()
    }

    /// How a leg ends that waits for KV which will not come.
    fn ends_by_itself(&self, leg: &SimLeg) -> Option<LegEndReason> {
        if leg.kind != LegKind::Decode || !self.kv_is_gone(leg) {
            return None;
        }
        Some(if self.ended_by_prefill.contains(&leg.attempt) {
            LegEndReason::Finished
        } else {
            LegEndReason::KvLost
        })
    }

    fn prefill_of(&self, decode: &SimLeg) -> Option<&SimLeg> {
        self.legs()
            .find(|(key, leg)| {
                engine(*key) == decode.peer
                    && leg.attempt == decode.attempt
                    && leg.kind == LegKind::Prefill
            })
            .map(|(_, leg)| leg)
    }

    fn feed(&mut self, input: Input) {
        let mut views = self.views();
        self.machine.handle(input, self.now, &mut views);
        self.tie = views.tie;
        self.dry = views.dry;
        self.apply();
    }

    /// What a shell does with effects.
    fn apply(&mut self) {
        while let Some(effect) = self.machine.next_effect() {
            let to = match effect {
                Effect::Dispatch { leg, ref spec } => {
                    self.check_dispatch(leg, spec);
                    leg.worker
                }
                Effect::Abort { leg, .. } | Effect::Retarget { leg, .. } => leg.worker,
                Effect::Emit(event) => {
                    self.show_client(event);
                    continue;
                }
                Effect::Retry { .. } => continue,
            };
            if self.keys().any(|key| key == to) {
                let queue = self.to_worker.entry(to.connection);
                queue
                    .or_insert_with(|| (to, VecDeque::new()))
                    .1
                    .push_back(effect);
            } else if matches!(effect, Effect::Dispatch { .. }) {
                self.report(to, Input::Lost(to));
            }
        }
    }

    fn check_dispatch(&mut self, leg: LegId, spec: &LegSpec) {
        assert!(
            self.legs_dispatched.insert(leg),
            "an attempt has two legs on a worker"
        );
        assert!(!spec.choices.is_empty());
        assert_eq!(spec.opaque, self.opaque, "the content as it was");
        let resumed = spec.resumed.len();
        assert!(resumed == 0 || spec.choices.len() == 1);
        assert!(resumed < self.setup.lengths.max_tokens);
        for (position, &token) in spec.resumed.iter().enumerate() {
            assert_eq!(token, truth(spec.choices[0], position));
        }
        if spec.kind != LegKind::Decode {
            for choice in &spec.choices {
                let seen = self.client.tokens.get(choice).map_or(0, Vec::len);
                assert_eq!(resumed, seen, "what was streamed is resumed");
            }
        }
        let split = spec.kind != LegKind::Colocated;
        assert_eq!(split, spec.handoff.is_some());
        let capabilities = self.setup.capabilities;
        assert!(capabilities.resumes || resumed == 0);
        assert!(capabilities.splits_choices || !split || spec.choices.len() == 1);
        match &spec.handoff {
            Some(Handoff::Redeem(ticket)) => {
                let at = self.tickets.iter().position(|issued| issued == ticket);
                self.tickets
                    .remove(at.expect("a ticket that was issued, once"));
                assert_eq!(spec.kind, LegKind::Decode);
            }
            Some(Handoff::IssueTicket) => assert_eq!(spec.kind, LegKind::Prefill),
            Some(Handoff::With(_)) => {
                assert_eq!(capabilities.handoff, HandoffKind::Concurrent);
            }
            None => {}
        }
        let long = resumed + 1 < self.setup.lengths.max_tokens;
        assert!(!split || long || self.setup.frames);
    }

    fn show_client(&mut self, event: Event) {
        assert!(!self.is_over(), "something follows the end");
        match event {
            Event::Tokens {
                choice,
                tokens,
                finish,
                ..
            } => {
                assert!(!self.client.finished.contains_key(&choice));
                assert_eq!(self.client.scored, self.setup.scored);
                let seen = self.client.tokens.entry(choice).or_default();
                for token in tokens {
                    assert_eq!(token, truth(choice, seen.len()), "the tokens' order");
                    seen.push(token);
                }
                if let Some(finish) = finish {
                    self.client.finished.insert(choice, finish);
                }
            }
            Event::Frame { frame, tokens } => {
                assert!(self.setup.frames);
                let content = frame.get::<Vec<u32>>().expect("a frame of the worker");
                assert_eq!(content.len(), tokens as usize);
                let seen = self.client.tokens.entry(0).or_default();
                for &token in content {
                    assert_eq!(token, truth(0, seen.len()), "the frames' order");
                    seen.push(token);
                }
            }
            Event::Done(timings) => self.client.done = Some(timings),
            Event::Failed(error) => self.client.failed = Some(error),
            Event::PromptLogprobs(_) => {
                assert!(self.setup.scored && !self.client.scored);
                self.client.scored = true;
            }
        }
    }

    /// Whether nothing went wrong, in whatever order it went.
    pub fn is_faultless(&self) -> bool {
        self.faults_left == self.setup.faults
    }

    pub fn is_over(&self) -> bool {
        self.client.done.is_some() || self.client.failed.is_some()
    }

    /// What must hold when the request ended, however it went.
    pub fn check_end(&mut self) {
        assert!(self.machine.is_over());
        if self.client.done.is_some() {
            for choice in 0..self.setup.n {
                let length = self.client.tokens.get(&choice).map_or(0, Vec::len);
                if !self.client.stopped.contains(&choice) {
                    assert_eq!(length, self.setup.lengths.of(choice), "choice {choice}");
                    let expected = self.setup.lengths.finish(choice);
                    assert_eq!(self.client.finished.get(&choice), Some(&expected));
                }
            }
        }
        self.check_nothing_stranded();
    }

    /// Every leg ended, or its worker gets an abort.
    fn check_nothing_stranded(&mut self) {
        while let Some(key) = self
            .to_worker
            .values()
            .find_map(|(key, queue)| (!queue.is_empty()).then_some(*key))
        {
            let effect = pop(&mut self.to_worker, key);
            self.deliver(key, effect);
        }
        let left: Vec<_> = self.legs().map(|(_, leg)| leg.clone()).collect();
        assert!(left.is_empty(), "stranded: {left:?}");
    }

    fn views(&self) -> Views {
        let view = |(index, worker): (usize, &Worker)| WorkerView {
            id: WorkerId(index as u32),
            domain: KvDomain::default(),
            capabilities: self.setup.capabilities,
            role: worker.role,
            hardware: 0,
            machine: 0,
            health: if worker.key.is_some() {
                Health::Ready
            } else {
                Health::Down
            },
            capacity: Capacity {
                max_model_len_tokens: 1_000,
                block_size_tokens: 16,
                total_blocks: 200,
            },
            load: ReportedLoad {
                free_blocks: 200,
                ..ReportedLoad::default()
            },
            outstanding: Outstanding::default(),
        };
        Views {
            views: self.workers.iter().enumerate().map(view).collect(),
            keys: self.workers.iter().map(|worker| worker.key).collect(),
            model: CostModel::default(),
            tie: self.tie,
            dry: self.dry,
        }
    }

    fn report(&mut self, key: WorkerKey, input: Input) {
        let queue = self.to_router.entry(key.connection);
        queue
            .or_insert_with(|| (key, VecDeque::new()))
            .1
            .push_back(input);
    }

    fn keys(&self) -> impl Iterator<Item = WorkerKey> {
        self.workers.iter().filter_map(|worker| worker.key)
    }

    fn legs(&self) -> impl Iterator<Item = (WorkerKey, &SimLeg)> {
        self.workers.iter().flat_map(|worker| {
            let legs = worker.legs.iter();
            legs.filter_map(|leg| Some((worker.key?, leg)))
        })
    }

    fn leg(&self, id: LegId) -> Option<&SimLeg> {
        self.legs()
            .find(|(key, leg)| leg_id(*key, leg) == id)
            .map(|(_, leg)| leg)
    }

    fn worker_of(&mut self, key: WorkerKey) -> &mut Worker {
        &mut self.workers[key.worker.0 as usize]
    }

    fn take_leg(&mut self, id: LegId) -> Option<SimLeg> {
        let legs = &mut self.worker_of(id.worker).legs;
        let at = legs.iter().position(|leg| leg.attempt == id.attempt)?;
        Some(legs.remove(at))
    }
}

impl Fleet for Views {
    fn place(&mut self, request: &RequestView) -> Result<Placed, NoPlacement> {
        self.tie += 1;
        let index = self.index();
        let [by_role, by_cost] = self.choosing();
        let placement = index
            .place(request, by_role)
            .or_else(|_| index.place(request, by_cost))?;
        Ok(Placed {
            prefill: self.worker_ref(placement.prefill),
            decode: self.worker_ref(placement.decode),
            why: placement.why,
        })
    }

    fn place_decode(
        &mut self,
        request: &RequestView,
        prefill: WorkerKey,
        tried: &[WorkerId],
    ) -> Option<WorkerRef> {
        self.tie += 1;
        let (index, prefill) = (self.index(), prefill.worker);
        let ways = self.choosing().into_iter();
        let mut found = ways.filter_map(|how| index.place_decode(request, prefill, tried, how));
        found.next().map(|id| self.worker_ref(id))
    }

    fn may_retry(&mut self) -> bool {
        let is_dry = self.dry > 0;
        self.dry = self.dry.saturating_sub(1);
        !is_dry
    }
}

impl Views {
    fn index(&self) -> WorkerIndex {
        let mut index = WorkerIndex::default();
        for worker in &self.views {
            index.update(ModelId::default(), worker);
        }
        index
    }

    /// By role while there are workers of each, so that short requests are split too.
    fn choosing(&self) -> [Choosing<'_>; 2] {
        [true, false].map(|strict_roles| Choosing {
            model: &self.model,
            strict_roles,
            tie: self.tie,
        })
    }

    fn worker_ref(&self, id: WorkerId) -> WorkerRef {
        let key = self.keys[id.0 as usize].expect("only workers that are up are chosen");
        WorkerRef {
            key,
            peer: Peer {
                engine_id: engine(key),
                kv_endpoint: String::new(),
            },
            capabilities: self.views[id.0 as usize].capabilities,
            identity: self.views[id.0 as usize].domain.identity,
        }
    }
}

fn leg_id(worker: WorkerKey, leg: &SimLeg) -> LegId {
    LegId {
        worker,
        attempt: leg.attempt,
    }
}

fn engine(key: WorkerKey) -> String {
    format!("engine-{}", key.connection)
}

fn pop<T>(queues: &mut BTreeMap<u64, (WorkerKey, VecDeque<T>)>, key: WorkerKey) -> T {
    let queue = queues
        .get_mut(&key.connection)
        .expect("only offered when there");
    queue.1.pop_front().expect("only offered when not empty")
}
