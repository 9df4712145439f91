//! Several routers that see the same reports, all of them late, do not send their requests to
//! the same workers.

use super::*;

const ROUTERS: usize = 4;
const WORKERS: u32 = 16;
const REPORTED_EVERY_MS: u32 = 100;
const TAKES_MS: u32 = 200;
const FOR_MS: u32 = 20_000;

/// A request that runs.
struct Running {
    router: usize,
    key: WorkerKey,
    slot: LegSlot,
    ends_ms: u32,
}

/// The most work of one worker over the mean of all, on average of the time. Each router gets
/// a request every `every_ms`; `seeds` are the routers'.
fn spread(every_ms: u32, seeds: [u64; ROUTERS]) -> f64 {
    let mut routers = seeds.map(router);
    let mut running: Vec<Running> = Vec::new();
    let mut applied = vec![[0; ROUTERS]; WORKERS as usize];
    let (mut spreads, mut samples) = (0.0, 0);
    for now_ms in 0..FOR_MS {
        let over = running.extract_if(.., |request| request.ends_ms <= now_ms);
        for Running {
            router, key, slot, ..
        } in over
        {
            routers[router].on_ended(key, slot, None);
            routers[router].recount(key);
        }
        for (at, router) in routers.iter_mut().enumerate() {
            if now_ms % every_ms == 0 {
                let Placed {
                    prefill: worker, ..
                } = router.place(&RequestView::new(100, 100)).expect("a worker");
                let slot = router.on_dispatched(worker.key, &spec(LegKind::Colocated, 100));
                let slot = slot.expect("a connected worker");
                applied[worker.key.worker.0 as usize][at] = slot.number;
                running.push(Running {
                    router: at,
                    key: worker.key,
                    slot,
                    ends_ms: now_ms + TAKES_MS,
                });
            }
        }
        let mut work = [0; WORKERS as usize];
        for request in &running {
            work[request.key.worker.0 as usize] += 1;
        }
        if now_ms % REPORTED_EVERY_MS == 0 {
            for (router, at) in routers.iter_mut().zip(0..) {
                report(router, at, &work, &applied);
            }
        }
        if now_ms >= 1_000 {
            let most = work.iter().max().copied().unwrap_or(0);
            let mean = running.len() as f64 / f64::from(WORKERS);
            spreads += f64::from(most) / mean;
            samples += 1;
        }
    }
    spreads / f64::from(samples)
}

fn router(seed: u64) -> FleetState {
    let policy = PolicyConfig {
        seed,
        ..PolicyConfig::default()
    };
    let mut router = FleetState::new(vec![Vec::new()], policy);
    for _ in 0..WORKERS {
        let worker = router.add();
        let info = info(&format!("e{worker}"));
        router.join(worker, info, NOW).expect("joined");
    }
    router
}

fn report(router: &mut FleetState, at: usize, work: &[u32], applied: &[[u64; ROUTERS]]) {
    let keys: Vec<WorkerKey> = router
        .workers()
        .filter_map(|state| {
            let connection = state.connection?;
            Some(WorkerKey {
                worker: state.view.id,
                connection,
            })
        })
        .collect();
    for key in keys {
        let worker = key.worker.0 as usize;
        let load = LoadReport {
            applied_legs: Some(applied[worker][at]),
            running_requests: work[worker],
            running_sequences: work[worker],
            running_kv_tokens: 150 * u64::from(work[worker]),
            free_blocks: 10_000 - 10 * work[worker],
            ..LoadReport::default()
        };
        router.on_report(key, Some(&load), NOW);
        router.recount(key);
    }
}

#[test]
fn routers_spread_their_requests_though_their_reports_are_late() {
    // So often that a worker has one request at a time, and half of one.
    for (every_ms, bound) in [(50, 3.2), (100, 4.5)] {
        for seed in 0..5 {
            let own = spread(every_ms, [seed, seed + 100, seed + 200, seed + 300]);
            assert!(own < bound, "{own} with a request every {every_ms} ms");
        }
        let common = spread(every_ms, [7; ROUTERS]);
        assert!(common > 1.2 * bound, "one order for all: {common}");
    }
}
