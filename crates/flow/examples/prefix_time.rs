//! Times what the prefix index adds to a request: a line
//! `WORKERS TOKENS HASH_S COLD_S WARM_S EVENT_S CHUNK_BYTES` for each number of workers given.
//!
//! Median seconds to hash a prompt, of a placement of it where nobody holds any of it, and of
//! one where all workers hold a system prompt and one holds nearly all; mean seconds of a
//! reported chunk; and resident bytes per chunk, which the workers' own state is part of.

use std::fmt::Write as _;
use std::hint::black_box;
use std::time::{Duration, Instant};

use tasuki_core::{
    Capabilities, ChunkScheme, Chunks, HardwareClass, Identity, KvDomain, ModelId, RequestView,
    Role, WorkerId, mix,
};
use tasuki_flow::fleet::{CacheEvents, WorkerInfo};
use tasuki_flow::{Fleet, FleetState, Peer};
use tasuki_policy::PolicyConfig;

const PROMPTS: [usize; 2] = [8_192, 131_072];
const SYSTEM_TOKENS: usize = 2_048;
const CHUNKS_OF_A_WORKER: u64 = 6_000;
const TIMES: usize = 301;

fn main() {
    let scheme = ChunkScheme::of_blocks(Identity::default(), 32);
    for argument in std::env::args().skip(1) {
        let workers: u32 = argument.parse().expect("a number of workers");
        let before = resident_bytes();
        let mut fleet = FleetState::new(vec![Vec::new()], PolicyConfig::default());
        let keys: Vec<_> = (0..workers)
            .map(|id| join(&mut fleet, id, scheme))
            .collect();
        let began = Instant::now();
        for (key, id) in keys.iter().zip(0u64..) {
            let first = id * CHUNKS_OF_A_WORKER;
            tell(
                &mut fleet,
                *key,
                1,
                (first..first + CHUNKS_OF_A_WORKER).map(mix).collect(),
            );
        }
        let events_s = began.elapsed().as_secs_f64();
        let chunks: usize = (0..workers).map(|id| fleet.chunks_held(WorkerId(id))).sum();
        let chunk_bytes = resident_bytes().saturating_sub(before) / chunks as u64;
        let system: Vec<u32> = (0..SYSTEM_TOKENS as u32).collect();
        let names = Chunks::new(&[scheme], "", &system).by(&scheme).to_vec();
        for key in &keys {
            tell(&mut fleet, *key, 2, names.clone());
        }
        for tokens in PROMPTS {
            let cold: Vec<u32> = (7..7 + tokens as u32).collect();
            let warm: Vec<u32> = (0..tokens as u32).collect();
            let hash_s = median(|| drop(black_box(Chunks::new(&[scheme], "", black_box(&cold)))));
            let names = Chunks::new(&[scheme], "", &warm[..tokens - 200]);
            let number = 3 + (tokens > PROMPTS[0]) as u64;
            tell(
                &mut fleet,
                keys[keys.len() / 2],
                number,
                names.by(&scheme).to_vec(),
            );
            let [cold_s, warm_s] = [&cold, &warm].map(|prompt| {
                let request = RequestView {
                    chunks: Chunks::new(&[scheme], "", prompt),
                    ..RequestView::new(tokens as u32, 512)
                };
                median(|| drop(black_box(fleet.place(&request))))
            });
            let mut line = String::new();
            let event_s = events_s / (f64::from(workers) * CHUNKS_OF_A_WORKER as f64);
            let _ = write!(
                line,
                "{workers} {tokens} {hash_s:.1e} {cold_s:.1e} {warm_s:.1e}"
            );
            println!("{line} {event_s:.1e} {chunk_bytes}");
        }
    }
}

fn join(fleet: &mut FleetState, id: u32, chunks: ChunkScheme) -> tasuki_flow::WorkerKey {
    let worker = fleet.add();
    let info = WorkerInfo {
        peer: Peer {
            engine_id: format!("e{id}"),
            kv_endpoint: format!("host{}:{id}", id / 8),
        },
        role: [Role::Prefill, Role::Decode, Role::Mixed][id as usize % 3],
        role_epoch: 0,
        role_owner: String::new(),
        model: "m".to_owned(),
        further_names: Vec::new(),
        adapters: Vec::new(),
        domain: KvDomain::default(),
        capabilities: Capabilities::default(),
        vocab_size: 512,
        max_model_len: 1 << 18,
        max_sequences: None,
        block_size: 32,
        num_blocks: 40_000,
        chunks,
        hardware: HardwareClass::default(),
    };
    fleet.join(worker, info, Duration::ZERO).expect("joined")
}

fn tell(fleet: &mut FleetState, key: tasuki_flow::WorkerKey, number: u64, stored: Vec<u64>) {
    let events = CacheEvents {
        number,
        reset: number == 1,
        stored,
        ..CacheEvents::default()
    };
    fleet.on_cache_events(key, &events);
    let _ = fleet.chunk_schemes(ModelId::default());
}

fn median(mut timed: impl FnMut()) -> f64 {
    let mut times: Vec<Duration> = Vec::with_capacity(TIMES);
    for _ in 0..TIMES {
        let began = Instant::now();
        timed();
        times.push(began.elapsed());
    }
    times.sort_unstable();
    times[TIMES / 2].as_secs_f64()
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = status
        .split_whitespace()
        .nth(1)
        .and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0u64) * 4_096
}
