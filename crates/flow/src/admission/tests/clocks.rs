//! Workers that are clocks, and the shell around them, in simulated time.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tasuki_core::{HandoffKind, Rates, RequestView, StepSample};

use crate::admission::{Admission, AdmissionConfig, Entrant, EntrantId, Verdict};
use crate::fleet::{LegSlot, LoadReport};
use crate::leg::LegKind;
use crate::testing::{info, leg_spec};
use crate::{Fleet, FleetState, Placed, WorkerKey};
use tasuki_policy::PolicyConfig;

/// An H200's steps with Qwen3-4B's shape, roughly.
pub const H200: Rates = Rates {
    step_s: 2.7e-3,
    sequence_s: 1.5e-5,
    kv_token_s: 2.6e-8,
    prompt_step_s: 0.0,
    prompt_token_s: 1.1e-5,
    prompt_square_s: 5e-10,
};
/// Prompt tokens in a step.
const CHUNK: u32 = 1024;
const BLOCK: u32 = 16;

/// A request of the load.
#[derive(Debug, Clone)]
pub struct Arrival {
    pub at: f64,
    pub prompt: u32,
    pub output: u32,
    pub tenant: Arc<str>,
    pub priority: i32,
}

/// What its client saw.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    pub ttft_s: Option<f64>,
    pub tpot_s: Option<f64>,
    pub refused_after_s: Option<f64>,
}

impl Seen {
    pub fn is_good(&self, ttft_s: f64, tpot_s: f64) -> bool {
        self.ttft_s.is_some_and(|seen| seen <= ttft_s)
            && self.tpot_s.is_some_and(|seen| seen <= tpot_s)
    }
}

#[derive(Debug)]
struct Leg {
    request: usize,
    slot: LegSlot,
    prompt: u32,
    computed: u32,
    produced: u32,
    output: u32,
}

impl Leg {
    fn kv(&self) -> u64 {
        u64::from(self.prompt + self.produced)
    }
}

struct Clock {
    key: WorkerKey,
    waiting: VecDeque<Leg>,
    decoding: Vec<Leg>,
    /// The step that runs: its end, and what it does.
    step: Option<(f64, StepSample)>,
    chunk: Vec<(usize, u32)>,
    steps: u64,
    last_leg: u64,
    samples: [Option<StepSample>; 2],
}

impl Clock {
    /// Begins a step if there is anything to do.
    fn begin(&mut self, now: f64) {
        let mut sample = StepSample {
            number: self.steps + 1,
            sequences: self.decoding.len() as u32,
            kv_tokens: self.decoding.iter().map(Leg::kv).sum(),
            ..StepSample::default()
        };
        self.chunk.clear();
        let mut prompt_s = 0.0;
        let mut room = CHUNK;
        for (at, leg) in self.waiting.iter().enumerate() {
            let tokens = (leg.prompt - leg.computed).min(room);
            room -= tokens;
            if tokens == 0 {
                break;
            }
            let (start, end) = (f64::from(leg.computed), f64::from(leg.computed + tokens));
            prompt_s += H200.prompt_s(end, start);
            sample.prefill_squares += end * end - start * start;
            sample.prefill_tokens += tokens;
            self.chunk.push((at, tokens));
        }
        let decode_s = match sample.sequences {
            0 => 0.0,
            sequences => H200.decode_s(f64::from(sequences), sample.kv_tokens as f64),
        };
        sample.duration_s = decode_s + prompt_s;
        self.step = (sample.duration_s > 0.0).then_some((now + sample.duration_s, sample));
    }

    fn load(&self, total_blocks: u32) -> LoadReport {
        let blocks = |leg: &Leg| (leg.kv() as u32).div_ceil(BLOCK);
        let held: u32 = self.waiting.iter().chain(&self.decoding).map(blocks).sum();
        LoadReport {
            applied_legs: Some(self.last_leg),
            waiting_requests: self.waiting.len() as u32,
            running_requests: self.decoding.len() as u32,
            waiting_prefill_tokens: self
                .waiting
                .iter()
                .map(|leg| u64::from(leg.prompt - leg.computed))
                .sum(),
            free_blocks: total_blocks.saturating_sub(held),
            running_sequences: self.decoding.len() as u32,
            waiting_sequences: self.waiting.len() as u32,
            awaited_sequences: 0,
            running_kv_tokens: self.decoding.iter().map(Leg::kv).sum(),
            waiting_kv_tokens: Some(self.waiting.iter().map(Leg::kv).sum()),
            is_draining: false,
            last_decode: self.samples[0],
            last_prefill: self.samples[1],
        }
    }
}

/// A deployment of mixed workers.
pub struct World {
    pub fleet: FleetState,
    pub admission: Admission,
    clocks: Vec<Clock>,
    load: Vec<Arrival>,
    pub seen: Vec<Seen>,
    entered: HashMap<EntrantId, usize>,
    admitted: HashMap<usize, (f64, tasuki_core::Forecast)>,
    first_token: HashMap<usize, f64>,
    blocks: u32,
    pub most_waiting: usize,
    /// Requests in the order in which they were let in.
    pub order: Vec<usize>,
}

fn duration(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

impl World {
    /// `tokens`: room for KV of each worker.
    pub fn new(workers: usize, tokens: u32, config: AdmissionConfig) -> Self {
        let mut fleet = FleetState::new(vec![Vec::new()], PolicyConfig::default());
        let blocks = tokens / BLOCK;
        let clocks = (0..workers)
            .map(|index| {
                let id = fleet.add();
                let mut info = info(&format!("w{index}"));
                info.capabilities.handoff = HandoffKind::None;
                info.max_model_len = 100_000;
                info.num_blocks = blocks;
                let key = fleet.join(id, info, Duration::ZERO).expect("it joins");
                Clock {
                    key,
                    waiting: VecDeque::new(),
                    decoding: Vec::new(),
                    step: None,
                    chunk: Vec::new(),
                    steps: 0,
                    last_leg: 0,
                    samples: [None; 2],
                }
            })
            .collect();
        Self {
            fleet,
            admission: Admission::new(config),
            clocks,
            load: Vec::new(),
            seen: Vec::new(),
            entered: HashMap::new(),
            admitted: HashMap::new(),
            first_token: HashMap::new(),
            blocks,
            most_waiting: 0,
            order: Vec::new(),
        }
    }

    /// Serves the load to its end; arrivals are in order.
    pub fn run(&mut self, load: Vec<Arrival>) {
        self.seen = vec![Seen::default(); load.len()];
        self.load = load;
        let mut next = 0;
        loop {
            let step = self
                .clocks
                .iter()
                .enumerate()
                .filter_map(|(index, clock)| Some((clock.step?.0, index)))
                .min_by(|a, b| a.0.total_cmp(&b.0));
            let arrival = self.load.get(next).map(|arrival| arrival.at);
            match (arrival, step) {
                (Some(at), step) if step.is_none_or(|(end, _)| at <= end) => {
                    self.arrive(next);
                    next += 1;
                }
                (_, Some((end, index))) => self.end_step(index, end),
                (None, None) => break,
                (Some(_), None) => unreachable!("an arrival comes before no step"),
            }
        }
        assert_eq!(
            self.admission.waiting(),
            (0, 0, 0),
            "nobody is left waiting"
        );
    }

    fn arrive(&mut self, index: usize) {
        let arrival = &self.load[index];
        let now = arrival.at;
        let entrant = Entrant {
            view: RequestView::new(arrival.prompt, arrival.output),
            tenant: Arc::clone(&arrival.tenant),
            priority: arrival.priority,
            arrived: duration(now),
        };
        let id = self.admission.enter(entrant, &self.fleet);
        self.entered.insert(id, index);
        self.settle(now);
    }

    fn settle(&mut self, now: f64) {
        loop {
            let verdicts = self.admission.settle(duration(now), &self.fleet);
            self.most_waiting = self.most_waiting.max(self.admission.waiting().0);
            if verdicts.is_empty() {
                return;
            }
            for (id, verdict) in verdicts {
                let index = self.entered.remove(&id).expect("it waits");
                match verdict {
                    Verdict::Admitted(forecast, _) => {
                        self.order.push(index);
                        self.admitted.insert(index, (now, forecast));
                        self.dispatch(index, now);
                        self.admission.passed(id);
                    }
                    Verdict::Refused(_) => {
                        self.seen[index].refused_after_s = Some(now - self.load[index].at);
                    }
                }
            }
        }
    }

    fn dispatch(&mut self, index: usize, now: f64) {
        let Arrival { prompt, output, .. } = self.load[index];
        let view = RequestView::new(prompt, output);
        let Placed {
            prefill, decode, ..
        } = self.fleet.place(&view).expect("there are workers");
        assert_eq!(
            prefill.key, decode.key,
            "the tests' workers cannot hand over"
        );
        let spec = leg_spec(LegKind::Colocated, prompt, output);
        let slot = self
            .fleet
            .on_dispatched(prefill.key, &spec)
            .expect("it is up");
        let clock = self.clocks.iter_mut().find(|c| c.key == prefill.key);
        let clock = clock.expect("it is one of ours");
        clock.last_leg = slot.number;
        clock.waiting.push_back(Leg {
            request: index,
            slot,
            prompt,
            computed: 0,
            produced: 0,
            output,
        });
        if clock.step.is_none() {
            clock.begin(now);
        }
    }

    fn end_step(&mut self, index: usize, now: f64) {
        let clock = &mut self.clocks[index];
        let (_, sample) = clock.step.take().expect("a step ended");
        clock.steps += 1;
        clock.samples[usize::from(sample.prefill_tokens > 0)] = Some(sample);
        let mut produced: Vec<(usize, LegSlot, bool)> = Vec::new();
        for leg in &mut clock.decoding {
            leg.produced += 1;
            produced.push((leg.request, leg.slot, leg.produced == leg.output));
        }
        clock.decoding.retain(|leg| leg.produced < leg.output);
        for (at, tokens) in std::mem::take(&mut clock.chunk) {
            clock.waiting[at].computed += tokens;
        }
        while clock
            .waiting
            .front()
            .is_some_and(|leg| leg.computed == leg.prompt)
        {
            let mut leg = clock.waiting.pop_front().expect("it is there");
            leg.produced = 1;
            produced.push((leg.request, leg.slot, leg.output == 1));
            if leg.output > 1 {
                clock.decoding.push(leg);
            }
        }
        let (key, load) = (clock.key, clock.load(self.blocks));
        clock.begin(now);
        self.fleet.on_report(key, Some(&load), duration(now));
        for (request, slot, ended) in produced {
            self.fleet.on_output(key, slot, 0, 0);
            if ended {
                self.fleet.on_ended(key, slot, None);
            }
            self.note(request, ended, now);
        }
        self.fleet.recount(key);
        self.settle(now);
    }

    /// A token came, the last one if it `ended`.
    fn note(&mut self, request: usize, ended: bool, now: f64) {
        let Arrival { at, output, .. } = self.load[request];
        let (admitted, forecast) = self.admitted[&request];
        let model = tasuki_core::ModelId::default();
        let first = *self.first_token.entry(request).or_insert(now);
        let seen = &mut self.seen[request];
        if seen.ttft_s.is_none() {
            seen.ttft_s = Some(now - at);
            let ttft = Some(duration(now - admitted));
            self.admission
                .learn(model, &forecast, ttft, None, duration(now));
        }
        if ended {
            let tpot_s = (now - first) / f64::from(output.max(2) - 1);
            seen.tpot_s = Some(tpot_s);
            let tpot = Some(duration(tpot_s));
            self.admission
                .learn(model, &forecast, None, tpot, duration(now));
        }
    }
}

/// Poisson arrivals of W2's lengths, half of them longer or shorter, for so many seconds.
pub fn poisson(rate: f64, seconds: f64, mut draw: impl FnMut() -> f64) -> Vec<Arrival> {
    let mut load = Vec::new();
    let mut at = 0.0;
    loop {
        at -= (1.0 - draw()).ln() / rate;
        if at > seconds {
            return load;
        }
        let mut about = |mean: f64| (mean * (0.5 + draw())) as u32;
        load.push(Arrival {
            at,
            prompt: about(5_000.0),
            output: about(250.0),
            tenant: "".into(),
            priority: 0,
        });
    }
}

/// Good requests for each second of the load, by tenant.
pub fn goodput(world: &World, seconds: f64, ttft_s: f64, tpot_s: f64) -> BTreeMap<Arc<str>, f64> {
    let mut good: BTreeMap<Arc<str>, f64> = BTreeMap::new();
    for (arrival, seen) in world.load.iter().zip(&world.seen) {
        let of_tenant = good.entry(Arc::clone(&arrival.tenant)).or_default();
        *of_tenant += f64::from(u8::from(seen.is_good(ttft_s, tpot_s))) / seconds;
    }
    good
}
