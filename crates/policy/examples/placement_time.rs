//! Times [`tasuki_policy::place`]: a line `WORKERS SECONDS` for each number of workers given.
//!
//! `benchmarks/placement.py` runs it, in two revisions by turns.

use std::hint::black_box;
use std::time::{Duration, Instant};

use tasuki_core::{
    Capabilities, Capacity, CostModel, Health, KvDomain, Outstanding, ReportedLoad, RequestView,
    Role, WorkerId, WorkerView,
};
use tasuki_policy::{Choosing, place};

/// At least so many placements, and at least so long, for each number of workers.
const PLACEMENTS: usize = 15;
const LONG_ENOUGH: Duration = Duration::from_millis(200);

fn main() {
    for argument in std::env::args().skip(1) {
        let workers: u32 = argument.parse().expect("a number of workers");
        println!("{workers} {:e}", median_s(&fleet(workers)));
    }
}

/// A third of each role, each worker with a load of its own.
fn fleet(workers: u32) -> Vec<WorkerView> {
    let roles = [Role::Prefill, Role::Decode, Role::Mixed];
    let worker = |id: u32| WorkerView {
        id: WorkerId(id),
        domain: KvDomain::default(),
        capabilities: Capabilities::default(),
        role: roles[id as usize % 3],
        hardware: 0,
        machine: 1 + id / 8,
        health: Health::Ready,
        capacity: Capacity {
            max_model_len_tokens: 32_768,
            block_size_tokens: 32,
            total_blocks: 20_000,
        },
        load: ReportedLoad {
            waiting_requests: id % 7,
            running_requests: id * 37 % 96,
            waiting_prefill_tokens: u64::from(id) * 911 % 9_000,
            free_blocks: 1_000 + id * 53 % 15_000,
            running_sequences: id * 37 % 96,
            waiting_sequences: id % 7,
            running_kv_tokens: u64::from(id * 37 % 96) * u64::from(500 + id * 13 % 900),
        },
        outstanding: Outstanding::default(),
    };
    (0..workers).map(worker).collect()
}

fn median_s(fleet: &[WorkerView]) -> f64 {
    let (request, model) = (RequestView::new(1_024, 512), CostModel::default());
    let began = Instant::now();
    let mut times = Vec::new();
    for tie in 0.. {
        if times.len() >= PLACEMENTS && began.elapsed() >= LONG_ENOUGH {
            break;
        }
        let before = Instant::now();
        let how = Choosing {
            model: &model,
            strict_roles: false,
            tie,
        };
        let fleet: Vec<&WorkerView> = black_box(fleet).iter().collect();
        let placement = place(&fleet, black_box(&request), how);
        times.push(before.elapsed());
        black_box(placement).expect("a placement");
    }
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64()
}
