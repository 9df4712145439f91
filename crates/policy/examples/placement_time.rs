//! Times [`tasuki_policy::place`]: a line `WORKERS SECONDS` for each number of workers given.
//!
//! `benchmarks/placement.py` runs it, in two revisions by turns.

use std::hint::black_box;
use std::time::{Duration, Instant};

use tasuki_core::{
    Capabilities, Capacity, Health, KvDomain, Outstanding, ReportedLoad, RequestView, Role,
    WorkerId, WorkerView,
};
use tasuki_policy::{PolicyConfig, place};

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
            prefill_tokens_per_s: 40_000.0 + f64::from(id % 11) * 100.0,
            single_step_s: 0.003,
        },
        outstanding: Outstanding::default(),
    };
    (0..workers).map(worker).collect()
}

fn median_s(fleet: &[WorkerView]) -> f64 {
    let (request, config) = (RequestView::new(1_024, 512), PolicyConfig::default());
    let began = Instant::now();
    let mut times = Vec::new();
    for tie in 0.. {
        if times.len() >= PLACEMENTS && began.elapsed() >= LONG_ENOUGH {
            break;
        }
        let before = Instant::now();
        let placement = place(black_box(fleet), black_box(&request), &config, tie);
        times.push(before.elapsed());
        black_box(placement).expect("a placement");
    }
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64()
}
