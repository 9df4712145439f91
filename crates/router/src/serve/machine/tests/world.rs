//! Workers, wires and a client around one machine; every step is somebody's pick.
//!
//! Longer than a room: the model is one piece, and its parts make no sense alone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use tasuki_core::{
    Capacity, Health, Identity, Outstanding, ReportedLoad, RequestView, Role, WorkerId, WorkerView,
};
use tasuki_policy::{NoPlacement, PolicyConfig};
use tasuki_wire::v1::{self, LegEndReason};

use super::sim_worker::{Lengths, Progress, SimLeg, truth};
use crate::serve::api::{Event, Finish, Generation, ServeError};
use crate::serve::machine::Machine;
use crate::serve::machine::config::{MachineConfig, OnKvLoss};
use crate::serve::machine::io::{Effect, Fleet, Input};
use crate::workers::{Seat, WorkerKey};

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
        }
    }
}

/// One thing that may happen next. The order is that of the undisturbed run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    ToWorker(WorkerKey),
    ToRouter(WorkerKey),
    /// The leg's next step: first tokens, pull and start, or decode.
    Advance(WorkerKey, String),
    Restart(usize),
    TimePasses,
    // Faults.
    EndLeg(WorkerKey, String, LegEndReason),
    Crash(usize, Crash),
    Repeat(WorkerKey),
    Stop(u32),
    HangUp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crash {
    /// What was said before still arrives.
    AfterFlush,
    /// What was said and is under way is lost.
    InMidSentence,
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
}

pub struct World {
    setup: Setup,
    pub machine: Machine,
    workers: Vec<Worker>,
    to_router: BTreeMap<u64, (WorkerKey, VecDeque<Input>)>,
    to_worker: BTreeMap<u64, (WorkerKey, VecDeque<Effect>)>,
    /// KV that outlived its leg, by attempt and engine.
    orphans: BTreeSet<(String, String)>,
    /// Attempts that ended with their first tokens.
    ended_by_prefill: BTreeSet<String>,
    next_connection: u64,
    tie: u64,
    now: Instant,
    faults_left: usize,
    pub client: Client,
    pub trace: Vec<String>,
    attempts: BTreeSet<(String, WorkerKey)>,
}

/// What the client has seen.
#[derive(Default)]
pub struct Client {
    pub scored: bool,
    pub tokens: BTreeMap<u32, Vec<u32>>,
    pub finished: BTreeMap<u32, Finish>,
    pub stopped: BTreeSet<u32>,
    pub gone: bool,
    pub done: Option<crate::serve::api::Timings>,
    pub failed: Option<ServeError>,
}

impl World {
    pub fn new(setup: Setup) -> Self {
        let now = Instant::now();
        let request = Generation {
            request_id: "r".to_owned(),
            prompt: (0..40).collect(),
            n: setup.n,
            sampling: v1::SamplingParams {
                max_tokens: setup.lengths.max_tokens as u32,
                prompt_logprobs: setup.scored.then_some(0),
                ..Default::default()
            },
            tenant: String::new(),
            received: now,
        };
        let config = MachineConfig {
            on_kv_loss: setup.on_kv_loss,
            recover: Duration::from_secs(3_600),
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
            machine: Machine::new(request, config),
            to_router: BTreeMap::new(),
            to_worker: BTreeMap::new(),
            orphans: BTreeSet::new(),
            ended_by_prefill: BTreeSet::new(),
            tie: 0,
            now,
            faults_left: setup.faults,
            client: Client::default(),
            trace: Vec::new(),
            attempts: BTreeSet::new(),
            setup,
        };
        let mut views = world.views();
        let effects = world.machine.start(world.now, &mut views);
        world.apply(effects);
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
                actions.push(Action::Advance(key, leg.attempt.clone()));
            } else if let Some(reason) = self.ends_by_itself(leg) {
                actions.push(Action::EndLeg(key, leg.attempt.clone(), reason));
            }
        }
        let down = (0..self.workers.len()).filter(|&at| self.workers[at].key.is_none());
        actions.extend(down.map(Action::Restart));
        if self.machine.deadline().is_some() {
            actions.push(Action::TimePasses);
        }
        if self.faults_left > 0 {
            self.add_faults(&mut actions);
        }
        actions
    }

    fn add_faults(&self, actions: &mut Vec<Action>) {
        use LegEndReason as R;
        for (key, leg) in self.legs() {
            let reasons: &[R] = match (leg.leg, leg.progress) {
                (v1::Leg::Decode, Progress::Begun) => {
                    &[R::LegEndRefused, R::LegEndKvLost, R::LegEndFailed]
                }
                (v1::Leg::Decode, _) => &[R::LegEndReturned, R::LegEndFailed],
                _ => &[R::LegEndFailed],
            };
            let end = |&reason: &R| Action::EndLeg(key, leg.attempt.clone(), reason);
            for action in reasons.iter().map(end) {
                if !actions.contains(&action) {
                    actions.push(action);
                }
            }
        }
        for (at, worker) in self.workers.iter().enumerate() {
            if worker.key.is_some() {
                for crash in [Crash::AfterFlush, Crash::InMidSentence, Crash::StreamOnly] {
                    actions.push(Action::Crash(at, crash));
                }
            }
        }
        for (key, queue) in self.to_router.values() {
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
                self.worker_hears(*key, effect);
            }
            Action::ToRouter(key) => {
                let input = pop(&mut self.to_router, *key);
                self.feed(input);
            }
            Action::Advance(key, attempt) => self.advance(*key, attempt),
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
                self.feed(Input::Tick);
            }
            fault => self.fault(fault),
        }
    }

    fn fault(&mut self, action: &Action) {
        // A decode leg whose KV is gone ends by itself: no fault of its own.
        let by_itself = matches!(action, Action::EndLeg(key, attempt, reason)
            if self.leg(*key, attempt).is_some_and(|leg| self.ends_by_itself(leg) == Some(*reason)));
        self.faults_left -= usize::from(!by_itself);
        match action {
            Action::EndLeg(key, attempt, reason) => {
                let leg = self
                    .take_leg(*key, attempt)
                    .expect("only offered for a leg");
                self.say(*key, Input::Ended(*key, leg.end(*reason)));
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
        if crash == Crash::InMidSentence {
            self.to_router.remove(&key.connection);
        }
        self.say(key, Input::Lost(key));
    }

    fn worker_hears(&mut self, key: WorkerKey, effect: Effect) {
        match effect {
            Effect::Submit { submit, .. } => self.worker_of(key).legs.push(SimLeg::new(&submit)),
            Effect::Abort { abort, .. } => {
                let Some(mut leg) = self.take_leg(key, &abort.request_id) else {
                    return;
                };
                leg.choices.retain(|(choice, _)| {
                    !abort.choices.is_empty() && !abort.choices.contains(choice)
                });
                if leg.choices.is_empty() {
                    let ended = leg.end(LegEndReason::LegEndAborted);
                    self.say(key, Input::Ended(key, ended));
                } else {
                    self.worker_of(key).legs.push(leg);
                }
            }
            Effect::Retarget { retarget, .. } => {
                let peer = retarget.peer.expect("a new peer").engine_id;
                let attempt = retarget.request_id;
                match self.take_leg(key, &attempt) {
                    Some(mut leg) => {
                        leg.peer = peer;
                        self.worker_of(key).legs.push(leg);
                    }
                    None => {
                        let ended = v1::LegEnd {
                            request_id: attempt,
                            reason: LegEndReason::LegEndFailed.into(),
                            ..Default::default()
                        };
                        self.say(key, Input::Ended(key, ended));
                    }
                }
            }
            other => unreachable!("{other:?} is not for a worker"),
        }
    }

    fn advance(&mut self, key: WorkerKey, attempt: &str) {
        let lengths = self.setup.lengths;
        let mut leg = self.take_leg(key, attempt).expect("only offered for a leg");
        if leg.leg == v1::Leg::Decode && leg.progress == Progress::Begun {
            self.pull(&leg);
        }
        for output in leg.step(lengths) {
            self.say(key, Input::Output(key, output));
        }
        leg.progress = match leg.leg {
            v1::Leg::Prefill => Progress::Prefilled,
            _ => Progress::Decoding,
        };
        if leg.choices.is_empty() {
            if leg.leg == v1::Leg::Prefill {
                self.ended_by_prefill.insert(leg.attempt.clone());
            }
            let ended = leg.end(LegEndReason::LegEndFinished);
            self.say(key, Input::Ended(key, ended));
        } else {
            self.worker_of(key).legs.push(leg);
        }
    }

    /// The decode worker has the KV: prefill's leg is over.
    fn pull(&mut self, decode: &SimLeg) {
        self.orphans
            .remove(&(decode.attempt.clone(), decode.peer.clone()));
        let peer = self.keys().find(|key| engine(*key) == decode.peer);
        if let Some((key, leg)) =
            peer.and_then(|key| Some((key, self.take_leg(key, &decode.attempt)?)))
        {
            self.say(
                key,
                Input::Ended(key, leg.end(LegEndReason::LegEndHandedOff)),
            );
        }
    }

    fn can_advance(&self, leg: &SimLeg) -> bool {
        match (leg.leg, leg.progress) {
            (v1::Leg::Prefill, progress) => progress == Progress::Begun,
            (v1::Leg::Decode, Progress::Begun) => self.kv_is_there(leg),
            _ => true,
        }
    }

    fn kv_is_there(&self, decode: &SimLeg) -> bool {
        let orphan = (decode.attempt.clone(), decode.peer.clone());
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
                    Effect::Submit { submit, .. } => submit.request_id == decode.attempt,
                    Effect::Retarget { retarget, .. } => retarget.request_id == decode.attempt,
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
        if leg.leg != v1::Leg::Decode || !self.kv_is_gone(leg) {
            return None;
        }
        Some(if self.ended_by_prefill.contains(&leg.attempt) {
            LegEndReason::LegEndFinished
        } else {
            LegEndReason::LegEndKvLost
        })
    }

    fn prefill_of(&self, decode: &SimLeg) -> Option<&SimLeg> {
        self.legs()
            .find(|(key, leg)| {
                engine(*key) == decode.peer
                    && leg.attempt == decode.attempt
                    && leg.leg == v1::Leg::Prefill
            })
            .map(|(_, leg)| leg)
    }

    fn feed(&mut self, input: Input) {
        let mut views = self.views();
        let effects = self.machine.handle(input, self.now, &mut views);
        self.tie = views.tie;
        self.apply(effects);
    }

    /// What the request's task does with effects.
    fn apply(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            let to = match &effect {
                Effect::Submit { to, submit } => {
                    self.check_submit(*to, submit);
                    *to
                }
                Effect::Abort { to, .. } | Effect::Retarget { to, .. } => *to,
                Effect::Emit(_) => {
                    self.client_hears(effect);
                    continue;
                }
                Effect::Setback { .. } => continue,
            };
            if self.keys().any(|key| key == to) {
                let queue = self.to_worker.entry(to.connection);
                queue
                    .or_insert_with(|| (to, VecDeque::new()))
                    .1
                    .push_back(effect);
            } else if matches!(effect, Effect::Submit { .. }) {
                self.say(to, Input::Lost(to));
            }
        }
    }

    fn check_submit(&mut self, to: WorkerKey, submit: &v1::Submit) {
        let id = (submit.request_id.clone(), to);
        assert!(self.attempts.insert(id), "an id is used twice on a worker");
        assert!(!submit.choices.is_empty());
        let resumed = submit.resumed_tokens.len();
        assert!(resumed == 0 || submit.choices.len() == 1);
        assert!(resumed < self.setup.lengths.max_tokens);
        for (position, &token) in submit.resumed_tokens.iter().enumerate() {
            assert_eq!(token, truth(submit.choices[0], position));
        }
        if submit.leg() != v1::Leg::Decode {
            for choice in &submit.choices {
                let seen = self.client.tokens.get(choice).map_or(0, Vec::len);
                assert_eq!(resumed, seen, "what was streamed is resumed");
            }
        }
        let split = submit.leg() != v1::Leg::Colocated;
        assert_eq!(split, submit.peer.is_some());
        assert!(!split || resumed + 1 < self.setup.lengths.max_tokens);
    }

    fn client_hears(&mut self, effect: Effect) {
        assert!(!self.is_over(), "something follows the end");
        let Effect::Emit(event) = effect else {
            unreachable!()
        };
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
                    let expected = match self.setup.lengths.finish(choice) {
                        v1::FinishReason::FinishLength => Finish::Length,
                        _ => Finish::Stop,
                    };
                    assert_eq!(self.client.finished.get(&choice), Some(&expected));
                }
            }
        }
        self.check_nothing_stranded();
    }

    /// Every leg ended, or its worker is told that it is not wanted.
    fn check_nothing_stranded(&mut self) {
        while let Some(key) = self
            .to_worker
            .values()
            .find_map(|(key, queue)| (!queue.is_empty()).then_some(*key))
        {
            let effect = pop(&mut self.to_worker, key);
            self.worker_hears(key, effect);
        }
        let left: Vec<_> = self.legs().map(|(_, leg)| leg.clone()).collect();
        assert!(left.is_empty(), "stranded: {left:?}");
    }

    fn views(&self) -> Views {
        let view = |(index, worker): (usize, &Worker)| WorkerView {
            id: WorkerId(index as u32),
            identity: Identity::default(),
            role: worker.role,
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
            tie: self.tie,
        }
    }

    fn say(&mut self, key: WorkerKey, input: Input) {
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

    fn leg(&self, key: WorkerKey, attempt: &str) -> Option<&SimLeg> {
        self.legs()
            .find(|(owner, leg)| *owner == key && leg.attempt == attempt)
            .map(|(_, leg)| leg)
    }

    fn worker_of(&mut self, key: WorkerKey) -> &mut Worker {
        &mut self.workers[key.worker.0 as usize]
    }

    fn take_leg(&mut self, key: WorkerKey, attempt: &str) -> Option<SimLeg> {
        let legs = &mut self.worker_of(key).legs;
        let at = legs.iter().position(|leg| leg.attempt == attempt)?;
        Some(legs.remove(at))
    }
}

impl Fleet for Views {
    fn place(&mut self, request: &RequestView) -> Result<(Seat, Seat), NoPlacement> {
        self.tie += 1;
        let config = PolicyConfig::default();
        let placement = tasuki_policy::place(&self.views, request, &config, self.tie)?;
        Ok((self.seat(placement.prefill), self.seat(placement.decode)))
    }

    fn place_decode(
        &mut self,
        request: &RequestView,
        prefill: WorkerKey,
        tried: &[WorkerId],
    ) -> Option<Seat> {
        self.tie += 1;
        let config = PolicyConfig::default();
        tasuki_policy::place_decode(
            &self.views,
            request,
            prefill.worker,
            tried,
            &config,
            self.tie,
        )
        .map(|id| self.seat(id))
    }
}

impl Views {
    fn seat(&self, id: WorkerId) -> Seat {
        let key = self.keys[id.0 as usize].expect("only workers that are up are chosen");
        Seat {
            key,
            peer: v1::Peer {
                engine_id: engine(key),
                kv_endpoint: String::new(),
            },
        }
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
