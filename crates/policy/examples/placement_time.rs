//! Times placements while loads change: a line `WORKERS BUSY_S IDLE_S UPDATE_S` for each number
//! of workers given.
//!
//! Median seconds of a placement with one worker's load changed before it, where every worker
//! has a random load and where none has any; and mean seconds of the change alone.
//! `benchmarks/placement.py` runs it, in two revisions by turns.

use std::hint::black_box;
use std::time::{Duration, Instant};

use tasuki_core::{
    Capabilities, Capacity, CostModel, Health, KvDomain, ModelId, Outstanding, ReportedLoad,
    RequestView, Role, WorkerId, WorkerView,
};
use tasuki_policy::{Choosing, Policy, WorkerIndex};

/// At least so many placements, and at least so long, for each number of workers.
const PLACEMENTS: usize = 15;
const LONG_ENOUGH: Duration = Duration::from_millis(200);
const UPDATES: usize = 20_000;
const WORKERS_ON_A_MACHINE: u32 = 8;

fn main() {
    for argument in std::env::args().skip(1) {
        let workers: u32 = argument.parse().expect("a number of workers");
        let mut busy = Fleet::new(workers, Random::load);
        let mut idle = Fleet::new(workers, |_| idle());
        let (busy_s, idle_s) = (busy.placement_s(), idle.placement_s());
        println!("{workers} {busy_s:e} {idle_s:e} {:e}", busy.update_s());
    }
}

struct Fleet {
    index: WorkerIndex,
    workers: Vec<WorkerView>,
    random: Random,
    load: fn(&mut Random) -> ReportedLoad,
}

impl Fleet {
    /// A third of each role.
    fn new(workers: u32, load: fn(&mut Random) -> ReportedLoad) -> Self {
        let mut fleet = Self {
            index: WorkerIndex::default(),
            workers: (0..workers).map(worker).collect(),
            random: Random(u64::from(workers)),
            load,
        };
        for at in 0..fleet.workers.len() {
            fleet.change(at);
        }
        fleet
    }

    fn change(&mut self, at: usize) {
        let worker = &mut self.workers[at];
        worker.load = (self.load)(&mut self.random);
        self.index.update(ModelId::default(), worker);
    }

    fn change_any(&mut self) {
        let at = self.random.below(self.workers.len() as u64) as usize;
        self.change(at);
    }

    fn placement_s(&mut self) -> f64 {
        let (request, model) = (RequestView::new(1_024, 512), costs());
        let began = Instant::now();
        let mut times = Vec::new();
        for tie in 0.. {
            if times.len() >= PLACEMENTS && began.elapsed() >= LONG_ENOUGH {
                break;
            }
            let how = Choosing {
                model: &model,
                strict_roles: false,
                tie,
            };
            let before = Instant::now();
            self.change_any();
            let placement = self.index.place(black_box(&request), how);
            times.push(before.elapsed());
            black_box(placement).expect("a placement");
        }
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64()
    }

    fn update_s(&mut self) -> f64 {
        let began = Instant::now();
        for _ in 0..UPDATES {
            self.change_any();
        }
        began.elapsed().as_secs_f64() / UPDATES as f64
    }
}

fn worker(id: u32) -> WorkerView {
    WorkerView {
        id: WorkerId(id),
        domain: KvDomain::default(),
        capabilities: Capabilities::default(),
        role: [Role::Prefill, Role::Decode, Role::Mixed][id as usize % 3],
        hardware: 0,
        machine: 1 + id / WORKERS_ON_A_MACHINE,
        health: Health::Ready,
        capacity: Capacity {
            max_model_len_tokens: 32_768,
            max_sequences: 256,
            block_size_tokens: 32,
            total_blocks: 20_000,
        },
        load: ReportedLoad::default(),
        outstanding: Outstanding::default(),
    }
}

fn idle() -> ReportedLoad {
    ReportedLoad {
        free_blocks: 20_000,
        ..ReportedLoad::default()
    }
}

/// Handoffs within a machine are quicker.
fn costs() -> CostModel {
    let mut model = CostModel::default();
    for _ in 0..20 {
        model.links.learn(true, 1_000, 2e-3);
        model.links.learn(false, 1_000, 20e-3);
    }
    model
}

/// Numbers that leave no pattern (splitmix64's).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % limit
    }

    fn load(&mut self) -> ReportedLoad {
        let sequences = self.below(96) as u32;
        ReportedLoad {
            waiting_requests: 0,
            running_requests: sequences,
            waiting_prefill_tokens: self.below(9_000),
            free_blocks: 100 + self.below(15_000) as u32,
            running_sequences: sequences,
            waiting_sequences: self.below(7) as u32,
            awaited_sequences: self.below(3) as u32,
            running_kv_tokens: u64::from(sequences) * (500 + self.below(900)),
            waiting_kv_tokens: Some(0),
        }
    }
}
